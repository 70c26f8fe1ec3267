"""What the recovery scan finds and does, one short transaction each: it is safe from many places at once.

Three kinds of work are found, each in a fixed order and at most so many at a time: claims whose lease has run out,
continuations that nobody has begun, and input whose wake counts as lost. What is found is only a hint; everything is
looked at again under the locks. A row that cannot be right is put aside with its error, and nothing waits behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import BigInteger, bindparam, case, column, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import NotFoundError
from fencepost.domain.ownership import OwnerRun, Token, may_take_over, takeover_reason
from fencepost.store import claims, continuation, event_log, ownership, tables
from fencepost.store.ownership import Held, Lease
from fencepost.store.statement import Statement

MAX_WAKE_ATTEMPTS = 2**53 - 1
"""The most that `wake_attempts` counts to. A row that is there comes first, and its next attempt is number 1."""

WAKE_LOST_MS = 5_000
"""How long after its admission input that nobody has begun counts as never announced. Each attempt after the first
comes at twice the age, so that what cannot be helped costs less and less."""

# Of the statement's beginning, and so the same for the whole of it: what an index can be searched by.
_NOW = "(extract(epoch from statement_timestamp()) * 1000)::bigint"
_execution, _recovery, _inbox = tables.session_execution, tables.session_recovery, tables.session_input


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A claim whose lease has run out, as seen without a lock."""

    session_id: str
    execution_id: str
    owner_id: str
    expires_at: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Something that asks for execution, as seen without a lock: a continuation by its execution's id, or an input."""

    kind: Literal["recovery", "input"]
    id: str
    session_id: str
    attempts: int


Did: TypeAlias = Literal[
    "continued", "settled", "freed", "given-up", "overtaken", "postponed", "quarantined", "woken", "passed"
]
"""What was done for a session. `continued`: settled as interrupted, and a continuation waits for its wake; `settled`:
as interrupted, with nothing to follow; `freed`: nothing had been promoted, or nothing was owed; `given-up`: cut off too
often; `overtaken`: a newer answer is there; `postponed`: its run is open; `passed`: somebody else has it in hand."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done, and the error of what was put aside."""

    did: Did
    error: str | None = None


_EXPIRED = Statement(
    text(
        f"""
        SELECT session_id, id, owner_id, expires_at FROM session_execution
        WHERE expires_at <= {_NOW} AND recovery_error IS NULL
        ORDER BY expires_at, session_id LIMIT :limit
        """
    ).columns(column("session_id"), column("id"), column("owner_id"), column("expires_at", BigInteger))
)
# A session that somebody owns is left to its owner; what was put aside owns nothing. Rows at the maximum come first,
# in an arm of their own: so each arm reads its index in order.
UNOWNED = """NOT EXISTS (
    SELECT FROM session_execution AS e WHERE e.session_id = w.session_id AND e.recovery_error IS NULL
)"""
_WAKES = """
    SELECT {id} AS id, w.session_id, w.wake_attempts FROM {table} AS w
    WHERE w.wake_pending AND {open} AND {attempts} AND {due} AND {unowned}
    ORDER BY w.wake_attempts, w.time_created, {id} LIMIT :limit
"""
_DUE = f"w.time_created + {{lost}} * power(2, LEAST(w.wake_attempts, 40)){{less}} <= {_NOW}"


def _wakes(name: str, table: str, still_open: str, less: str) -> Statement:
    """Write the query for one kind of wake; `less` is taken off the age from which the first attempt is due."""
    due = _DUE.format(lost=WAKE_LOST_MS, less=less)
    given = {"id": name, "table": table, "open": still_open, "unowned": UNOWNED}
    most = _WAKES.format(attempts=f"w.wake_attempts = {MAX_WAKE_ATTEMPTS}", due="true", **given)
    others = _WAKES.format(attempts=f"w.wake_attempts < {MAX_WAKE_ATTEMPTS}", due=due, **given)
    both = f"SELECT * FROM (({most}) UNION ALL ({others})) AS found LIMIT :limit"
    return Statement(text(both).columns(column("id"), column("session_id"), column("wake_attempts", BigInteger)))


