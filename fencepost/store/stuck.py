"""Sessions that may be stuck, as the tables show it: looked for as the recovery scan looks, changed by no look.

Everything is bounded. Wakes are found by the scan's partial indexes; claims and what was put aside are tables that
hold a row for each session at work and for each turn that was cut off, not for each session there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, Boolean, ColumnClause, Text, bindparam, column, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.ownership import Token
from fencepost.store import continuation, ownership, rebuild, tables
from fencepost.store.event_log import CLOCK
from fencepost.store.rebuild import Difference
from fencepost.store.recovery import UNOWNED, WAKE_LOST_MS, Abandoned, Wake
from fencepost.store.statement import Statement

_RECENT_MESSAGES = 50


@dataclass(frozen=True, slots=True)
class SeenClaim:
    """A claim as seen without a lock. `left` is what its lease has, in milliseconds, negative once it ran out."""

    seen: Abandoned
    left: int
    error: str | None

    @property
    def session_id(self) -> str:
        """Give the session."""
        return self.seen.session_id


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wake that nobody has followed, and its age in milliseconds."""

    wake: Wake
    age: int


@dataclass(frozen=True, slots=True)
class PutAside:
    """A continuation that was put aside, with its error, while its session has not gone on since."""

    session_id: str
    execution_id: str
    phase: str
    error: str
    exists: bool


# A null array stands for all sessions: each statement then has a plan of its own, by its index.
def _among(alias: str, named: bool) -> str:
    return f"{alias}.session_id = ANY(:ids)" if named else "true"


def _statement(sql: str, named: bool, *columns: ColumnClause[Any]) -> Statement:
    expression = text(sql)
    if named:
        expression = expression.bindparams(bindparam("ids", type_=ARRAY(Text)))
    return Statement(expression.columns(*columns))


def _claims(named: bool) -> Statement:
    return _statement(
        f"""
        SELECT x.session_id, x.id, x.owner_id, x.expires_at, x.expires_at - {CLOCK} AS left, x.recovery_error
        FROM session_execution AS x WHERE {_among("x", named)}
        ORDER BY x.time_created, x.session_id LIMIT :limit
        """,  # noqa: S608 - constants
        named,
        *(column(name) for name in ("session_id", "id", "owner_id")),
        *(column(name, BigInteger) for name in ("expires_at", "left")),
        column("recovery_error"),
    )


def _wakes(named: bool, table: str, name: str, still_open: str) -> Statement:
    return _statement(
        f"""
        SELECT {name} AS id, w.session_id, w.wake_attempts, {CLOCK} - w.time_created AS age FROM {table} AS w
        WHERE w.wake_pending AND {still_open} AND {_among("w", named)}
        AND w.time_created + :age <= {CLOCK} AND {UNOWNED}
        ORDER BY w.wake_attempts DESC, w.time_created DESC LIMIT :limit
        """,  # noqa: S608 - constants
        named,
        *(column(name) for name in ("id", "session_id")),
        *(column(name, BigInteger) for name in ("wake_attempts", "age")),
    )


def _aside(named: bool) -> Statement:
    # A session that answered after the turn was cut off has gone on: what was put aside is history.
    return _statement(
        f"""
        SELECT w.session_id, w.execution_id, w.phase, w.recovery_error, s.id IS NOT NULL AS exists
        FROM session_recovery AS w LEFT JOIN session AS s ON s.id = w.session_id
        WHERE w.recovery_error IS NOT NULL AND {_among("w", named)}
        AND NOT EXISTS (
            SELECT FROM session_message AS m
            WHERE m.session_id = w.session_id AND m.time_created > w.time_created AND m.type = 'assistant'
        )
        ORDER BY w.time_created DESC LIMIT :limit
        """,  # noqa: S608 - constants
        named,
        *(column(name) for name in ("session_id", "execution_id", "phase", "recovery_error")),
        column("exists", Boolean),
    )


