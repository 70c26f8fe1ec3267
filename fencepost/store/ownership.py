"""The fence: every write of running work happens in a transaction that holds the execution row with the right token.

Lock order, always: the execution row, then the session's `event_sequence` row. Whatever decides by looking looks in a
later statement than both locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import LeaseExpiredError, NotFoundError, OwnershipLostError
from fencepost.domain.ownership import Token
from fencepost.store import event_log, tables
from fencepost.store.event_log import CLOCK, Entry, Head
from fencepost.store.ledger import Ledger, ledger_of


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


_FENCE = text(
    f"""
    SELECT id, owner_id, assistant_message_id, phase, expires_at, {CLOCK} AS now
    FROM session_execution WHERE session_id = :session_id FOR UPDATE
    """
)


_HEAD = text(
    f"""
    SELECT s.seq, {CLOCK} AS now, l.execution_id, l.step, l.stage, l.attempt, l.continuations, l.result
    FROM event_sequence AS s LEFT JOIN execution_ledger AS l ON l.execution_id = :execution_id
    WHERE s.aggregate_id = :session_id FOR UPDATE OF s
    """
).columns(result=JSONB)


async def hold(conn: AsyncConnection, token: Token, *, unexpired: bool = False) -> Held:
    """Lock the execution row and the log's end for this token.

    Raises OwnershipLostError when the row is gone or another's, and with `unexpired` LeaseExpiredError, which is one
    too, when the lease has run out.
    """
    row = (await conn.execute(_FENCE, {"session_id": token.session_id})).first()
    if row is None or (row.id, row.owner_id) != (token.execution_id, token.owner_id):
        raise OwnershipLostError(f"execution {token.execution_id} does not own session {token.session_id} any more")
    # The clock was read when the row was found; waiting for its lock may have taken long since, so the head's later
    # reading decides.
    found = (await conn.execute(_HEAD, {"session_id": token.session_id, "execution_id": token.execution_id})).first()
    if found is None:
        raise NotFoundError(f"no session {token.session_id}: create it first, or check the id")
    head = Head(token.session_id, found.seq, found.now)
    if unexpired and row.expires_at <= head.now:
        raise LeaseExpiredError(f"the lease of execution {token.execution_id} ran out")
    ledger = ledger_of(found) if found.execution_id is not None else None
    return Held(token, head, row.assistant_message_id, row.phase, row.expires_at, ledger)


async def renew(conn: AsyncConnection, held: Held, lease: Lease) -> None:
    """Give the held row a whole lease from now on."""
    execution = tables.session_execution
    held.expires_at = held.head.now + lease.length
    await conn.execute(
        update(execution).where(execution.c.session_id == held.token.session_id).values(expires_at=held.expires_at)
    )


async def append(conn: AsyncConnection, held: Held, entries: Sequence[Entry], lease: Lease) -> list[int]:
    """The fenced append: add events under the held token, renewing the lease when it has aged."""
    seqs = await event_log.append(conn, held.head, entries)
    if held.expires_at - lease.length + lease.renew_after <= held.head.now:
        await renew(conn, held, lease)
    return seqs


async def set_phase(conn: AsyncConnection, held: Held, phase: str, assistant_message_id: str | None = None) -> None:
    """Record the phase and the assistant message of the step in hand."""
    execution = tables.session_execution
    held.phase, held.assistant_message_id = phase, assistant_message_id
    await conn.execute(
        update(execution)
        .where(execution.c.session_id == held.token.session_id)
        .values(phase=phase, assistant_message_id=assistant_message_id)
    )


@dataclass(frozen=True, slots=True)
class Owner:
    """An execution row as seen without a lock: whom to ask Temporal about."""

    execution_id: str
    owner_id: str
    expires_at: int
    expired: bool


async def owner_of(conn: AsyncConnection, session_id: str) -> Owner | None:
    """Give the session's execution row as it is now, None when nobody claims it."""
    execution = tables.session_execution
    row = (
        await conn.execute(
            select(execution.c.id, execution.c.owner_id, execution.c.expires_at, text(f"{CLOCK} AS now")).where(
                execution.c.session_id == session_id
            )
        )
    ).first()
    return None if row is None else Owner(row.id, row.owner_id, row.expires_at, row.expires_at <= row.now)