_RECOVERIES = _wakes("w.execution_id", "session_recovery", "w.recovery_error IS NULL", f" - {WAKE_LOST_MS}")
_INPUTS = _wakes("w.id", "session_input", "w.promoted_seq IS NULL", "")
# So many rows are looked at for one session that is wanted: most sessions have one or two.
_ROWS_EACH = 20


async def abandoned(conn: AsyncConnection, limit: int) -> list[Abandoned]:
    """Give claims whose lease has run out, those first that ran out first."""
    rows = await _EXPIRED.all(conn, limit=limit)
    return [Abandoned(row.session_id, row.id, row.owner_id, row.expires_at) for row in rows]


async def recoveries(conn: AsyncConnection, limit: int) -> list[Wake]:
    """Give continuations that wait in sessions which nobody owns, those with the fewest attempts first."""
    rows = await _RECOVERIES.all(conn, limit=limit)
    return [Wake("recovery", row.id, row.session_id, row.wake_attempts) for row in rows]


async def lost_inputs(conn: AsyncConnection, limit: int) -> list[Wake]:
    """Give one input for each session that nobody owns, and whose wake counts as lost; fewest attempts first."""
    first: dict[str, Wake] = {}
    for row in await _INPUTS.all(conn, limit=limit * _ROWS_EACH):
        first.setdefault(row.session_id, Wake("input", row.id, row.session_id, row.wake_attempts))
    return list(first.values())[:limit]


_TRY_CLAIM = Statement(
    select(_execution.c.id)
    .where(_execution.c.session_id == bindparam("session_id"), _execution.c.id == bindparam("id"))
    .with_for_update(skip_locked=True)
)
_QUARANTINE_CLAIM = Statement(
    update(_execution)
    .where(
        _execution.c.session_id == bindparam("named"),
        _execution.c.id == bindparam("execution_id"),
        _execution.c.owner_id == bindparam("owner"),
        _execution.c.expires_at == bindparam("expired_at"),
    )
    .values(recovery_error=bindparam("error"))
)


async def reconcile(conn: AsyncConnection, seen: Abandoned, run: OwnerRun, limit: int, lease: Lease) -> Outcome:
    """Settle what an abandoned execution left and delete its claim, or postpone it while its run is open.

    `run` is what Temporal said of the owner's run, asked outside any transaction; `limit` is how many continuations
    one turn may have. Token and expiry are compared again under the row's lock: a claim that was renewed, taken over
    or released meanwhile is passed, as is one that another scan has locked.
    """
    if await _TRY_CLAIM.first(conn, session_id=seen.session_id, id=seen.execution_id) is None:
        return Outcome("passed")
    token = Token(session_id=seen.session_id, execution_id=seen.execution_id, owner_id=seen.owner_id)
    try:
        held = (await ownership.lock(conn, token)).held
    except NotFoundError:
        return await quarantine(conn, seen, f"malformed claim: there is no session {seen.session_id!r}")
    if held is None or held.token != token or held.expires_at != seen.expires_at or held.expires_at > held.head.now:
        return Outcome("passed")
    wrong = await _fault(conn, held)
    if wrong is not None:
        return await quarantine(conn, seen, wrong)
    if run == "open":
        await ownership.renew(conn, held, lease)
        return Outcome("postponed")
    if not may_take_over(run, lease_expired=True):
        return Outcome("passed")
    return await _settle(conn, held, run, limit)


async def _settle(conn: AsyncConnection, held: Held, run: OwnerRun, limit: int) -> Outcome:
    token, assistant = held.token, held.assistant_message_id
    if assistant is not None and await continuation.is_overtaken(conn, token.session_id, assistant, 0):
        await claims.abandon(conn, held)
        return Outcome("overtaken")
    before = held.head.seq
    done = await claims.reconcile(conn, held, takeover_reason(run), limit)
    await claims.free(conn, token.session_id)
    if done.exhausted:
        error = f"given up: the turn was cut off more than {limit} times"
        await continuation.record(conn, token.session_id, token.execution_id, assistant, held.head.now, refused=error)
        return Outcome("given-up", error)
    if done.recorded:
        return Outcome("continued")
    return Outcome("settled" if held.head.seq > before else "freed")


