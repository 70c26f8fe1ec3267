"""The fence: every write of running work happens in a transaction that holds the execution row with the right token.

Lock order, always: the execution row, then the session's `event_sequence` row. Whatever decides by looking looks in a
later statement than both locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, column, literal_column, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import LeaseExpiredError, NotFoundError, OwnershipLostError
from fencepost.domain.ownership import Token
from fencepost.store import event_log, tables
from fencepost.store.event_log import CLOCK, Entry, Head
from fencepost.store.ledger import Ledger, ledger_of
from fencepost.store.statement import Statement, driver_of


@dataclass(frozen=True, slots=True)
class Lease:
    """Times in milliseconds: how long a renewal lasts, and how old it gets before an append renews it."""

    length: int = 60_000
    renew_after: int = 10_000


@dataclass(slots=True)
class Held:
    """The row and the log's end, both locked, both ours until the transaction ends."""

    token: Token
    head: Head
    assistant_message_id: str | None
    phase: str
    expires_at: int
    ledger: Ledger | None = None
    """How far the execution has come; `hold` reads it, since it changes only under the row's lock."""
    owed: bool = True
    """Whether a continuation may wait to be promoted."""


_execution = tables.session_execution
_named = _execution.c.session_id == bindparam("named")
LOCKED = (
    *(column(name) for name in ("seq", "now", "id", "owner_id", "assistant_message_id", "phase", "expires_at")),
    *(column(name) for name in ("late", "owed", "step", "stage", "attempt", "continuations")),
    column("result", JSONB),
)
"""The columns that a function of the database gives which gets both locks."""
_LOCK = Statement(text("SELECT * FROM fencepost_lock(:session_id, :execution_id)").columns(*LOCKED))
_RENEW = Statement(update(_execution).where(_named).values(expires_at=bindparam("expires_at")))
_SET_PHASE = Statement(
    update(_execution)
    .where(_named)
    .values(phase=bindparam("phase"), assistant_message_id=bindparam("assistant_message_id"))
)
_OWNER = Statement(
    select(_execution.c.id, _execution.c.owner_id, _execution.c.expires_at, literal_column(CLOCK).label("now")).where(
        _named
    )
)


@dataclass(frozen=True, slots=True)
class Locked:
    """What was found when both were locked: the log's end, whose claim there is, and the wanted execution's ledger."""

    head: Head
    held: Held | None
    ledger: Ledger | None
    late: bool = False
    """A claim was inserted while this transaction waited for the log: it is there, and not locked."""


async def lock(conn: AsyncConnection, token: Token) -> Locked:
    """Lock the session's execution row, whoever owns it, then the log's end, and read the token's ledger: one function
    of the database, in which each statement sees what the ones before it have waited for.

    Raises NotFoundError for an unknown session.
    """
    assert driver_of(conn).is_in_transaction(), "outside a transaction a lock lasts for its statement"
    return locked_by(token, await _LOCK.first(conn, session_id=token.session_id, execution_id=token.execution_id))


def locked_by(token: Token, found: Any) -> Locked:
    """Read a row of `LOCKED`. Raises NotFoundError for an unknown session."""
    if found.seq is None:
        raise NotFoundError(f"no session {token.session_id}: create it first, or check the id")
    head = Head(token.session_id, found.seq, found.now)
    held = None
    if found.id is not None:
        owner = Token(session_id=token.session_id, execution_id=found.id, owner_id=found.owner_id)
        held = Held(owner, head, found.assistant_message_id, found.phase, found.expires_at, owed=found.owed)
    ledger = ledger_of(token.execution_id, found) if found.stage is not None else None
    return Locked(head, held, ledger, found.late)


async def hold(
    conn: AsyncConnection, token: Token, *, unexpired: bool = False, locked: Locked | None = None, found: Any = None
) -> Held:
    """Lock the execution row and the log's end for this token.

    Raises OwnershipLostError when the row is gone or another's, and with `unexpired` LeaseExpiredError, which is one
    too, when the lease has run out.
    `locked` is what this transaction has locked already, `found` the row of `LOCKED` that told of it.
    """
    try:
        locked = locked or (await lock(conn, token) if found is None else locked_by(token, found))
    except NotFoundError:
        raise OwnershipLostError(f"session {token.session_id} of execution {token.execution_id} is gone") from None
    held = locked.held
    if held is None or (held.token.execution_id, held.token.owner_id) != (token.execution_id, token.owner_id):
        raise OwnershipLostError(f"execution {token.execution_id} does not own session {token.session_id} any more")
    if unexpired and held.expires_at <= held.head.now:
        raise LeaseExpiredError(f"the lease of execution {token.execution_id} ran out")
    held.ledger = locked.ledger
    return held


async def renew(conn: AsyncConnection, held: Held, lease: Lease) -> None:
    """Give the held row a whole lease from now on."""
    held.expires_at = held.head.now + lease.length
    await _RENEW.run(conn, named=held.token.session_id, expires_at=held.expires_at)


async def keep(conn: AsyncConnection, held: Held, lease: Lease) -> None:
    """Renew the lease if it has aged."""
    if held.expires_at - lease.length + lease.renew_after <= held.head.now:
        await renew(conn, held, lease)


async def append(
    conn: AsyncConnection,
    held: Held,
    entries: Sequence[Entry],
    lease: Lease,
    *,
    message: tuple[str, dict[str, Any]] | None = None,
) -> list[int]:
    """The fenced append: add events under the held token, renewing the lease when it has aged.

    `message` is as in `event_log.append`.
    """
    seqs = await event_log.append(conn, held.head, entries, message=message)
    await keep(conn, held, lease)
    return seqs


async def set_phase(conn: AsyncConnection, held: Held, phase: str, assistant_message_id: str | None = None) -> None:
    """Record the phase and the assistant message of the step in hand."""
    if (held.phase, held.assistant_message_id) == (phase, assistant_message_id):
        return
    held.phase, held.assistant_message_id = phase, assistant_message_id
    await _SET_PHASE.run(conn, named=held.token.session_id, phase=phase, assistant_message_id=assistant_message_id)


@dataclass(frozen=True, slots=True)
class Owner:
    """An execution row as seen without a lock: whom to ask Temporal about."""

    execution_id: str
    owner_id: str
    expires_at: int
    expired: bool


async def owner_of(conn: AsyncConnection, session_id: str) -> Owner | None:
    """Give the session's execution row as it is now, None when nobody claims it."""
    row = await _OWNER.first(conn, named=session_id)
    return None if row is None else Owner(row.id, row.owner_id, row.expires_at, row.expires_at <= row.now)
