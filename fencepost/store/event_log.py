"""The durable event log: one contiguous sequence per session, appended and projected in one transaction.

The door for running work is `fencepost.store.ownership`; what is here knows sequences, not owners.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from sqlalchemy import BigInteger, Text, bindparam, column, func, literal, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.clean import clean
from fencepost.domain.errors import EventConflictError, NotFoundError
from fencepost.domain.events import DurableEvent, Moved, SessionCreated, decode_event
from fencepost.domain.inbox import Location
from fencepost.store import tables
from fencepost.store.projector import Projection
from fencepost.store.statement import Statement, driver_of

# The database's clock, in milliseconds, at the time of the statement: `now()` would be the transaction's start.
CLOCK = "(extract(epoch from clock_timestamp()) * 1000)::bigint"


@dataclass(slots=True)
class Head:
    """The locked end of one session's log: the last sequence, and the database's time when the lock was got."""

    session_id: str
    seq: int
    now: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An event to append, with the id that is derived from what it stands for."""

    id: str
    event: DurableEvent


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as the log holds it; `type` is the stored type with its version, `seq` counts from 0."""

    id: str
    session_id: str
    seq: int
    type: str
    data: dict[str, Any]
    location: Location | None = field(default=None, compare=False)
    """Where the session was when this was appended, a move itself being at its new place. It is worked out when the
    log is read, from the creation and the moves before, and no part of what is stored or compared."""

    def decode(self) -> DurableEvent:
        """Give the event itself. Raises InvalidDurableEventError."""
        return decode_event(self.type, self.data)


_LOCK = Statement(
    text(f"SELECT seq, {CLOCK} AS now FROM event_sequence WHERE aggregate_id = :id FOR UPDATE").columns(
        column("seq", BigInteger), column("now", BigInteger)
    )
)
_BEGIN = Statement(
    text(
        f"""
        INSERT INTO event_sequence AS s (aggregate_id, seq) VALUES (:id, -1)
        ON CONFLICT (aggregate_id) DO UPDATE SET seq = s.seq RETURNING seq, {CLOCK} AS now
        """
    ).columns(column("seq", BigInteger), column("now", BigInteger))
)
_KNOWN = Statement(select(tables.event).where(tables.event.c.id == func.any(bindparam("ids", type_=ARRAY(Text)))))
_ADD = Statement(
    text(
        """
        WITH added AS (
            INSERT INTO event (id, aggregate_id, seq, type, data)
            SELECT id, :session_id, seq, type, data
            FROM unnest(
                CAST(:ids AS text[]), CAST(:seqs AS bigint[]), CAST(:types AS text[]), CAST(:data AS jsonb[])
            ) AS e(id, seq, type, data)
            ON CONFLICT (id) DO NOTHING RETURNING seq
        ), moved AS (
            UPDATE event_sequence SET seq = :head WHERE aggregate_id = :session_id
        )
        SELECT count(*) AS added FROM added
        """
    ).columns(column("added", BigInteger))
)
_TAKE_BACK = Statement(
    text(
        """
        WITH moved AS (UPDATE event_sequence SET seq = :head WHERE aggregate_id = :session_id)
        DELETE FROM event WHERE aggregate_id = :session_id AND seq > :head
        """
    )
)


async def lock(conn: AsyncConnection, session_id: str) -> Head:
    """Lock the end of a session's log until the transaction ends. Raises NotFoundError for an unknown session."""
    assert driver_of(conn).is_in_transaction(), "outside a transaction a lock lasts for its statement"
    row = await _LOCK.first(conn, id=session_id)
    if row is None:
        raise NotFoundError(f"no session {session_id}: create it first, or check the id")
    return Head(session_id, row.seq, row.now)


async def begin(conn: AsyncConnection, session_id: str) -> Head:
    """Make the log of a new session and lock its end; of an existing one, just lock it. Its sequence starts at -1."""
    row = await _BEGIN.first(conn, id=session_id)
    return Head(session_id, row.seq, row.now)


async def append(
    conn: AsyncConnection,
    head: Head,
    entries: Sequence[Entry],
    *,
    message: tuple[str, dict[str, Any]] | None = None,
) -> list[int]:
    """Append and project the events after the locked head, and move it. Gives each event's sequence.

    An event whose id is in the log already, with the same content, is a no-op that gives the old sequence; times are
    not compared. Raises EventConflictError when the content or the session differs; the caller's transaction is then
    to be rolled back, as after any error of a projector. `message` is the id and the data of an assistant message that
    was read under the same locks.
    """
    if not entries:
        return []
    new = [_stored(head, entry, head.seq + n) for n, entry in enumerate(entries, 1)]
    seqs = [event.seq for event in new]
    if not await _add(conn, head, new):
        # Some are there already, which is rare: only then is it worth a look.
        seqs, new = _not_known(head, entries, await _known(conn, [entry.id for entry in entries]))
        if not await _add(conn, head, new):
            raise EventConflictError(f"an event id of {head.session_id} stands for another event already")
    projection = Projection(conn, message)
    for event in new:
        # What is projected is what a rebuild from the log would project: the cleaned event.
        await projection.apply(event.decode(), event.seq)
    await projection.write()
    return seqs


