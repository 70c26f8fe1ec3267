"""Where a user's interrupt belongs in a session's log."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.clean import clean_text
from fencepost.domain.events import StepInterrupted
from fencepost.store import event_log, tables


@dataclass(frozen=True, slots=True)
class Place:
    """The log's last sequence, and whether an earlier run has recorded the interrupt already."""

    head: int
    recorded: bool


async def place(conn: AsyncConnection, session_id: str, interrupt_id: str, run_id: str) -> Place:
    """Find an interrupt's place in the log, for this run.

    What the run itself has recorded does not count: it knows which interrupts it has had, and when Temporal makes it do
    a task again it has to take the same way.
    """
    log, ledger = tables.event, tables.execution_ledger
    known = await conn.execute(
        select(ledger.c.owner_id)
        .select_from(log.outerjoin(ledger, ledger.c.execution_id == log.c.data["executionID"].astext))
        .where(
            log.c.aggregate_id == session_id,
            log.c.type == StepInterrupted.stored_type(),
            log.c.data["interruptID"].astext == clean_text(interrupt_id),
        )
    )
    recorded = any(row.owner_id != run_id for row in known)
    return Place(await event_log.latest(conn, session_id), recorded)
