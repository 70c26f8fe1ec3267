"""Input: admitted once and durably, promoted at boundaries, in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.domain import messages as m
from fencepost.domain.errors import NotFoundError, PromptConflictError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import AgentAttachment, FileAttachment, Prompt, Span
from fencepost.store import inbox, tables
from tests.store.kit import StoreKit, token_of


@pytest.mark.conformance("INB-04")
async def test_an_admitted_prompt_is_durable_before_it_is_visible(store: StoreKit, session_id: str) -> None:
    """There is a row and an event, and no message until the model is to see it."""
    prompt = Prompt(
        text="look",
        files=(FileAttachment(uri="file:///a.png", mime="image/png", source=Span(start=0, end=4, text="look")),),
        agents=(AgentAttachment(name="plan"),),
    )
    admission = await store.do(inbox.admit, session_id, fresh_id("msg"), prompt, "steer")
    receipt = admission.receipt

    assert await store.messages(session_id) == []
    row = await store.row(tables.session_input, session_id)
    assert (row["id"], row["prompt"], row["delivery"]) == (receipt.id, prompt.to_wire(), "steer")
    assert (row["promoted_seq"], row["wake_pending"], row["wake_attempts"]) == (None, True, 0)
    [admitted] = (await store.events(session_id))[1:]
    assert admitted.type == "session.next.prompt.admitted.1"
    assert admitted.seq == row["admitted_seq"] == receipt.admitted_seq
    assert admitted.data == {
        "timestamp": row["time_created"],
        "sessionID": session_id,
        "messageID": receipt.id,
        "prompt": prompt.to_wire(),
        "delivery": "steer",
    }
    await store.claim_and_prepare(session_id)
    [message] = await store.messages(session_id)
    assert message == m.UserMessage(
        id=receipt.id,
        text="look",
        files=prompt.files,
        agents=prompt.agents,
        time=m.Created(created=receipt.time_created),
    )


@pytest.mark.conformance("INB-09")
async def test_the_same_input_again_gives_the_first_receipt(store: StoreKit, session_id: str) -> None:
    """Before and after its promotion, and without a second event."""
    message_id = fresh_id("msg")
    first = (await store.admit(session_id, "hello", input_id=message_id)).receipt
    before = await store.everything(session_id)
    again = (await store.admit(session_id, "hello", input_id=message_id)).receipt

    assert again == first
    assert await store.everything(session_id) == before
    await store.claim_and_prepare(session_id)
    promoted = await store.everything(session_id)
    late = (await store.admit(session_id, "hello", input_id=message_id)).receipt
    assert late == first.model_copy(update={"promoted_seq": late.promoted_seq})
    assert late.promoted_seq is not None
    assert await store.everything(session_id) == promoted


@pytest.mark.conformance("INB-11")
@pytest.mark.parametrize("promoted", [False, True])
async def test_an_id_with_other_text_is_refused(store: StoreKit, session_id: str, promoted: bool) -> None:
    """And nothing of the second text is kept."""
    message_id = fresh_id("msg")
    await store.admit(session_id, "hello", input_id=message_id)
    if promoted:
        await store.claim_and_prepare(session_id)
    before = await store.everything(session_id)

    with pytest.raises(PromptConflictError, match=message_id):
        await store.admit(session_id, "other", input_id=message_id)
    assert await store.everything(session_id) == before


async def test_an_id_stands_for_one_input_of_one_session(store: StoreKit, session_id: str) -> None:
    """Other files, another delivery, another session, or a message of history: refused, and nothing written."""
    other = await store.new_session()
    message_id = fresh_id("msg")
    await store.admit(session_id, "hello", input_id=message_id)
    work = await store.begin(session_id, "and this")
    await work.say("yes")
    before = await store.everything(session_id), await store.everything(other)

    files = Prompt(text="hello", files=(FileAttachment(uri="file:///a"),))
    wrong: list[Any] = [
        store.do(inbox.admit, session_id, message_id, files, "steer"),
        store.admit(session_id, "hello", input_id=message_id, delivery="queue"),
        store.admit(other, "hello", input_id=message_id),
        store.admit(session_id, "hello", input_id=work.message_id),
    ]
    for call in wrong:
        with pytest.raises(PromptConflictError):
            await call
    assert (await store.everything(session_id), await store.everything(other)) == before


@pytest.mark.conformance("INB-13")
@pytest.mark.parametrize("repetition", range(3))
async def test_simultaneous_repeats_leave_one_row_and_one_event(store: StoreKit, repetition: int) -> None:
    """Every caller gets the same receipt."""
    session_id = await store.new_session()
    message_id = fresh_id("msg")
    answers = await asyncio.gather(*(store.admit(session_id, "hello", input_id=message_id) for _ in range(8)))

    assert len({answer.receipt.model_dump_json() for answer in answers}) == 1
    assert [row["id"] for row in await store.rows(tables.session_input, session_id)] == [message_id]
    assert await store.types(session_id) == ["prompt.admitted"]


@pytest.mark.parametrize("repetition", range(3))
async def test_two_sessions_that_use_one_id_at_once_do_not_both_get_it(store: StoreKit, repetition: int) -> None:
    """The loser is told of the conflict, as if it had come later."""
    sessions = [await store.new_session() for _ in range(4)]
    message_id = fresh_id("msg")
    outcomes = await asyncio.gather(
        *(store.admit(session_id, "hello", input_id=message_id) for session_id in sessions), return_exceptions=True
    )

    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(error) for error in refused] == [PromptConflictError] * 3
    assert sorted([await store.types(session_id) for session_id in sessions]) == [[], [], [], ["prompt.admitted"]]


async def test_an_unknown_session_admits_nothing(store: StoreKit) -> None:
    """It is created first."""
    with pytest.raises(NotFoundError, match="ses_unknown"):
        await store.admit("ses_unknown")


async def test_without_resume_an_input_is_only_recorded(store: StoreKit, session_id: str) -> None:
    """It asks for no execution until the same input comes with resume; then it does, once."""
    message_id = fresh_id("msg")
    await store.admit(session_id, input_id=message_id, resume=False)
    assert (await store.row(tables.session_input, session_id))["wake_pending"] is False
    await store.admit(session_id, input_id=message_id)
    assert (await store.row(tables.session_input, session_id))["wake_pending"] is True
    await store.admit(session_id, input_id=message_id, resume=False)

    assert (await store.row(tables.session_input, session_id))["wake_pending"] is True
    assert len(await store.events(session_id)) == 2


async def test_an_admission_says_whether_somebody_will_look(store: StoreKit, session_id: str) -> None:
    """Only a claim whose lease runs counts."""
    assert not (await store.admit(session_id)).claimed
    work = await store.begin(session_id)
    assert (await store.admit(session_id)).claimed
    await store.expire(session_id)
    assert not (await store.admit(session_id)).claimed
    await store.claim(work.token)
    assert (await store.admit(session_id)).claimed


async def _promoted(store: StoreKit, session_id: str) -> list[str]:
    return [message.text for message in await store.messages(session_id) if isinstance(message, m.UserMessage)]


async def test_steers_are_promoted_together_in_the_order_of_their_admission(store: StoreKit, session_id: str) -> None:
    """A queued input waits although it came first."""
    await store.admit(session_id, "queued", delivery="queue")
    for words in ("one", "two", "three"):
        await store.admit(session_id, words)

    assert (await store.claim_and_prepare(session_id, queued=True)).promoted == 3
    assert await _promoted(store, session_id) == ["one", "two", "three"]


async def test_queued_input_is_promoted_one_at_a_time_and_only_when_asked_for(store: StoreKit, session_id: str) -> None:
    """While the turn goes on it waits."""
    for words in ("first", "second"):
        await store.admit(session_id, words, delivery="queue")
    token = token_of(session_id)
    await store.claim(token)

    for step, (queued, promoted) in enumerate([(False, 0), (True, 1), (False, 0), (True, 1), (True, 0)], 1):
        assert (await store.prepare(token, step, queued=queued)).promoted == promoted
    assert await _promoted(store, session_id) == ["first", "second"]


async def test_a_promotion_clears_the_wake_of_its_own_rows_only(store: StoreKit, session_id: str) -> None:
    """The queued one still asks for its turn."""
    steer = (await store.admit(session_id, "now")).receipt
    queued = (await store.admit(session_id, "later", delivery="queue")).receipt
    await store.claim_and_prepare(session_id)

    wakes = {row["id"]: row["wake_pending"] for row in await store.rows(tables.session_input, session_id)}
    assert wakes == {steer.id: False, queued.id: True}
    async with store.database.read() as conn:
        found = await inbox.find(conn, steer.id)
        assert await inbox.find(conn, "msg_unheard_of") is None
    assert found is not None
    assert found.promoted_seq is not None
