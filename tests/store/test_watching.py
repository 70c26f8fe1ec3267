"""Readers of the log: from history into the present without a gap, all sessions or one, and alone in their troubles.

Where a test is about being told, polling is slowed down so far that it cannot help.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import asyncpg
import pytest

from fencepost.domain import events
from fencepost.domain.errors import (
    InvalidDurableEventError,
    InvalidInputError,
    LifecycleConflictError,
    OwnershipLostError,
    SubscriberOverflowError,
)
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.store import event_log, inbox, pages, readers, sessions, steps, tables, watching
from fencepost.store.engine import Database
from fencepost.store.event_log import Entry, StoredEvent
from fencepost.store.live import Announcer, Listener, Notice, channel_of, listen_url
from fencepost.store.steps import LivePart
from tests.store.kit import StoreKit, token_of

NEVER = 1_000.0


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave readers with what they are told."""
    monkeypatch.setattr(readers, "POLL_SECONDS", NEVER)
    monkeypatch.setattr(watching, "SCAN_SECONDS", NEVER)


@pytest.fixture
async def listener(store: StoreKit) -> AsyncIterator[Listener]:
    """A listening connection of this test's own."""
    opened = Listener(store.database)
    yield opened
    await opened.close()


@pytest.fixture
async def announcer(store: StoreKit) -> AsyncIterator[Announcer]:
    """An announcer of this test's own."""
    opened = Announcer(store.database)
    await opened.start()
    yield opened
    await opened.close()


def _note(session_id: str, words: str = "") -> events.Synthetic:
    return events.Synthetic(timestamp=1, session_id=session_id, message_id=fresh_id("msg"), text=words)


async def _take(reader: Any, count: int) -> list[int]:
    """Give the sequences of the next durable events."""
    return [(await anext(reader)).seq for _ in range(count)]


class Looks:
    """Counts the reads of the log, and can hold those that found nothing more, after they were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.made = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self._read = event_log.read_after
        monkeypatch.setattr(event_log, "read_after", self)

    async def __call__(self, *args: Any, **options: Any) -> list[StoredEvent]:
        """Read, and when there is nothing more wait to be let go."""
        found = await self._read(*args, **options)
        self.count += 1
        if not found:
            self.made.set()
            await self.go.wait()
        return found


async def _following(store: StoreKit, listener: Listener, session_id: str, after: int = -1, **options: Any) -> Any:
    return aclosing(readers.follow(store.database, listener, session_id, after, **options))


@pytest.mark.conformance("LOG-18", "INB-06")
@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("live", [True, False])
async def test_a_reader_goes_from_history_into_the_present(
    store: StoreKit, session_id: str, listener: Listener, announcer: Announcer, live: bool
) -> None:
    """From behind a sequence on, then what comes, in one order and each once; with or without live text."""
    await store.append(session_id, *(_note(session_id) for _ in range(5)))
    follow = readers.follow if live else watching.watch
    async with aclosing(follow(store.database, listener, session_id, 2)) as reader:
        assert await _take(reader, 3) == [3, 4, 5]
        for seq in range(6, 9):
            coming = asyncio.create_task(_take(reader, 1))
            await store.append(session_id, _note(session_id))
            announcer.send(session_id, Notice(seq))
            assert await coming == [seq]


@pytest.mark.conformance("LOG-19")
@pytest.mark.usefixtures("no_polling")
async def test_what_is_committed_while_history_is_read_is_not_missed(
    store: StoreKit, session_id: str, listener: Listener, announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last read of history has ended without it, and nothing else comes after it."""
    looks = Looks(monkeypatch)
    looks.go.clear()
    async with await _following(store, listener, session_id) as reader:
        coming = asyncio.create_task(_take(reader, 2))
        await looks.made.wait()
        await store.append(session_id, _note(session_id))
        announcer.send(session_id, Notice(1))
        looks.go.set()
        assert await coming == [0, 1]


