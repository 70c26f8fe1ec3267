"""Moving a session: where it works changes, and work that was begun for the old place is stale from that moment on."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import InvalidInputError
from fencepost.domain.events import Moved
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.ownership import OwnerRun, TakeoverReason, Token, takeover_reason
from fencepost.store import claims, event_log, inbox, ledger, ownership, sessions, tables
from fencepost.store.claims import AskAgainError, Seen
from fencepost.store.event_log import Entry
from fencepost.store.ownership import Held
from fencepost.store.sessions import Session

WORKSPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Move:
    """The session as it is now, and whether it was somewhere else before. `fenced` is the execution that lost it, if
    one was at work for the old place; `owed` says that there is something to run at the new one."""

    session: Session
    moved: bool
    fenced: str | None = None
    owed: bool = False


def checked(location: Location) -> Location:
    """Give the location in its plain spelling. Raises InvalidInputError for what cannot be one."""
    directory, workspace = location.directory, location.workspace_id
    if not directory.startswith("/"):
        raise InvalidInputError(f"a session's directory must be an absolute path, not {directory!r}")
    if "\0" in directory:
        raise InvalidInputError(f"no directory has a NUL character in its name: {directory!r}")
    try:
        directory.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"the directory's name is not text in UTF-8: {directory!a}: rename it") from None
    if workspace is not None and WORKSPACE.fullmatch(workspace) is None:
        raise InvalidInputError(
            f"{workspace!a} is no workspace id: up to 63 letters, digits, `.`, `_` or `-`, as workers have it"
        )
    return Location(directory=str(PurePosixPath("/", directory.lstrip("/"))), workspace_id=workspace)


async def move(conn: AsyncConnection, session_id: str, location: Location, seen: Seen | None) -> Move:
    """Move the session, in one transaction; to where it is already changes nothing. No file is touched.

    What an execution had begun for the old place is settled as interrupted, and its claim is deleted: whatever of it is
    still under way finds that it owns nothing. `seen` is what was asked of Temporal about the owner's run. Raises
    NotFoundError, and AskAgainError when the session is at work and that is another owner's answer, or none.
    """
    locked = await ownership.lock(conn, Token(session_id=session_id, execution_id="", owner_id=""))
    held, head = locked.held, locked.head
    session = await sessions.get(conn, session_id)
    if session.location == location:
        return Move(session, moved=False)
    fenced = None
    if held is None:
        if locked.late:
            raise AskAgainError
    elif await _has_begun(conn, held):
        owner = held.token
        if seen is None or (seen.owner.execution_id, seen.owner.owner_id) != (owner.execution_id, owner.owner_id):
            raise AskAgainError
        # That it goes on elsewhere is no fault of the turn's, and no reason to give it up.
        await claims.reconcile(conn, held, _reason(seen.run), sys.maxsize)
        await claims.free(conn, session_id)
        fenced = owner.execution_id
    event = Moved(
        timestamp=head.now,
        session_id=session_id,
        location=location,
        subdirectory=await _within_project(conn, session_id, location.directory),
    )
    await event_log.append(conn, head, [Entry(fresh_id("evt"), event)])
    owed = await inbox.has_pending(conn, session_id, waking_only=True)
    return Move(await sessions.get(conn, session_id), moved=True, fenced=fenced, owed=owed)


async def _has_begun(conn: AsyncConnection, held: Held) -> bool:
    """Say whether an execution has a step in hand, which has been told the place. Before and after it nothing has."""
    done = await ledger.find(conn, held.token.execution_id)
    return done is None or done.stage in ("prepared", "requested")


def _reason(run: OwnerRun) -> TakeoverReason:
    """A turn that somebody has stopped at Temporal stays stopped; any other goes on at the new place."""
    reason = takeover_reason(run)
    return reason if reason in ("terminated", "cancelled") else "moved"


async def _within_project(conn: AsyncConnection, session_id: str, directory: str) -> str | None:
    """Give the directory as seen from the root of the session's project, None when it is the root or elsewhere."""
    project, session = tables.project, tables.session
    found = await conn.execute(
        select(project.c.worktree).join(session, session.c.project_id == project.c.id).where(session.c.id == session_id)
    )
    root, place = PurePosixPath(found.scalar_one()), PurePosixPath(directory)
    if ".." in place.parts or place == root or not place.is_relative_to(root):
        return None
    return str(place.relative_to(root))
