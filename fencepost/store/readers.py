"""Reading a session: its messages, and its events as they happen. None of it needs a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from sqlalchemy import Text, bindparam, cast, func, literal_column, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.errors import UnavailableError
from fencepost.domain.messages import Message, decode_message, decode_message_json
from fencepost.store import event_log, tables
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Listener, Notice, Subscription
from fencepost.store.statement import Statement
from fencepost.store.steps import part_of

POLL_SECONDS = 0.5
_QUEUED = 1_000
_PAGE = 500


_KEPT = Statement(select(tables.live_part).where(tables.live_part.c.session_id == bindparam("session_id")))

_messages = tables.session_message
_compaction = (
    select(_messages.c.seq)
    .where(_messages.c.session_id == bindparam("session_id"), _messages.c.type == "compaction")
    .order_by(_messages.c.seq.desc())
    .limit(1)
    .scalar_subquery()
)
_epochs = tables.session_context_epoch
_told = select(_epochs.c.baseline_seq).where(_epochs.c.session_id == bindparam("session_id")).scalar_subquery()
_start = func.coalesce(_compaction, literal_column("-1"))
_text = cast(_messages.c.data.op("||")(func.jsonb_build_object("id", _messages.c.id, "type", _messages.c.type)), Text)
_mine = select(_messages.c.id, _text.label("text"), _messages.c.seq).where(
    _messages.c.session_id == bindparam("session_id")
)
# Apart, so that each of them is a range of an index. The baseline, without an id, is before all messages.
_HISTORY = Statement(
    union_all(
        select(
            literal_column("NULL").label("id"), _epochs.c.baseline.label("text"), literal_column("-1").label("seq")
        ).where(_epochs.c.session_id == bindparam("session_id")),
        _mine.where(
            _messages.c.seq >= _start,
            (_messages.c.type != "system") | (_messages.c.seq > func.coalesce(_told, literal_column("-1"))),
        ),
        _mine.where(_messages.c.type == "system", _messages.c.seq > _told, _messages.c.seq < _start),
    ).order_by("seq")
)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a model is sent of a session: the baseline of its context, None before the first step, and its messages,
    each as its id and its JSON, which has id and type in it."""

    baseline: str | None
    messages: list[tuple[str, str]]


async def sent(conn: AsyncConnection, session_id: str) -> Sent:
    """Give what a model is sent of a session: the baseline, and its messages in order: those from the last compaction
    on, without the updates that the baseline has in it, and with those before the compaction that it has not."""
    rows = await _HISTORY.all(conn, session_id=session_id)
    baseline = rows.pop(0).text if rows and rows[0].id is None else None
    return Sent(baseline, [(row.id, row.text) for row in rows])


async def history(conn: AsyncConnection, session_id: str) -> list[Message]:
    """Give the messages that a model is sent of a session. Raises MessageDecodeError for a row that cannot be read."""
    return [decode_message_json(*message) for message in (await sent(conn, session_id)).messages]


async def page(
    conn: AsyncConnection, session_id: str, *, limit: int = 50, before: int | None = None, after: int | None = None
) -> list[tuple[int, Message]]:
    """Give up to `limit` messages with their sequences, in order: the newest ones, or those next to a sequence."""
    messages = tables.session_message
    statement = select(messages).where(messages.c.session_id == session_id)
    if after is not None:
        statement = statement.where(messages.c.seq > after).order_by(messages.c.seq)
    else:
        if before is not None:
            statement = statement.where(messages.c.seq < before)
        statement = statement.order_by(messages.c.seq.desc())
    rows = [(row.seq, decode_message(row.id, row.type, row.data)) for row in await conn.execute(statement.limit(limit))]
    return rows if after is not None else rows[::-1]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of a part that is still being streamed; `kind` is text, reasoning or tool (its raw input)."""

    message_id: str
    kind: str
    part_id: str
    attempt: int
    text: str


@dataclass(slots=True)
class _Open:
    attempt: int = 0
    text: str = ""


@dataclass(slots=True)
class _Cursor:
    """What a reader has seen: the last sequence, and how much of each open part. `look` asks for a look at the tables:
    at the beginning, and after a silence when something was missed, since a notification may have been lost."""

    session_id: str
    seq: int
    look: bool = True
    parts: dict[tuple[str, str, str], _Open] = field(default_factory=dict)

    def durable(self, stored: StoredEvent) -> list[StoredEvent | Delta]:
        """Take in a durable event; before a part's end comes whatever of it was not seen live."""
        self.seq = stored.seq
        event = stored.decode()
        out: list[StoredEvent | Delta] = []
        match event:
            case events.TextStarted():
                self.parts[event.assistant_message_id, "text", event.text_id] = _Open()
            case events.ReasoningStarted():
                self.parts[event.assistant_message_id, "reasoning", event.reasoning_id] = _Open()
            case events.ToolInputStarted():
                self.parts[event.assistant_message_id, "tool", event.call_id] = _Open()
            case events.TextEnded() | events.ReasoningEnded() | events.ToolInputEnded():
                out += self._ended(event)
            case events.StepEnded() | events.StepFailed() | events.StepInterrupted():
                self.parts.clear()
            case _:
                pass
        return [*out, stored]

    def _ended(self, event: events.TextEnded | events.ReasoningEnded | events.ToolInputEnded) -> list[Delta]:
        kind, part_id = part_of(event)
        seen = self.parts.pop((event.assistant_message_id, kind, part_id), None)
        if seen is None:
            return []
        rest = event.text[len(seen.text) :]
        return [Delta(event.assistant_message_id, kind, part_id, seen.attempt, rest)] if rest else []

    def live(self, message_id: str, kind: str, part_id: str, attempt: int, offset: int, text: str) -> Delta | None:
        """Take in live text; None when it was seen, belongs to no open part, or leaves a gap (`is_gap` tells)."""
        part = self.parts.get((message_id, kind, part_id))
        if part is None or offset > len(part.text) or offset + len(text) <= len(part.text):
            return None
        fresh = text[len(part.text) - offset :]
        part.attempt, part.text = attempt, part.text + fresh
        return Delta(message_id, kind, part_id, attempt, fresh)

    def is_gap(self, notice: Notice) -> bool:
        """Say whether text before this notice was never seen, so that the kept part has to be read."""
        part = self.parts.get((notice.message_id, notice.kind, notice.part_id))
        return part is not None and notice.offset > len(part.text)


