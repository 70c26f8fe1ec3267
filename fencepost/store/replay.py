"""Replaying a log that was written elsewhere: its events keep their ids, sequences and data, and are projected anew.

A replay schedules nothing and announces nothing. `claim_replay` gives a log to one source, so that no other one can
replay into it; that owner has nothing to do with who runs a session's turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.clean import clean
from fencepost.domain.errors import ClaimRefusedError, EventConflictError, InvalidDurableEventError
from fencepost.store import event_log, tables
from fencepost.store.event_log import Head, StoredEvent
from fencepost.store.projector import Projection


async def replay(
    conn: AsyncConnection, events: Sequence[StoredEvent], owner: str | None = None, *, strict: bool = False
) -> list[int]:
    """Replay events of one or more sessions, each session's in order; gives the sequences that were appended.

    An event that the log has already, exactly so, is passed over. A log that belongs to another owner (see
    `claim_replay`) is passed over as a whole, or refused when `strict`; one without an owner is taken by `owner`.

    Raises InvalidDurableEventError for an unknown or live-only type, data that does not fit or is another session's,
    a sequence that does not follow the log's last one, and an event other than the log's at its sequence;
    EventConflictError for an id that stands for an event elsewhere; ClaimRefusedError for a log that running work
    may append to. The caller's transaction is then to be rolled back.
    """
    appended: list[int] = []
    start = 0
    while start < len(events):
        session_id = events[start].session_id
        end = start
        while end < len(events) and events[end].session_id == session_id:
            end += 1
        appended += await _replay_one(conn, session_id, events[start:end], owner, strict=strict)
        start = end
    return appended


async def replay_all(
    conn: AsyncConnection, events: Sequence[StoredEvent], owner: str | None = None, *, strict: bool = False
) -> list[int]:
    """Replay a chunk of one session's log, the first or a later one; gives the sequences that were appended.

    Raises what `replay` raises, and InvalidDurableEventError when the events are of several sessions or leave a gap.
    """
    for before, event in pairwise(events):
        if event.session_id != before.session_id:
            raise InvalidDurableEventError(
                f"one replay is of one session, not of {before.session_id} and {event.session_id}"
            )
        if event.seq != before.seq + 1:
            raise InvalidDurableEventError(
                f"the events of {event.session_id} to replay are not contiguous: {event.seq} after {before.seq}"
            )
    return await replay(conn, events, owner, strict=strict)


async def _replay_one(
    conn: AsyncConnection, session_id: str, events: Sequence[StoredEvent], owner: str | None, *, strict: bool
) -> list[int]:
    # In the order of the fence: the execution row, then the log.
    execution = tables.session_execution
    working = (
        await conn.execute(select(execution.c.id).where(execution.c.session_id == session_id).with_for_update())
    ).scalar_one_or_none()
    head = await event_log.begin(conn, session_id)
    if not await _may_replay(conn, session_id, owner, strict=strict):
        return []
    stored = await _stored(conn, session_id, [event.seq for event in events])
    projection = Projection(conn)
    rows = []
    for event in events:
        _check(event, head, stored.get(event.seq))
        if event.seq <= head.seq:
            continue
        if working is not None:
            raise ClaimRefusedError(f"execution {working} works on session {session_id}: replay when it has ended")
        data = clean(event.data)
        # Projected is the decoded event; stored is what came, so that it is the same event when it comes again.
        await projection.apply(StoredEvent(event.id, session_id, event.seq, event.type, data).decode(), event.seq)
        head.seq = event.seq
        rows.append({"id": event.id, "aggregate_id": session_id, "seq": event.seq, "type": event.type, "data": data})
        stored[event.seq] = event
    if rows:
        await projection.write()
        await _append(conn, head, rows)
    return [int(row["seq"]) for row in rows]


async def _append(conn: AsyncConnection, head: Head, rows: list[dict[str, object]]) -> None:
    sequence = tables.event_sequence
    await conn.execute(update(sequence).where(sequence.c.aggregate_id == head.session_id).values(seq=head.seq))
    try:
        await conn.execute(insert(tables.event), rows)
    except IntegrityError as error:
        raise EventConflictError(f"an event id of {head.session_id} stands for another event already") from error


def _check(event: StoredEvent, head: Head, stored: StoredEvent | None) -> None:
    decoded = event.decode()
    if decoded.session_id != event.session_id:
        raise InvalidDurableEventError(
            f"{event.type} {event.id} is of session {decoded.session_id}, not of {event.session_id}"
        )
    if event.seq > head.seq + 1 or event.seq < 0:
        raise InvalidDurableEventError(
            f"sequence mismatch in {event.session_id}: {event.seq} was given, and {head.seq + 1} is next"
        )
    if stored is not None and (stored.id, stored.type, stored.data) != (event.id, event.type, clean(event.data)):
        raise InvalidDurableEventError(
            f"replay diverged at sequence {event.seq} of {event.session_id}: the log has {stored.type} {stored.id}, "
            f"not this {event.type} {event.id}"
        )


async def _stored(conn: AsyncConnection, session_id: str, seqs: Sequence[int]) -> dict[int, StoredEvent]:
    log = tables.event
    found = await conn.execute(
        select(log).where(log.c.aggregate_id == session_id, log.c.seq.between(min(seqs), max(seqs)))
    )
    return {row.seq: StoredEvent(row.id, row.aggregate_id, row.seq, row.type, row.data) for row in found}


async def _may_replay(conn: AsyncConnection, session_id: str, owner: str | None, *, strict: bool) -> bool:
    """The log's row is locked. A log without an owner is taken by the one that is given."""
    sequence = tables.event_sequence
    found = await conn.execute(select(sequence.c.owner_id).where(sequence.c.aggregate_id == session_id))
    present = found.scalar_one()
    if present is None and owner is not None:
        await claim_replay(conn, session_id, owner)
    if present in (None, owner):
        return True
    if strict:
        raise InvalidDurableEventError(f"the log of {session_id} is replayed by {present}, not by {owner}")
    return False


async def claim_replay(conn: AsyncConnection, session_id: str, owner: str) -> None:
    """Give the replay of a log to an owner, whoever had it before. An unknown session is no error: nothing happens."""
    sequence = tables.event_sequence
    await conn.execute(update(sequence).where(sequence.c.aggregate_id == session_id).values(owner_id=owner))


async def remove(conn: AsyncConnection, session_id: str) -> bool:
    """Delete a log, its events and its head; gives whether there was one.

    The projection stays as it is: `sessions.delete` removes the whole session.
    """
    sequence = tables.event_sequence
    gone = await conn.execute(
        delete(sequence).where(sequence.c.aggregate_id == session_id).returning(sequence.c.aggregate_id)
    )
    return gone.first() is not None