@pytest.mark.conformance("LOG-20", "LOG-21")
@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("count", [1, 50])
async def test_what_is_told_during_a_paused_replay_is_read_at_once_afterwards(
    store: StoreKit,
    session_id: str,
    listener: Listener,
    announcer: Announcer,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    """The reader stands still with all of history read; every notice comes meanwhile. One read brings everything, and
    the other notices bring no further ones."""
    looks = Looks(monkeypatch)
    looks.go.clear()
    async with await _following(store, listener, session_id) as reader:
        coming = asyncio.create_task(_take(reader, count + 1))
        await looks.made.wait()
        for seq in range(1, count + 1):
            await store.append(session_id, _note(session_id))
            announcer.send(session_id, Notice(seq))
        [queue] = next(iter(listener._queues.values()))
        while queue.qsize() < count:
            await store.database.ping()
        before = looks.count
        looks.go.set()
        assert await coming == list(range(count + 1))
        last = asyncio.create_task(_take(reader, 1))
        while not queue.empty():
            await store.database.ping()
        # One that brings all, and one that finds nothing more.
        assert looks.count - before <= 2
        await store.append(session_id, _note(session_id))
        announcer.send(session_id, Notice(count + 1))
        assert await last == [count + 1]


@pytest.mark.conformance("LOG-09")
@pytest.mark.usefixtures("no_polling")
async def test_an_event_that_is_seen_is_projected(
    store: StoreKit, session_id: str, listener: Listener, announcer: Announcer
) -> None:
    """Whoever looks at the messages on seeing it finds what it did."""
    async with await _following(store, listener, session_id, 0) as reader:
        for n in range(5):
            coming = asyncio.create_task(anext(reader))
            await store.append(session_id, _note(session_id, str(n)))
            announcer.send(session_id, Notice.look())
            event = await coming
            async with store.database.read() as conn:
                message = await pages.message(conn, session_id, event.data["messageID"])
            assert getattr(message, "text", None) == str(n)


@pytest.mark.conformance("LOG-22")
@pytest.mark.usefixtures("no_polling")
async def test_live_text_is_in_no_replay(
    store: StoreKit, session_id: str, listener: Listener, announcer: Announcer
) -> None:
    """Who joins later, pages through history or wants durable events alone sees none of it; a follower did."""
    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"))
    head = len(await store.events(session_id)) - 1
    async with await _following(store, listener, session_id, head - 1) as reader:
        assert (await anext(reader)).seq == head
        coming = asyncio.create_task(anext(reader))
        announcer.send(session_id, Notice(head, work.message_id, "text", "t1", 1, 0, "live"))
        assert (await coming).text == "live"
    await work.publish(events.TextEnded(**work.about, text_id="t1", text="live and more"))

    async with aclosing(watching.watch(store.database, listener, session_id, -1)) as durable:
        assert await _take(durable, head + 2) == list(range(head + 2))
    async with store.database.read() as conn:
        history = await pages.history(conn, session_id)
    for event in (*history.events, *await store.events(session_id)):
        assert event.type in events.MANIFEST
        assert "delta" not in event.type


@pytest.mark.conformance("LOG-04")
@pytest.mark.usefixtures("no_polling")
async def test_a_reader_follows_one_session_or_all_and_all_types_or_some(
    store: StoreKit, listener: Listener, announcer: Announcer
) -> None:
    """All: from now on, new sessions too, each in its order. Some: the named types, with or without version."""
    left, right = await store.new_session(), await store.new_session()
    await store.append(left, _note(left, "before"))
    seen: dict[str, list[StoredEvent]] = {"all": [], "left": [], "admitted": [], "created": []}
    moved = asyncio.Condition()

    async def watch(name: str, *args: Any, **options: Any) -> None:
        async for event in watching.watch(store.database, listener, *args, **options):
            async with moved:
                seen[name].append(event)
                moved.notify_all()

    tasks = [
        asyncio.create_task(watch("all")),
        asyncio.create_task(watch("left", left)),
        asyncio.create_task(watch("admitted", types=["session.next.prompt.admitted"])),
        asyncio.create_task(watch("created", types=["session.created.1", "session.next.synthetic"])),
    ]
    # A reader is there when it shows what was committed and told after it subscribed.
    probe = 0
    while not all(any(event.session_id == left for event in found) for found in seen.values()):
        probe += 1
        await store.append(left, _note(left, "probe"))
        await store.admit(left)
        announcer.send(left, Notice.look())
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2), moved:
                await moved.wait()

    new = await store.new_session()
    await store.admit(new)
    announcer.send(new, Notice.look())
    await store.append(right, _note(right), _note(right))
    announcer.send(right, Notice.look())
    await store.append(left, _note(left, "last"))
    announcer.send(left, Notice.look())
    last = (await store.events(left))[-1]

    def of(name: str, session_id: str) -> list[int]:
        return [event.seq for event in seen[name] if event.session_id == session_id]

    async with moved:
        await moved.wait_for(
            lambda: (
                len(of("all", new)) == 2
                and len(of("all", right)) == 2
                and len(of("created", right)) == 2
                and of("admitted", new) == [1]
                and all(last.seq in of(name, left) for name in ("all", "left", "created"))
            )
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert (of("all", new), of("all", right)) == ([0, 1], [1, 2])
    assert of("created", new) == [0]
    for name in ("all", "left"):
        assert of(name, left) == list(range(of(name, left)[0], last.seq + 1))
        assert of(name, left)[0] > 1
    assert {event.session_id for event in seen["left"]} == {left}
    assert {event.type for event in seen["admitted"]} == {"session.next.prompt.admitted.1"}
    assert {event.type for event in seen["created"]} == {"session.created.1", "session.next.synthetic.1"}
    with pytest.raises(InvalidInputError, match=r"session\.next\.text\.delta"):
        await anext(watching.watch(store.database, listener, types=["session.next.text.delta"]))


async def test_a_reader_of_all_sessions_finds_what_it_was_not_told_of(
    store: StoreKit, session_id: str, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost notification costs time; a session that was deleted is forgotten."""
    monkeypatch.setattr(watching, "SCAN_SECONDS", 0.05)
    async with aclosing(watching.watch(store.database, listener)) as reader:
        coming = asyncio.create_task(anext(reader))
        found: set[asyncio.Task[StoredEvent]] = set()
        while not found:
            await store.append(session_id, _note(session_id))
            found, _ = await asyncio.wait({coming}, timeout=0.05)
        assert (await coming).session_id == session_id
        [head] = await store.append(session_id, _note(session_id))
        async for event in reader:
            if event.session_id == session_id and event.seq == head:
                break
        await store.do(sessions.delete, session_id)
        await store.new_session(session_id)
        async for event in reader:
            if event.session_id == session_id:
                assert event.seq == 0
                break


@pytest.mark.conformance("LOG-13")
@pytest.mark.usefixtures("no_polling")
async def test_a_reader_that_is_too_slow_is_ended_and_only_that_one(
    store: StoreKit, session_id: str, listener: Listener, announcer: Announcer
) -> None:
    """It is told how much waited; a patient reader of the same connection goes on, and so does one without a limit."""
    async with (
        await _following(store, listener, session_id, capacity=4) as slow,
        await _following(store, listener, session_id, capacity=40) as patient,
        await _following(store, listener, session_id) as unlimited,
        aclosing(watching.watch(store.database, listener, session_id, -1, capacity=4)) as slow_too,
    ):
        for reader in (slow, patient, unlimited, slow_too):
            assert await _take(reader, 1) == [0]
        told = asyncio.Event()
        sentinel = await asyncpg.connect(listen_url(store.database.url))
        await sentinel.add_listener(channel_of(session_id), lambda *_: told.set())
        for seq in range(1, 11):
            told.clear()
            await store.append(session_id, _note(session_id))
            announcer.send(session_id, Notice(seq))
            await told.wait()
        await sentinel.close()
        assert await _take(patient, 10) == list(range(1, 11))
        assert await _take(unlimited, 10) == list(range(1, 11))

        for reader in (slow, slow_too):
            with pytest.raises(SubscriberOverflowError, match="too slow: more than 4 notices") as caught:
                await _take(reader, 11)
            assert caught.value.capacity == 4
            assert caught.value.code == "EventV2.SubscriberOverflow"

        assert listener.subscriptions == 2
        coming = [asyncio.create_task(_take(reader, 1)) for reader in (patient, unlimited)]
        await store.append(session_id, _note(session_id))
        announcer.send(session_id, Notice(11))
        assert await asyncio.gather(*coming) == [[11], [11]]


async def _listened(listener: Listener) -> set[str]:
    async with listener._lock:
        assert listener._conn is not None
        return {row[0] for row in await listener._conn.fetch("SELECT pg_listening_channels()")}


@pytest.mark.conformance("LOG-14")
@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize("moment", ["waiting", "reading", "between"])
async def test_a_cancelled_reader_leaves_at_once_and_leaves_nothing(
    store: StoreKit, database_url: str, listener: Listener, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Neither a connection in use nor a subscription, wherever it was; other readers of the session stay."""
    session_id = await store.new_session()
    database = Database(store.database.url.render_as_string(hide_password=False), pool_size=1)
    pool: Any = database.engine.pool
    stays = aiter(readers.follow(store.database, listener, session_id, 0))
    waiting = asyncio.ensure_future(anext(stays))
    looks = Looks(monkeypatch)
    if moment == "reading":
        looks.go.clear()
    at_least = {"waiting": 2, "reading": 1, "between": 1}[moment]
    seen = asyncio.Event()
    hold = asyncio.Event()

    async def read() -> None:
        async with aclosing(readers.follow(database, listener, session_id, -1)) as reader:
            async for _ in reader:
                seen.set()
                if moment == "between":
                    await hold.wait()

    task = asyncio.create_task(read())
    await (looks.made if moment == "reading" else seen).wait()
    while looks.count < at_least or (moment == "reading") != (pool.checkedout() == 1):
        await store.database.ping()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)

    assert pool.checkedout() == 0
    looks.go.set()
    while listener.subscriptions > 1:
        await store.database.ping()
    await database.ping()
    assert channel_of(session_id) in await _listened(listener)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert listener.subscriptions == 0
    assert await _listened(listener) == set()
    await database.close()


@pytest.mark.usefixtures("no_polling")
async def test_many_readers_come_and_go_on_one_connection(
    store: StoreKit, listener: Listener, announcer: Announcer
) -> None:
    """At the same time, each with a session of its own: none disturbs another's subscription."""
    ids = [await store.new_session() for _ in range(10)]

    async def one(session_id: str) -> list[int]:
        for _ in range(3):
            async with await _following(store, listener, session_id) as reader:
                await _take(reader, 1)
        async with await _following(store, listener, session_id) as reader:
            await _take(reader, 1)
            coming = asyncio.create_task(_take(reader, 1))
            await store.append(session_id, _note(session_id))
            announcer.send(session_id, Notice(1))
            return await coming

    assert await asyncio.gather(*map(one, ids)) == [[1]] * 10
    assert listener.subscriptions == 0
    assert await _listened(listener) == set()


# What is announced, and what is not


@pytest.mark.conformance("LOG-11")
async def test_a_broken_reader_or_channel_neither_undoes_nor_delays_an_append(
    store: StoreKit, session_id: str, listener: Listener
) -> None:
    """A reader that raises, one that stands still, and a channel whose server cannot be reached."""
    broken = Announcer(Database("postgresql://nobody@127.0.0.1:9/none", pool_size=1))
    await broken.start()
    raised = asyncio.Event()

    async def fails() -> None:
        async with await _following(store, listener, session_id) as reader:
            async for _ in reader:
                raised.set()
                raise RuntimeError("the reader's own")

    failing = asyncio.create_task(fails())
    async with await _following(store, listener, session_id) as still:
        assert await _take(still, 1) == [0]
        await raised.wait()
        for seq in range(1, 4):
            assert await store.append(session_id, _note(session_id)) == [seq]
            broken.send(session_id, Notice(seq))
        assert [event.seq for event in await store.events(session_id)] == [0, 1, 2, 3]
        assert await _take(still, 3) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="the reader's own"):
        await failing
    await broken.close()


