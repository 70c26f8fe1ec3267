"""The ledger: how far each execution has come. One row per execution, moved forward only.

Temporal may run a database activity more than once, even at the same time and with the same token; the ledger is what
makes the second one answer with the first one's result and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.ownership import Stage, Token, is_before
from fencepost.store import leftovers, tables
from fencepost.store.statement import Statement


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


_table = tables.execution_ledger
_FIND = Statement(select(_table).where(_table.c.execution_id == bindparam("execution_id")))
_OPEN = Statement(insert(_table).values({column.name: bindparam(column.name) for column in _table.c}))
_move = (
    update(_table)
    .where(
        _table.c.execution_id == bindparam("named"),
        _table.c.step == bindparam("old_step"),
        _table.c.stage == bindparam("old_stage"),
        _table.c.attempt == bindparam("old_attempt"),
    )
    .values({name: bindparam(name) for name in ("step", "stage", "attempt", "continuations", "result", "time_updated")})
)
_MOVE, _MOVE_CLOSING = Statement(_move), Statement(_move.add_cte(*leftovers.CLOSING))


async def find(conn: AsyncConnection, execution_id: str) -> Ledger | None:
    """Give an execution's ledger. Read it in a statement after the execution row's lock."""
    row = await _FIND.first(conn, execution_id=execution_id)
    return None if row is None else ledger_of(execution_id, row)


def ledger_of(execution_id: str, row: Any) -> Ledger:
    """Give the execution's ledger that a row with its columns holds."""
    return Ledger(execution_id, row.step, row.stage, row.attempt, row.continuations, row.result or {})


async def given_back(conn: AsyncConnection, token: Token, *, settled: bool = False) -> Ledger | None:
    """Give the ledger of an execution that its own run has released, or with `settled` one that was taken over after a
    settlement of its last step; None otherwise.

    A signal that arrives during the release, or a worker's death, makes Temporal run the whole last workflow task
    again: what was asked before is asked once more, and answered from here.
    """
    ledger = await find(conn, token.execution_id)
    if ledger is None or ledger.stage != "released":
        return None
    return ledger if ledger.results.get("released") or (settled and "continued" in ledger.results) else None


async def open_ledger(
    conn: AsyncConnection,
    token: Token,
    continuations: int,
    now: int,
    *,
    stage: Stage = "claimed",
    results: dict[str, Any] | None = None,
) -> Ledger:
    """Record a claim: the execution begins at step 0, stage claimed, or ends at once, stage released."""
    await _OPEN.run(
        conn,
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
    return Ledger(token.execution_id, 0, stage, 0, continuations, results or {})


async def move(
    conn: AsyncConnection,
    ledger: Ledger,
    step: int,
    stage: Stage,
    now: int,
    *,
    attempt: int | None = None,
    continuations: int | None = None,
    results: dict[str, Any] | None = None,
    closing: str | None = None,
) -> None:
    """Move the ledger, by compare-and-set; what is not given stays. The one in hand is changed too. With `closing` the
    books of that session are closed in the same statement, as `leftovers.close_books` does."""
    statement = _MOVE if closing is None else _MOVE_CLOSING
    moved = await statement.run(
        conn,
        **({} if closing is None else {"closed_session": closing}),
        named=ledger.execution_id,
        old_step=ledger.step,
        old_stage=ledger.stage,
        old_attempt=ledger.attempt,
        step=step,
        stage=stage,
        attempt=ledger.attempt if attempt is None else attempt,
        continuations=ledger.continuations if continuations is None else continuations,
        result=ledger.results if results is None else results,
        time_updated=now,
    )
    if moved != 1:
        raise OwnershipLostError(f"execution {ledger.execution_id} was moved by another hand")
    ledger.step, ledger.stage = step, stage
    ledger.attempt = ledger.attempt if attempt is None else attempt
    ledger.continuations = ledger.continuations if continuations is None else continuations
    ledger.results = ledger.results if results is None else results