def _stored(head: Head, entry: Entry, seq: int) -> StoredEvent:
    return StoredEvent(entry.id, head.session_id, seq, entry.event.stored_type(), clean(entry.event.to_wire()))


async def _add(conn: AsyncConnection, head: Head, new: Sequence[StoredEvent]) -> bool:
    """Add the events and move the head; or, when an id is there already, do nothing and say False."""
    if not new:
        return True
    row = await _ADD.first(
        conn,
        head=new[-1].seq,
        session_id=head.session_id,
        ids=[event.id for event in new],
        seqs=[event.seq for event in new],
        types=[event.type for event in new],
        data=[to_json(event.data).decode() for event in new],
    )
    if row.added == len(new):
        head.seq = new[-1].seq
        return True
    await _TAKE_BACK.run(conn, session_id=head.session_id, head=head.seq)
    return False


def _not_known(
    head: Head, entries: Sequence[Entry], known: dict[str, StoredEvent]
) -> tuple[list[int], list[StoredEvent]]:
    """Give each entry's sequence, and the events that are not in the log yet. Raises EventConflictError."""
    seqs: list[int] = []
    new: list[StoredEvent] = []
    for entry in entries:
        old = known.get(entry.id)
        if old is not None:
            seqs.append(_same(head, entry, clean(entry.event.to_wire()), old))
            continue
        event = known[entry.id] = _stored(head, entry, head.seq + len(new) + 1)
        new.append(event)
        seqs.append(event.seq)
    return seqs, new


async def _known(conn: AsyncConnection, ids: Sequence[str]) -> dict[str, StoredEvent]:
    rows = await _KNOWN.all(conn, ids=list(ids))
    return {row.id: StoredEvent(row.id, row.aggregate_id, row.seq, row.type, row.data) for row in rows}


def _same(head: Head, entry: Entry, data: dict[str, Any], old: StoredEvent) -> int:
    again = {**data, "timestamp": old.data.get("timestamp")}
    if (old.session_id, old.type, old.data) != (head.session_id, entry.event.stored_type(), again):
        raise EventConflictError(
            f"event id {entry.id} stands for another event already ({old.type}, sequence {old.seq} of {old.session_id})"
        )
    return old.seq


_PLACING = (SessionCreated.stored_type(), Moved.stored_type())
_log, _earlier = tables.event, tables.event.alias()


def _placed(name: str) -> Any:
    return func.coalesce(_earlier.c.data["info"][name].astext, _earlier.c.data["location"][name].astext)


# One look for the whole page; the page's own moves change it on the way.
_place = (
    select(func.jsonb_build_array(_placed("directory"), _placed("workspaceID")))
    .where(
        _earlier.c.aggregate_id == bindparam("session_id"),
        _earlier.c.type == func.any(literal(_PLACING, ARRAY(Text))),
        _earlier.c.seq <= bindparam("after"),
    )
    .order_by(_earlier.c.seq.desc())
    .limit(1)
    .scalar_subquery()
)
_page = (
    select(_log, _place.label("place"))
    .where(_log.c.aggregate_id == bindparam("session_id"), _log.c.seq > bindparam("after"))
    .order_by(_log.c.seq)
    .limit(bindparam("limit", type_=BigInteger))
)
_AFTER = Statement(_page)
_SOME_AFTER = Statement(_page.where(_log.c.type == func.any(bindparam("types", type_=ARRAY(Text)))))


async def read_after(
    conn: AsyncConnection, session_id: str, after: int, limit: int = 500, types: Collection[str] | None = None
) -> list[StoredEvent]:
    """Give up to `limit` events with a sequence above `after`, in order; with `types` only of these stored types."""
    # Moves that are not wanted are read all the same, for the places of what comes after them.
    some = {} if types is None else {"types": [*types, *_PLACING]}
    statement = _AFTER if types is None else _SOME_AFTER
    found: list[StoredEvent] = []
    location: Location | None = None
    while len(found) < limit:
        rows = await statement.all(conn, session_id=session_id, after=after, limit=limit, **some)
        if rows and location is None and rows[0].place is not None:
            location = _location(*rows[0].place)
        for row in rows:
            after = row.seq
            if row.type in _PLACING:
                given = row.data.get("info") or row.data.get("location") or {}
                location = _location(given.get("directory"), given.get("workspaceID"))
            if types is None or row.type in types:
                found.append(StoredEvent(row.id, row.aggregate_id, row.seq, row.type, row.data, location))
        if types is None or len(rows) < limit:
            break
    return found[:limit]


def _location(directory: str | None, workspace_id: str | None) -> Location | None:
    return None if directory is None else Location(directory=directory, workspace_id=workspace_id)


_LATEST = Statement(select(tables.event_sequence.c.seq).where(tables.event_sequence.c.aggregate_id == bindparam("id")))


async def latest(conn: AsyncConnection, session_id: str) -> int:
    """Give the last sequence of a session, -1 when it has no events."""
    row = await _LATEST.first(conn, id=session_id)
    return -1 if row is None else int(row.seq)
