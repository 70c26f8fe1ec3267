"""Logs from elsewhere: what a replay takes in, what it refuses, and what it never does."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fencepost.domain import events
from fencepost.domain.errors import ClaimRefusedError, EventConflictError, FencepostError, InvalidDurableEventError
from fencepost.domain.ids import fresh_id
from fencepost.store import event_log, tables
from fencepost.store import replay as replaying
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from tests.store.kit import StoreKit


@pytest.fixture
async def target(database_url: str) -> AsyncIterator[StoreKit]:
    """A second database, with the schema and without rows."""
    database = Database(database_url, pool_size=3)
    yield StoreKit(database)
    await database.close()


@pytest.fixture
async def log(store: StoreKit, session_id: str) -> list[StoredEvent]:
    """The log of a session in which one prompt was answered."""
    work = await store.begin(session_id, "hello")
    await work.say("hello to you")
    await work.settle()
    await store.admit(session_id, "later", delivery="queue")
    return await store.events(session_id)


async def _replay(target: StoreKit, given: Sequence[StoredEvent], owner: str | None = None, **options: Any) -> Any:
    return await target.do(replaying.replay, given, owner, **options)


async def _replay_all(target: StoreKit, given: Sequence[StoredEvent], **options: Any) -> Any:
    return await target.do(replaying.replay_all, given, **options)


async def _projection(store: StoreKit, session_id: str) -> list[Any]:
    kept = (tables.session, tables.session_message, tables.session_input)
    return [
        {name: value for name, value in row.items() if not name.startswith("wake_")}
        for table in kept
        for row in await store.rows(table, session_id)
    ]


@pytest.mark.conformance("LOG-24", "LOG-25", "CRE-09", "INB-16")
async def test_a_replayed_lifecycle_is_the_same_session_and_asks_for_nothing(
    store: StoreKit, target: StoreKit, session_id: str, log: list[StoredEvent]
) -> None:
    """Rows, ids, sequences and data; pending input is pending, without a wake, a claim or a ledger."""
    assert await _replay(target, log) == list(range(len(log)))

    assert await target.events(session_id) == log
    assert await _projection(target, session_id) == await _projection(store, session_id)
    assert [message.type for message in await target.messages(session_id)] == ["user", "assistant"]
    there = await target.everything(session_id)
    assert {row["promoted_seq"] is None: row["wake_pending"] for row in there["session_input"]} == {
        True: False,
        False: False,
    }
    for table in ("session_execution", "session_recovery", "execution_ledger", "tool_call", "live_part"):
        assert there[table] == []
    assert (await target.admit(session_id, "go on")).receipt.admitted_seq == len(log)


async def test_an_event_that_is_there_already_is_passed_over(target: StoreKit, log: list[StoredEvent]) -> None:
    """Alone, or before new ones in the same replay, and also with a key that this program does not know."""
    session_id = log[0].session_id
    foreign = [replace(log[0], data={**log[0].data, "ofTheFuture": 1}), *log[1:]]
    assert await _replay(target, foreign[:3]) == [0, 1, 2]
    before = await target.everything(session_id)

    assert await _replay(target, foreign[:3]) == []
    assert await target.everything(session_id) == before
    assert await _replay(target, foreign) == list(range(3, len(log)))
    assert await target.events(session_id) == foreign


@pytest.mark.conformance("LOG-36")
@pytest.mark.parametrize(
    "change",
    [
        lambda event: replace(event, id="evt_other"),
        lambda event: replace(event, data={**event.data, "timestamp": event.data["timestamp"] + 1}),
        lambda event: replace(event, type=events.ContextUpdated.stored_type(), data={**event.data, "text": "x"}),
    ],
    ids=["id", "data", "type"],
)
async def test_a_replay_that_contradicts_the_log_is_refused(
    target: StoreKit, log: list[StoredEvent], change: Any
) -> None:
    """Whatever of the old event is another: the log stays, and nothing of the replay's rest is taken in."""
    await _replay(target, log[:3])
    before = await target.everything(log[0].session_id)

    with pytest.raises(InvalidDurableEventError, match="replay diverged at sequence 1"):
        await _replay(target, [log[0], change(log[1]), *log[2:]])
    assert await target.everything(log[0].session_id) == before


@pytest.mark.conformance("LOG-26")
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda log: log[1:], "sequence mismatch"),
        (lambda log: [*log[:2], *log[3:]], "sequence mismatch"),
        (lambda log: [*log[:2], replace(log[2], type="session.next.unheard.of.1")], "unknown event type"),
        (lambda log: [*log[:2], replace(log[2], type="session.next.prompted.2")], "unknown event type"),
        (lambda log: [*log[:2], replace(log[2], type="session.next.text.delta.1")], "live event"),
        (lambda log: [*log[:2], replace(log[2], data={})], "does not fit"),
        (lambda log: [*log[:2], replace(log[2], data={**log[2].data, "sessionID": "ses_x"})], "is of session ses_x"),
    ],
    ids=["start", "gap", "type", "version", "live", "data", "aggregate"],
)
async def test_what_is_no_continuation_of_a_log_is_refused(
    target: StoreKit, log: list[StoredEvent], bad: Any, says: str
) -> None:
    """A hole, an event nobody knows, or another session's: all of the replay is undone."""
    with pytest.raises(InvalidDurableEventError, match=re.escape(says)):
        await _replay(target, bad(log))
    assert all(rows == [] for rows in (await target.everything(log[0].session_id)).values())


