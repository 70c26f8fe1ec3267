"""The log: contiguous per session, each event once, and never apart from its projection and the rows beside it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from asyncpg import CheckViolationError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.errors import EventConflictError, LifecycleConflictError, NotFoundError, OwnershipLostError
from fencepost.domain.ids import fresh_id
from fencepost.store import event_log, ledger, ownership, tables
from fencepost.store.event_log import Entry
from tests.store.kit import LEASE, StoreKit


def _note(session_id: str, words: str, message_id: str | None = None) -> events.Synthetic:
    return events.Synthetic(
        timestamp=1_000, session_id=session_id, message_id=message_id or fresh_id("msg"), text=words
    )


@pytest.mark.conformance("LOG-02")
async def test_the_stored_type_is_name_and_version(store: StoreKit, session_id: str) -> None:
    """Each row carries the version of its definition: most are at 1, the ends of steps at 2."""
    work = await store.begin(session_id)
    await work.say("hello")
    await work.settle()

    stored = [event.type for event in await store.events(session_id)]
    assert stored == [
        "session.created.1",
        "session.next.prompt.admitted.1",
        "session.next.prompted.1",
        "session.next.step.started.1",
        "session.next.text.started.1",
        "session.next.text.ended.1",
        "session.next.step.ended.2",
    ]
    for kind in events.MANIFEST.values():
        assert kind.stored_type() == f"{kind.type}.{kind.version}"
        assert events.MANIFEST[kind.stored_type()] is kind


@pytest.mark.conformance("LOG-17")
async def test_every_session_counts_for_itself(store: StoreKit) -> None:
    """Two sessions that append in turn, and at the same time, both count 0, 1, 2 without a hole."""
    left, right = await store.new_session(), await store.new_session()
    for n in range(3):
        assert await store.append(left, _note(left, "a")) == [n + 1]
        assert await store.append(right, _note(right, "b"), _note(right, "c")) == [2 * n + 1, 2 * n + 2]
    await asyncio.gather(*(store.append(s, _note(s, "together")) for s in [left, right] * 5))

    for session_id, count in ((left, 9), (right, 12)):
        assert [event.seq for event in await store.events(session_id)] == list(range(count))
        async with store.database.read() as conn:
            assert await event_log.latest(conn, session_id) == count - 1


async def test_a_log_begins_at_nought_and_an_unknown_one_is_before_that(store: StoreKit) -> None:
    """The sequence of a session without events is -1, and nothing is appended to it."""
    async with store.database.read() as conn:
        assert await event_log.latest(conn, "ses_unheard_of") == -1
        assert await event_log.read_after(conn, "ses_unheard_of", -1) == []
    with pytest.raises(NotFoundError, match="ses_unheard_of"):
        await store.append("ses_unheard_of", _note("ses_unheard_of", "hello"))


async def _seen(store: StoreKit, session_id: str) -> tuple[int, int, int]:
    """Give, as any other connection sees it: the sequence, the number of events, the number of messages."""
    async with store.database.read() as conn:
        seq = await event_log.latest(conn, session_id)
    messages = await store.rows(tables.session_message, session_id)
    return seq, len(await store.events(session_id)), len(messages)


@pytest.mark.conformance("LOG-05", "LOG-16")
@pytest.mark.parametrize("commit", [True, False])
async def test_event_sequence_and_projection_appear_together_or_not_at_all(
    store: StoreKit, session_id: str, commit: bool
) -> None:
    """Before the commit nobody sees any of them, after it everybody sees all, after a rollback they never were."""
    async with store.database.engine.connect() as conn:
        await conn.execute(text("BEGIN"))
        head = await event_log.lock(conn, session_id)
        assert await event_log.append(conn, head, [Entry(fresh_id("evt"), _note(session_id, "hello"))]) == [1]
        row = (
            await conn.execute(text("SELECT count(*) FROM event WHERE aggregate_id = :id"), {"id": session_id})
        ).one()
        assert row[0] == 2
        assert await _seen(store, session_id) == (0, 1, 0)
        await conn.execute(text("COMMIT" if commit else "ROLLBACK"))

    assert await _seen(store, session_id) == ((1, 2, 1) if commit else (0, 1, 0))
    assert await store.append(session_id, _note(session_id, "next")) == [2 if commit else 1]


async def test_a_failing_projection_undoes_the_whole_append(store: StoreKit, session_id: str) -> None:
    """Also the events before it in the same append."""
    taken = fresh_id("msg")
    await store.append(session_id, _note(session_id, "first", taken))
    before = await store.everything(session_id)

    with pytest.raises(LifecycleConflictError):
        await store.append(session_id, _note(session_id, "fine"), _note(session_id, "second", taken))
    assert await store.everything(session_id) == before


@pytest.mark.conformance("LOG-06")
async def test_rows_beside_the_log_change_in_the_transaction_of_their_event(store: StoreKit, session_id: str) -> None:
    """A planned call, the ledger and the execution row are seen exactly when the events are that go with them."""
    work = await store.begin(session_id)
    async with store.database.begin() as gate:
        await event_log.lock(gate, session_id)
        publishing = asyncio.create_task(work.publish(work.started(), *work.called("call_1")))
        await store.waiting(1)
        assert await store.rows(tables.tool_call, session_id) == []
        assert "tool.called" not in await store.types(session_id)
    await publishing
    assert [row["status"] for row in await store.rows(tables.tool_call, session_id)] == ["called"]
    assert (await store.row(tables.session_execution, session_id))["assistant_message_id"] == work.message_id
    assert "tool.called" in await store.types(session_id)

    async with store.database.engine.connect() as conn:
        await conn.execute(text("BEGIN"))
        # The settlement, held just before its commit.
        held = await ownership.hold(conn, work.token)
        done = await ledger.find(conn, work.token.execution_id)
        assert done is not None
        ended = Entry(fresh_id("evt"), work.ended().terminal)  # type: ignore[arg-type]
        await ownership.append(conn, held, [ended], LEASE)
        await ledger.move(conn, done, 1, "settled", held.head.now)
        assert (await store.row_of_ledger(work.token))["stage"] == "requested"
        assert "step.ended" not in await store.types(session_id)
        await conn.execute(text("COMMIT"))
    assert (await store.row_of_ledger(work.token))["stage"] == "settled"
    assert "step.ended" in await store.types(session_id)


@pytest.fixture
async def poison(store: StoreKit) -> Any:
    """Give the id of a call that the table of calls refuses, by a constraint of the database itself."""
    call_id = fresh_id("evt")
    async with store.database.begin() as conn:
        await conn.execute(text(f"ALTER TABLE tool_call ADD CONSTRAINT poison CHECK (call_id <> '{call_id}')"))
    yield call_id
    async with store.database.begin() as conn:
        await conn.execute(text("ALTER TABLE tool_call DROP CONSTRAINT poison"))


@pytest.mark.conformance("LOG-07")
async def test_a_failing_row_beside_the_log_undoes_event_and_projection(
    store: StoreKit, session_id: str, poison: str
) -> None:
    """The plan of a call cannot be written, so the call was never made."""
    work = await store.begin(session_id)
    await work.publish(work.started())
    before = await store.everything(session_id)

    with pytest.raises(CheckViolationError):
        await work.publish(*work.called(poison))
    assert await store.everything(session_id) == before
    assert (await store.assistant(session_id)).content == ()
    await work.publish(*work.called("call_1"))
    assert len((await store.assistant(session_id)).content) == 1


@pytest.mark.conformance("LOG-07")
async def test_a_ledger_that_was_moved_by_another_hand_undoes_event_and_projection(
    store: StoreKit, session_id: str
) -> None:
    """The compare-and-set comes after the append, and takes it back."""
    work = await store.begin(session_id)
    await work.publish(work.started())
    before = await store.everything(session_id)

    async def work_with_an_old_book(conn: AsyncConnection) -> None:
        held = await ownership.hold(conn, work.token)
        done = await ledger.find(conn, work.token.execution_id)
        assert done is not None
        done.stage = "prepared"
        ended = Entry(fresh_id("evt"), work.ended().terminal)  # type: ignore[arg-type]
        await ownership.append(conn, held, [ended], LEASE)
        await ledger.move(conn, done, 1, "settled", held.head.now)

    with pytest.raises(OwnershipLostError, match="moved by another hand"):
        await store.database.transact(work_with_an_old_book)
    assert await store.everything(session_id) == before


@pytest.mark.conformance("LOG-37")
async def test_an_event_id_stands_for_one_event(store: StoreKit, session_id: str) -> None:
    """The same content again is the same event; other content, another kind or another session is refused."""
    other = await store.new_session()
    event_id, message_id = fresh_id("evt"), fresh_id("msg")
    note = _note(session_id, "hello", message_id)
    assert await store.append(session_id, note, ids=[event_id]) == [1]
    before = await store.everything(session_id), await store.everything(other)

    later = note.model_copy(update={"timestamp": 9_999})
    assert await store.append(session_id, note, ids=[event_id]) == [1]
    assert await store.append(session_id, later, ids=[event_id]) == [1]
    for wrong in (
        note.model_copy(update={"text": "other"}),
        events.ContextUpdated(timestamp=1_000, session_id=session_id, message_id=message_id, text="hello"),
    ):
        with pytest.raises(EventConflictError, match=re.escape(event_id)):
            await store.append(session_id, wrong, ids=[event_id])
    with pytest.raises(EventConflictError, match=re.escape(event_id)):
        await store.append(other, note.model_copy(update={"session_id": other}), ids=[event_id])
    assert (await store.everything(session_id), await store.everything(other)) == before


@pytest.mark.conformance("LOG-37")
@pytest.mark.parametrize("repetition", range(3))
async def test_two_sessions_that_use_an_event_id_at_once_do_not_both_get_it(store: StoreKit, repetition: int) -> None:
    """The race ends like the sequence of the two: one event, one refusal."""
    sessions = [await store.new_session() for _ in range(2)]
    event_id = fresh_id("evt")
    outcomes = await asyncio.gather(
        *(store.append(s, _note(s, "mine"), ids=[event_id]) for s in sessions), return_exceptions=True
    )

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["EventConflictError", "list"]
    assert sorted([len(await store.events(s)) for s in sessions]) == [1, 2]


async def test_one_event_twice_in_one_append_is_stored_once(store: StoreKit, session_id: str) -> None:
    """A batch that was put together from two tries gives the same sequence twice."""
    note, event_id = _note(session_id, "hello"), fresh_id("evt")

    assert await store.append(session_id, note, note, ids=[event_id, event_id]) == [1, 1]
    assert [event.seq for event in await store.events(session_id)] == [0, 1]


async def test_reading_goes_on_after_a_sequence(store: StoreKit, session_id: str) -> None:
    """The given sequence itself is not read again, and a limit cuts at the end."""
    await store.append(session_id, *(_note(session_id, str(n)) for n in range(5)))
    async with store.database.read() as conn:
        assert [event.seq for event in await event_log.read_after(conn, session_id, 2)] == [3, 4, 5]
        assert [event.seq for event in await event_log.read_after(conn, session_id, -1, 2)] == [0, 1]
        assert await event_log.read_after(conn, session_id, 5) == []