@pytest.mark.conformance("LOG-08", "LOG-15")
async def test_a_live_event_is_not_stored_and_carries_no_other_change(store: StoreKit, session_id: str) -> None:
    """Together with a call's plan, or with a wake: all of it is refused."""

    class TextDelta(events.StepEvent):
        type = "session.next.text.delta"
        text_id: str
        delta: str

    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"))
    pending = (await store.admit(session_id, "later", resume=False)).receipt
    delta = TextDelta(**work.about, text_id="t1", delta="a word")
    before = await store.everything(session_id)

    with pytest.raises(InvalidDurableEventError, match="live event"):
        await work.publish(*work.called("call_1"), delta)

    async def with_a_wake(conn: Any) -> None:
        await inbox.admit(conn, session_id, pending.id, pending.prompt, "steer", resume=True)
        head = await event_log.lock(conn, session_id)
        await event_log.append(conn, head, [Entry(fresh_id("evt"), delta)])

    with pytest.raises(InvalidDurableEventError, match="live event"):
        await store.database.transact(with_a_wake)
    assert await store.everything(session_id) == before
    assert delta.type in events.LIVE_ONLY
    assert not {kind.type for kind in events.MANIFEST.values()} & events.LIVE_ONLY


@pytest.mark.conformance("LOG-15")
async def test_a_former_owner_publishes_no_live_text(store: StoreKit, session_id: str) -> None:
    """What it had shown ends with its step; it cannot add a word for those who join."""
    work = await store.begin(session_id, run="run-1")
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"))
    await work.keep_live("so far")
    assert (await store.row(tables.live_part, session_id))["text"] == "so far"
    await store.claim(token_of(session_id, "run-2"), owner_run="closed", force=True)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError):
        await store.do(steps.keep_live, work.token, LivePart(work.message_id, "text", "t1", 1, "so far and on"))
    with pytest.raises(OwnershipLostError):
        await work.publish(events.TextEnded(**work.about, text_id="t1", text="so far and on"))
    assert await store.everything(session_id) == before
    assert await store.rows(tables.live_part, session_id) == []