@pytest.mark.conformance("LOG-27")
async def test_data_is_decoded_before_it_is_projected(target: StoreKit, log: list[StoredEvent]) -> None:
    """A text where a number is meant is stored as it came and projected as the number; text that cannot be stored
    is replaced in both."""
    session_id = log[0].session_id
    note = {"timestamp": "1234", "sessionID": session_id, "messageID": fresh_id("msg"), "text": "a\x00b"}
    event = StoredEvent(fresh_id("evt"), session_id, 1, events.Synthetic.stored_type(), note)
    await _replay(target, [log[0], event])

    row = await target.row(tables.session_message, session_id)
    assert (row["time_created"], row["data"]["time"], row["data"]["text"]) == (1234, {"created": 1234}, "a\ufffdb")
    assert (await target.events(session_id))[1].data == {**note, "text": "a\ufffdb"}
    assert await _replay(target, [log[0], event]) == []


@pytest.mark.conformance("LOG-28")
async def test_a_whole_log_replays_in_chunks(store: StoreKit, target: StoreKit, log: list[StoredEvent]) -> None:
    """One session at a time and without gaps; a later chunk may overlap what is there."""
    session_id = log[0].session_id
    other = await store.events(await store.new_session())
    for wrong, says in (([*log[:2], *other], "of one session"), ([log[0], log[2]], "not contiguous")):
        with pytest.raises(InvalidDurableEventError, match=says):
            await _replay_all(target, wrong)
    assert await target.events(session_id) == []

    assert await _replay_all(target, log[:3]) == [0, 1, 2]
    assert await _replay_all(target, log[1:5]) == [3, 4]
    assert await _replay_all(target, log[5:]) == list(range(5, len(log)))
    assert await _replay_all(target, []) == []
    assert await target.events(session_id) == log
    assert await _projection(target, session_id) == await _projection(store, session_id)


async def test_logs_of_several_sessions_replay_together(
    store: StoreKit, target: StoreKit, log: list[StoredEvent]
) -> None:
    """Each counts for itself."""
    other = await store.events(await store.new_session())

    assert await _replay(target, [*log[:2], *other, *log[2:]]) == [0, 1, 0, *range(2, len(log))]
    assert await target.events(other[0].session_id) == other


async def test_an_id_of_another_log_is_refused(store: StoreKit, target: StoreKit, log: list[StoredEvent]) -> None:
    """An event id stands for one event, wherever it comes from."""
    other = await store.events(await store.new_session())
    await _replay(target, log)

    with pytest.raises(EventConflictError, match=other[0].session_id):
        await _replay(target, [replace(other[0], id=log[0].id)])
    assert await target.events(other[0].session_id) == []


async def test_a_log_that_is_worked_on_is_not_replayed_into(store: StoreKit, session_id: str) -> None:
    """Its next events are its execution's; what is there already is passed over as ever."""
    await store.begin(session_id)
    log = await store.events(session_id)
    note = {"timestamp": 1, "sessionID": session_id, "messageID": fresh_id("msg"), "text": "from elsewhere"}
    more = StoredEvent(fresh_id("evt"), session_id, len(log), events.Synthetic.stored_type(), note)

    assert await _replay(store, log) == []
    with pytest.raises(ClaimRefusedError, match=session_id):
        await _replay(store, [*log, more])
    assert await store.events(session_id) == log


async def test_a_log_is_replayed_by_its_owner_only(target: StoreKit, log: list[StoredEvent]) -> None:
    """Another one's is passed over, or refused when strict; one without an owner is taken."""
    session_id = log[0].session_id
    assert await _replay(target, log[:2]) == [0, 1]
    assert await _replay(target, log[:2], "left") == []  # exact duplicates, and yet: taken
    for other in ("right", None):
        assert await _replay(target, log, other) == []
        with pytest.raises(InvalidDurableEventError, match="is replayed by left"):
            await _replay(target, log, other, strict=True)
    assert len(await target.events(session_id)) == 2

    assert await _replay(target, log[:3], "left", strict=True) == [2]
    await target.do(replaying.claim_replay, session_id, "right")
    assert await _replay(target, log, "left") == []
    assert await _replay(target, log, "right") == list(range(3, len(log)))


@pytest.mark.conformance("LOG-40")
async def test_removing_a_log_leaves_nothing_of_it(store: StoreKit, target: StoreKit, log: list[StoredEvent]) -> None:
    """Head and events go, other logs stay, and the sequence begins anew."""
    other = await store.events(await store.new_session())
    session_id = log[0].session_id
    await _replay(target, [*log, *other])

    assert await target.do(replaying.remove, session_id)
    assert await target.events(session_id) == []
    assert await target.rows(tables.event_sequence, session_id) == []
    async with target.database.read() as conn:
        assert await event_log.latest(conn, session_id) == -1
    assert await target.events(other[0].session_id) == other
    assert not await target.do(replaying.remove, session_id)


async def test_what_a_replay_refuses_is_an_error_of_ours(target: StoreKit, log: list[StoredEvent]) -> None:
    """A projector that objects undoes the replay, and says why."""
    twice = replace(log[1], id=fresh_id("evt"), seq=2)

    with pytest.raises(FencepostError, match="in the inbox already"):
        await _replay(target, [*log[:2], twice])
    assert await target.events(log[0].session_id) == []