async def follow(
    database: Database, listener: Listener, session_id: str, after: int = -1, *, capacity: int | None = None
) -> AsyncGenerator[StoredEvent | Delta]:
    """Yield the session's durable events after a sequence, then its open parts, then what happens, for ever.

    No gap and no duplicate: live text is always the continuation of what was yielded of its part, and a durable end
    is preceded by whatever of the part is missing. A part that was begun before `after` and is still open comes from
    its beginning. Outages of the database are waited out. Close the iterator to end.

    What waits for a slow reader is bounded: it reads later, from the tables, what it was not told of in time. With a
    `capacity`, in notices, it is ended instead: SubscriberOverflowError.
    """
    cursor = _Cursor(session_id, after)
    begun = False
    while True:
        try:
            if not begun:
                await _begun_before(database, cursor)
                begun = True
            # Subscribed before the first read, so that nothing falls between the two.
            async with listener.subscribed(
                session_id, _QUEUED if capacity is None else capacity, strict=capacity is not None
            ) as queue:
                cursor.look = True
                while True:
                    queue.check()
                    if cursor.look:
                        async for item in _catch_up(database, cursor, parts=True):
                            yield item
                        cursor.look = False
                    async for item in _heard(database, listener, cursor, queue):
                        yield item
        except UnavailableError:
            await asyncio.sleep(POLL_SECONDS)


async def _begun_before(database: Database, cursor: _Cursor) -> None:
    """Find the parts that are open at the reader's beginning: started by the newest step up to there, not ended."""
    log, first, after = tables.event, events.StepStarted.stored_type(), cursor.seq
    mine = (log.c.aggregate_id == cursor.session_id) & (log.c.seq <= after)
    step = select(func.max(log.c.seq)).where(mine, log.c.type == first).scalar_subquery()
    async with database.read() as conn:
        rows = (await conn.execute(select(log).where(mine, log.c.seq >= step).order_by(log.c.seq))).all()
    for row in rows:
        cursor.durable(StoredEvent(row.id, row.aggregate_id, row.seq, row.type, row.data))
    cursor.seq = after


async def _catch_up(database: Database, cursor: _Cursor, *, parts: bool) -> AsyncGenerator[StoredEvent | Delta]:
    found: list[StoredEvent | Delta] = []
    while True:
        async with database.read() as conn:
            stored = await event_log.read_after(conn, cursor.session_id, cursor.seq, _PAGE)
            if not stored and parts:
                found = await _kept(conn, cursor)
        for event in stored:
            for item in cursor.durable(event):
                yield item
        if not stored or (not parts and len(stored) < _PAGE):
            break
    for item in found:
        yield item


async def _may_have_missed(database: Database, cursor: _Cursor) -> bool:
    """Say whether a look at the tables may bring something. Many readers of idle sessions ask this all the time."""
    if cursor.parts:
        return True
    async with database.read() as conn:
        return await event_log.latest(conn, cursor.session_id) > cursor.seq


async def _kept(conn: AsyncConnection, cursor: _Cursor) -> list[StoredEvent | Delta]:
    rows = await _KEPT.all(conn, session_id=cursor.session_id)
    deltas = [cursor.live(row.assistant_message_id, row.kind, row.part_id, row.attempt, 0, row.text) for row in rows]
    return [delta for delta in deltas if delta is not None]


async def _heard(
    database: Database, listener: Listener, cursor: _Cursor, queue: Subscription
) -> AsyncGenerator[StoredEvent | Delta]:
    """Yield live text until something durable is to be read, or until it is time to look anyway."""
    try:
        async with asyncio.timeout(POLL_SECONDS):  # wait_for would start a task for each notice
            notice = await queue.get()
    except TimeoutError:
        await listener.ensure()
        cursor.look = await _may_have_missed(database, cursor)
        return
    while True:
        if notice.seq > cursor.seq:
            async for item in _catch_up(database, cursor, parts=False):
                yield item
        if notice.message_id:
            if cursor.is_gap(notice):
                async with database.read() as conn:
                    kept = await _kept(conn, cursor)
                for item in kept:
                    yield item
            delta = cursor.live(
                notice.message_id, notice.kind, notice.part_id, notice.attempt, notice.offset, notice.text
            )
            if delta is not None:
                yield delta
        queue.check()
        if queue.empty():
            return
        notice = queue.get_nowait()
