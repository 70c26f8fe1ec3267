"""Sessions: created and switched through the log, read, archived and deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy import delete as remove
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost import __version__
from fencepost.domain.clean import clean_text
from fencepost.domain.errors import ClaimRefusedError, NotFoundError
from fencepost.domain.events import AgentSwitchedEvent, ModelSwitchedEvent, SessionCreated
from fencepost.domain.ids import derived_id, fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.messages import CacheTokens, Tokens
from fencepost.domain.models import ModelRef
from fencepost.store import event_log, replay, tables
from fencepost.store.event_log import Entry
from fencepost.store.ownership import owner_of
from fencepost.store.statement import Statement


@dataclass(frozen=True, slots=True)
class Session:
    """A session's row. `agent` and `model` are None when the configured default is meant; cost is in US dollars."""

    id: str
    title: str
    location: Location
    agent: str | None
    model: ModelRef | None
    cost: float
    tokens: Tokens
    time_created: int
    time_updated: int
    time_archived: int | None


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a client may say of a session when it creates it."""

    location: Location
    agent: str | None = None
    model: ModelRef | None = None
    title: str | None = None


async def create(conn: AsyncConnection, session_id: str, wanted: NewSession) -> Session:
    """Create the session, or give the existing one unchanged, whatever else was wanted."""
    head = await event_log.begin(conn, session_id)
    if head.seq < 0:
        created = datetime.fromtimestamp(head.now / 1000, UTC).isoformat(timespec="milliseconds")
        directory = wanted.location.directory
        info: dict[str, Any] = {
            "id": session_id,
            "projectID": derived_id("prj", directory),
            "workspaceID": wanted.location.workspace_id,
            "slug": session_id[-8:].lower(),
            "directory": directory,
            "title": wanted.title or f"New session - {created.replace('+00:00', 'Z')}",
            "version": __version__,
            "agent": wanted.agent,
            "model": wanted.model.to_wire() if wanted.model else None,
            "timeCreated": head.now,
            "timeUpdated": head.now,
        }
        present = {name: value for name, value in info.items() if value is not None}
        event = SessionCreated(timestamp=head.now, session_id=session_id, info=present)
        await event_log.append(conn, head, [Entry(derived_id("evt", "created", session_id), event)])
    return await get(conn, session_id)


_GET = Statement(select(tables.session).where(tables.session.c.id == bindparam("id")))


async def get(conn: AsyncConnection, session_id: str) -> Session:
    """Give one session. Raises NotFoundError."""
    row = await _GET.first(conn, id=session_id)
    if row is None:
        raise NotFoundError(f"no session {session_id}: create it first, or check the id")
    return session_of(row._asdict())


async def switch_agent(conn: AsyncConnection, session_id: str, agent: str) -> Session:
    """Let the session's next steps be another agent's; the one that it has changes nothing. Whether workers know the
    agent shows when they run it. Raises NotFoundError."""
    head = await event_log.lock(conn, session_id)
    session, agent = await get(conn, session_id), clean_text(agent)
    if session.agent == agent:
        return session
    about = {"timestamp": head.now, "session_id": session_id, "message_id": fresh_id("msg")}
    await event_log.append(conn, head, [Entry(fresh_id("evt"), AgentSwitchedEvent(**about, agent=agent))])
    return await get(conn, session_id)


_DEFAULT_VARIANT = "default"


async def switch_model(conn: AsyncConnection, session_id: str, model: ModelRef) -> Session:
    """Let the session's next steps ask another model; the one that it has changes nothing, no variant being the same
    as the variant `default`. Raises NotFoundError."""
    head = await event_log.lock(conn, session_id)
    session = await get(conn, session_id)
    if session.model is not None and _identity(session.model) == _identity(model):
        return session
    about = {"timestamp": head.now, "session_id": session_id, "message_id": fresh_id("msg")}
    await event_log.append(conn, head, [Entry(fresh_id("evt"), ModelSwitchedEvent(**about, model=model))])
    return await get(conn, session_id)


def _identity(model: ModelRef) -> tuple[str, str, str]:
    return model.provider_id, model.id, model.variant or _DEFAULT_VARIANT


async def archive(conn: AsyncConnection, session_id: str, *, archived: bool = True) -> Session:
    """Put the session away, or take it back; it can be used all the same. No event: it is kept in the row alone.
    Raises NotFoundError."""
    head = await event_log.lock(conn, session_id)
    session = tables.session
    time = head.now if archived else None
    await conn.execute(update(session).where(session.c.id == session_id).values(time_archived=time))
    return await get(conn, session_id)


async def delete(conn: AsyncConnection, session_id: str) -> None:
    """Delete the session: its log, its projection, and what execution has left of it.

    Raises NotFoundError, and ClaimRefusedError while the lease of an execution runs: interrupt the turn first. A
    worker that comes back to a deleted session finds that it owns nothing.
    """
    execution, recovery = tables.session_execution, tables.session_recovery
    await conn.execute(select(execution.c.id).where(execution.c.session_id == session_id).with_for_update())
    head = await event_log.lock(conn, session_id)
    owner = await owner_of(conn, session_id)
    if owner is not None and owner.expires_at > head.now:
        raise ClaimRefusedError(
            f"session {session_id} is at work (execution {owner.execution_id}): interrupt it, and delete it then"
        )
    for table in (execution, recovery):
        await conn.execute(remove(table).where(table.c.session_id == session_id))
    await conn.execute(remove(tables.session).where(tables.session.c.id == session_id))
    await replay.remove(conn, session_id)


def session_of(row: Mapping[Any, Any]) -> Session:
    """Give the session of a row."""
    return Session(
        id=row["id"],
        title=row["title"],
        location=Location(directory=row["directory"], workspace_id=row["workspace_id"]),
        agent=row["agent"],
        model=ModelRef.model_validate(row["model"]) if row["model"] else None,
        cost=row["cost"],
        tokens=Tokens(
            input=row["tokens_input"],
            output=row["tokens_output"],
            reasoning=row["tokens_reasoning"],
            cache=CacheTokens(read=row["tokens_cache_read"], write=row["tokens_cache_write"]),
        ),
        time_created=row["time_created"],
        time_updated=row["time_updated"],
        time_archived=row["time_archived"],
    )