@pytest.mark.conformance("LOG-01")
async def test_an_event_says_where_its_session_was(store: StoreKit, session_id: str, listener: Listener) -> None:
    """The creation and every move give the place of what follows, a move being at its new place; on every way to
    read, wherever the page begins."""

    def moved(directory: str, workspace_id: str | None = None) -> events.Moved:
        where = Location(directory=directory, workspace_id=workspace_id)
        return events.Moved(timestamp=1, session_id=session_id, location=where)

    await store.append(session_id, _note(session_id), moved("/there", "wrk_1"), _note(session_id), moved("/last"))
    await store.append(session_id, _note(session_id))
    places = [("/work", None)] * 2 + [("/there", "wrk_1")] * 2 + [("/last", None)] * 2

    def seen(found: list[StoredEvent]) -> list[Any]:
        return [(event.location.directory, event.location.workspace_id) for event in found if event.location]

    async with store.database.read() as conn:
        for after in range(-1, 6):
            for limit in (1, 2, 100):
                page = await event_log.read_after(conn, session_id, after, limit)
                assert seen(page) == places[after + 1 :][:limit]
        notes = await event_log.read_after(conn, session_id, -1, 2, ["session.next.synthetic.1"])
        assert [event.seq for event in notes] == [1, 3]
        assert seen(notes) == [places[1], places[3]]
        assert seen(list((await pages.history(conn, session_id, 2)).events)) == places[3:]
    async with await _following(store, listener, session_id, 3) as reader:
        assert seen([await anext(reader), await anext(reader)]) == places[4:]


async def test_a_refused_append_leaves_no_trace_for_readers(
    store: StoreKit, session_id: str, listener: Listener
) -> None:
    """The sequence it would have had is the next one's."""
    taken = _note(session_id)
    await store.append(session_id, taken)
    async with await _following(store, listener, session_id) as reader:
        assert await _take(reader, 2) == [0, 1]
        with pytest.raises(LifecycleConflictError):
            await store.append(session_id, _note(session_id, "undone"), taken)
        await store.append(session_id, _note(session_id, "kept"))
        event = await anext(reader)
    assert (event.seq, event.data["text"]) == (2, "kept")