_CLAIMS = {named: _claims(named) for named in (False, True)}
_ASIDE = {named: _aside(named) for named in (False, True)}
_KINDS: tuple[tuple[Literal["recovery", "input"], dict[bool, Statement]], ...] = (
    (
        "recovery",
        {
            named: _wakes(named, "session_recovery", "w.execution_id", "w.recovery_error IS NULL")
            for named in (False, True)
        },
    ),
    (
        "input",
        {named: _wakes(named, "session_input", "w.id", "w.promoted_seq IS NULL") for named in (False, True)},
    ),
)


def _given(ids: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if ids is None else {"ids": list(ids)}


async def claims(conn: AsyncConnection, limit: int, ids: Sequence[str] | None = None) -> list[SeenClaim]:
    """Give the claims of all sessions or of these, the oldest first."""
    rows = await _CLAIMS[ids is not None].all(conn, limit=limit, **_given(ids))
    return [
        SeenClaim(Abandoned(row.session_id, row.id, row.owner_id, row.expires_at), row.left, row.recovery_error)
        for row in rows
    ]


async def wakes(
    conn: AsyncConnection, limit: int, ids: Sequence[str] | None = None, age: int = WAKE_LOST_MS
) -> list[Waiting]:
    """Give the wakes older than this that wait in sessions which nobody owns, those tried most often first; of input
    one for each session."""
    found: dict[tuple[str, str], Waiting] = {}
    for kind, statements in _KINDS:
        for row in await statements[ids is not None].all(conn, limit=limit, age=age, **_given(ids)):
            wake = Waiting(Wake(kind, row.id, row.session_id, row.wake_attempts), row.age)
            found.setdefault((kind, row.id if kind == "recovery" else row.session_id), wake)
    return list(found.values())


async def put_aside(conn: AsyncConnection, limit: int, ids: Sequence[str] | None = None) -> list[PutAside]:
    """Give the continuations that were put aside, the newest first."""
    rows = await _ASIDE[ids is not None].all(conn, limit=limit, **_given(ids))
    return [PutAside(row.session_id, row.execution_id, row.phase, row.recovery_error, row.exists) for row in rows]


_RECENT = Statement(
    text(
        """
        SELECT session_id FROM (
            SELECT session_id, time_created FROM session_message ORDER BY time_created DESC LIMIT :messages
        ) AS newest GROUP BY session_id ORDER BY max(time_created) DESC LIMIT :limit
        """
    ).columns(column("session_id"))
)


async def recent(conn: AsyncConnection, limit: int) -> list[str]:
    """Give sessions whose messages are among the newest of all, the newest first: found by an index, and so perhaps
    fewer than the limit when few sessions say much."""
    rows = await _RECENT.all(conn, messages=limit * _RECENT_MESSAGES, limit=limit)
    return [row.session_id for row in rows]


_aside_row = tables.session_recovery
_TRY_ASIDE = Statement(
    select(_aside_row)
    .where(_aside_row.c.execution_id == bindparam("id"), _aside_row.c.recovery_error.is_not(None))
    .with_for_update(skip_locked=True)
)
_LIFT = Statement(
    update(_aside_row)
    .where(_aside_row.c.execution_id == bindparam("id"))
    .values(recovery_error=None, wake_pending=True, wake_attempts=0)
)


async def reconsider(conn: AsyncConnection, execution_id: str) -> bool:
    """Look at a continuation that was put aside once more, and let it wait for its wake again if nothing is wrong with
    it any more. One that was given up, or overtaken, stays where it is."""
    row = await _TRY_ASIDE.first(conn, id=execution_id)
    if row is None or await continuation.fault(conn, row) is not None:
        return False
    await _LIFT.run(conn, id=execution_id)
    return True


async def replace_projection(conn: AsyncConnection, session_id: str) -> list[Difference] | None:
    """Rebuild a session's projection unless somebody works on it: then None. Raises what `rebuild` raises."""
    locked = await ownership.lock(conn, Token(session_id=session_id, execution_id="", owner_id=""))
    if locked.late or (locked.held is not None and locked.held.expires_at > locked.head.now):
        return None
    return await rebuild.rebuild(conn, session_id)