async def _fault(conn: AsyncConnection, held: Held) -> str | None:
    """Say what is wrong with a claim, None when it can be reconciled."""
    token = held.token
    if not token.execution_id or not token.owner_id:
        return "malformed claim: it names no execution or no owner"
    if held.phase not in ("ready", "unknown"):
        return f"malformed claim: there is no phase {held.phase!r}"
    if held.assistant_message_id is None:
        return None
    return await continuation.fault_of_assistant(conn, token.session_id, held.assistant_message_id)


async def quarantine(conn: AsyncConnection, seen: Abandoned, error: str) -> Outcome:
    """Put a claim aside with its error, unless it has changed since it was seen. It is scanned no more, and stays until
    the session is next claimed."""
    changed = await _QUARANTINE_CLAIM.run(
        conn,
        named=seen.session_id,
        execution_id=seen.execution_id,
        owner=seen.owner_id,
        expired_at=seen.expires_at,
        error=error,
    )
    return Outcome("quarantined", error) if changed else Outcome("passed")


_OWNED = Statement(
    select(_execution.c.id).where(
        _execution.c.session_id == bindparam("session_id"), _execution.c.recovery_error.is_(None)
    )
)
_TRY_RECOVERY = Statement(
    select(_recovery)
    .where(
        _recovery.c.execution_id == bindparam("id"),
        _recovery.c.wake_pending,
        _recovery.c.recovery_error.is_(None),
        _recovery.c.wake_attempts == bindparam("attempts"),
    )
    .with_for_update(skip_locked=True)
)


def _next(attempts: Any) -> Any:
    return case((attempts >= MAX_WAKE_ATTEMPTS, 1), else_=attempts + 1)


_COUNT_RECOVERY = Statement(
    update(_recovery)
    .where(_recovery.c.execution_id == bindparam("id"))
    .values(wake_attempts=_next(_recovery.c.wake_attempts))
)
_waking = (
    _inbox.c.session_id == bindparam("named"),
    _inbox.c.wake_pending,
    _inbox.c.promoted_seq.is_(None),
)
_TRY_INPUT = Statement(
    select(_inbox.c.id).where(_inbox.c.id == bindparam("id"), _inbox.c.wake_attempts == bindparam("attempts"), *_waking)
)
# One wake is enough for all that waits there.
_COUNT_INPUTS = Statement(update(_inbox).where(*_waking).values(wake_attempts=_next(_inbox.c.wake_attempts)))


async def take(conn: AsyncConnection, wake: Wake) -> Outcome:
    """Count an attempt at a wake, which the caller then makes, after the commit. Of many who try at the same time one
    gets it; the others pass, as everybody does once the session is owned or the work has begun."""
    row = await (_take_recovery if wake.kind == "recovery" else _take_input)(conn, wake)
    if row is None or await _OWNED.first(conn, session_id=wake.session_id) is not None:
        return Outcome("passed")
    if wake.kind == "input":
        await _COUNT_INPUTS.run(conn, named=wake.session_id)
        return Outcome("woken")
    wrong = await continuation.fault(conn, row)
    if wrong is not None:
        await continuation.quarantine(conn, wake.id, wrong)
        return Outcome("quarantined", wrong)
    await _COUNT_RECOVERY.run(conn, id=wake.id)
    return Outcome("woken")


async def _take_recovery(conn: AsyncConnection, wake: Wake) -> Any:
    return await _TRY_RECOVERY.first(conn, id=wake.id, attempts=wake.attempts)


async def _take_input(conn: AsyncConnection, wake: Wake) -> Any:
    # Whoever promotes input holds this lock too: their rows and these are never locked in two orders.
    try:
        await event_log.lock(conn, wake.session_id)
    except NotFoundError:
        await _COUNT_INPUTS.run(conn, named=wake.session_id)  # so that others get their turn
        return None
    return await _TRY_INPUT.first(conn, id=wake.id, attempts=wake.attempts, named=wake.session_id)
