"""Where a user's interrupt belongs in a session's log."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.clean import clean_text
from fencepost.domain.events import StepInterrupted
from fencepost.store import event_log, tables


@dataclass(frozen=True, slots=True)
class Place:
    """The log's last sequence, and whether the log knows the interrupt already."""

    head: int
    recorded: bool


async def place(conn: AsyncConnection, session_id: str, interrupt_id: str) -> Place:
    """Find an interrupt's place in the log."""
    log = tables.event
    known = exists().where(
        log.c.aggregate_id == session_id,
        log.c.type == StepInterrupted.stored_type(),
        log.c.data["interruptID"].astext == clean_text(interrupt_id),
    )
    recorded = bool((await conn.execute(select(known))).scalar_one())
    return Place(await event_log.latest(conn, session_id), recorded)
