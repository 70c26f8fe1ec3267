"""Sessions: creation through the log, and reading one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost import __version__
from fencepost.domain.errors import NotFoundError
from fencepost.domain.events import SessionCreated
from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Location
from fencepost.domain.messages import CacheTokens, Tokens
from fencepost.domain.models import ModelRef
from fencepost.store import event_log, tables
from fencepost.store.event_log import Entry


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


async def get(conn: AsyncConnection, session_id: str) -> Session:
    """Give one session. Raises NotFoundError."""
    row = (await conn.execute(select(tables.session).where(tables.session.c.id == session_id))).mappings().first()
    if row is None:
        raise NotFoundError(f"no session {session_id}: create it first, or check the id")
    return _session(row)


def _session(row: Mapping[Any, Any]) -> Session:
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
