"""The ledger: how far each execution has come. One row per execution, moved forward only.

Temporal may run a database activity more than once, even at the same time and with the same token; the ledger is what
makes the second one answer with the first one's result and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.ownership import Stage, Token, is_before
from fencepost.store import tables


@dataclass(slots=True)
class Ledger:
    """`results` holds what each stage of the current step gave back, by stage."""

    execution_id: str
    step: int
    stage: Stage
    attempt: int
    continuations: int
    results: dict[str, Any] = field(default_factory=dict)

    def passed(self, step: int, stage: Stage) -> bool:
        """Say whether this execution has reached or passed the stage of that step."""
        return not is_before(self.step, self.stage, step, stage)


async def find(conn: AsyncConnection, execution_id: str) -> Ledger | None:
    """Give an execution's ledger. Read it in a statement after the execution row's lock."""
    table = tables.execution_ledger
    row = (await conn.execute(select(table).where(table.c.execution_id == execution_id))).first()
    return None if row is None else ledger_of(row)


def ledger_of(row: Row[Any]) -> Ledger:
    """Give the ledger that a row with its columns holds."""
    return Ledger(row.execution_id, row.step, row.stage, row.attempt, row.continuations, row.result or {})


async def require(conn: AsyncConnection, token: Token) -> Ledger:
    """Give the ledger of the held token. Raises OwnershipLostError when the execution was never recorded."""
    ledger = await find(conn, token.execution_id)
    if ledger is None:
        raise OwnershipLostError(f"execution {token.execution_id} of {token.session_id} has no ledger")
    return ledger


async def given_back(conn: AsyncConnection, token: Token) -> Ledger | None:
    """Give the ledger of an execution that its own run has released, None otherwise.

    A signal that arrives during the release makes Temporal run the whole last workflow task again: what was asked
    before the release is asked once more, and answered from here.
    """
    ledger = await find(conn, token.execution_id)
    return ledger if ledger is not None and ledger.stage == "released" and ledger.results.get("released") else None


async def open_ledger(
    conn: AsyncConnection,
    token: Token,
    continuations: int,
    now: int,
    *,
    stage: Stage = "claimed",
    results: dict[str, Any] | None = None,
) -> None:
    """Record a claim: the execution begins at step 0, stage claimed, or ends at once, stage released."""
    await conn.execute(
        insert(tables.execution_ledger).values(
            execution_id=token.execution_id,
            session_id=token.session_id,
            owner_id=token.owner_id,
            step=0,
            stage=stage,
            attempt=0,
            continuations=continuations,
            result=results or {},
            time_created=now,
            time_updated=now,
        )
    )


async def move(conn: AsyncConnection, ledger: Ledger, step: int, stage: Stage, now: int, **changes: Any) -> None:
    """Move the ledger, by compare-and-set. `changes` are columns besides step and stage, and `results`."""
    table = tables.execution_ledger
    if "results" in changes:
        changes["result"] = changes.pop("results")
    moved = await conn.execute(
        update(table)
        .where(
            table.c.execution_id == ledger.execution_id,
            table.c.step == ledger.step,
            table.c.stage == ledger.stage,
            table.c.attempt == ledger.attempt,
        )
        .values(step=step, stage=stage, time_updated=now, **changes)
    )
    if moved.rowcount != 1:
        raise OwnershipLostError(f"execution {ledger.execution_id} was moved by another hand")
