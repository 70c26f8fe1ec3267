"""Following the durable events of one session or of all sessions, all types or some, without the live text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field

from sqlalchemy import select

from fencepost.domain.errors import InvalidInputError, UnavailableError
from fencepost.domain.events import MANIFEST
from fencepost.store import event_log, tables
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Listener, Subscription

SCAN_SECONDS = 5.0
CAPACITY = 1_000
_PAGE = 500


def stored_types(names: Collection[str]) -> frozenset[str]:
    """Give the stored types that are meant: each name is a stored type, or one without its version.

    Raises InvalidInputError for a name that no event has.
    """
    found: set[str] = set()
    for name in names:
        meant = {stored for stored, kind in MANIFEST.items() if name in (stored, kind.type)}
        if not meant:
            raise InvalidInputError(f"no durable event is of type {name!r}: such as session.next.step.ended, please")
        found |= meant
    return frozenset(found)


@dataclass(slots=True)
class _Heads:
    """How far each session was read. `only` is the one that is followed, None when all are."""

    only: str | None
    read: dict[str, int] = field(default_factory=dict)


async def watch(
    database: Database,
    listener: Listener,
    session_id: str | None = None,
    after: int | None = None,
    *,
    types: Collection[str] | None = None,
    capacity: int | None = None,
) -> AsyncGenerator[StoredEvent]:
    """Yield durable events of one session after a sequence, or of all sessions from now on, for ever.

    Each session's events come in their order, without gap or duplicate; between sessions there is no order. `types`
    are event types with or without their version. Without a session, `after` is not used; without `after`, one
    session is followed from now on. Every event's projection is there when it is seen. Outages of the database are
    waited out. Following all sessions costs a look at every session's head at the beginning and every 5 seconds,
    since a notification may be lost. Close the iterator to end.

    Raises InvalidInputError for an unknown type, and with a `capacity` (in notices, see `readers.follow`)
    SubscriberOverflowError.
    """
    wanted = None if types is None else stored_types(types)
    heads = _Heads(session_id)
    if session_id is not None and after is not None:
        heads.read[session_id] = after
    begun = bool(heads.read)
    while True:
        try:
            size = CAPACITY if capacity is None else capacity
            async with listener.subscribed(session_id, size, strict=capacity is not None) as queue:
                changed = await _moved(database, heads)
                if not begun:
                    heads.read.update(changed)
                    changed, begun = {}, True
                while True:
                    for one in changed:
                        async for event in _read(database, heads, one, wanted):
                            yield event
                            queue.check()
                    changed = await _told(database, listener, heads, queue)
        except UnavailableError:
            await asyncio.sleep(1)


async def _told(database: Database, listener: Listener, heads: _Heads, queue: Subscription) -> dict[str, int]:
    """Wait for sessions that have more to read; after a silence look at all heads."""
    queue.check()
    try:
        notices = [await asyncio.wait_for(queue.get(), SCAN_SECONDS)]
    except TimeoutError:
        await listener.ensure()
        return await _moved(database, heads)
    while not queue.empty():
        notices.append(queue.get_nowait())
    if heads.only is not None:
        told = max(notice.seq for notice in notices)
        return {heads.only: told} if told > heads.read.get(heads.only, -1) else {}
    # On the channel of all sessions a notice's second field is the session.
    return {notice.message_id: notice.seq for notice in notices}


async def _moved(database: Database, heads: _Heads) -> dict[str, int]:
    """Give the sessions whose log is longer than what was read of it, with its last sequence."""
    sequence = tables.event_sequence
    statement = select(sequence.c.aggregate_id, sequence.c.seq)
    if heads.only is not None:
        statement = statement.where(sequence.c.aggregate_id == heads.only)
    async with database.read() as conn:
        rows = (await conn.execute(statement)).all()
    if heads.only is None:
        # Sessions that were deleted are forgotten, also when a shorter log has the id by now.
        known = ((row.aggregate_id, row.seq, heads.read.get(row.aggregate_id, -1)) for row in rows)
        heads.read = {session_id: read for session_id, seq, read in known if -1 < read <= seq}
    return {row.aggregate_id: row.seq for row in rows if row.seq > heads.read.get(row.aggregate_id, -1)}


async def _read(
    database: Database, heads: _Heads, session_id: str, wanted: Collection[str] | None
) -> AsyncGenerator[StoredEvent]:
    while True:
        async with database.read() as conn:
            page = await event_log.read_after(conn, session_id, heads.read.get(session_id, -1), _PAGE)
        for event in page:
            heads.read[session_id] = event.seq
            if wanted is None or event.type in wanted:
                yield event
        if len(page) < _PAGE:
            return
