"""Database activities may run more than once, also at the same time: the second one answers and writes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.domain import events
from fencepost.domain.errors import OwnershipLostError
from fencepost.store import steps, tables
from tests.store.kit import LEASE, USER_STOP, StoreKit, token_of

TWINS = 5


@pytest.mark.conformance("INB-14")
@pytest.mark.parametrize("repetition", range(3))
async def test_twins_promote_an_input_once(store: StoreKit, repetition: int) -> None:
    """Several connections prepare the same step at the same moment: one promotion, one message, one answer."""
    session_id = await store.new_session()
    receipt = (await store.admit(session_id, "once")).receipt
    token = token_of(session_id)
    await store.claim(token)

    answers = await asyncio.gather(*(store.prepare(token) for _ in range(TWINS)))

    assert [answer.promoted for answer in answers] == [1] * TWINS
    assert len(set(answers)) == 1
    log = await store.events(session_id)
    promotions = [event for event in log if event.type == "session.next.prompted.1"]
    assert [event.data["messageID"] for event in promotions] == [receipt.id]
    assert [message.id for message in await store.messages(session_id)] == [receipt.id]
    assert (await store.row(tables.session_input, session_id))["promoted_seq"] == promotions[0].seq


async def test_a_late_twin_of_a_preparation_promotes_nothing_new(store: StoreKit, session_id: str) -> None:
    """A steer that came in the middle of the stream waits for the next boundary."""
    work = await store.begin(session_id)
    first = await store.prepare(work.token)
    await store.admit(session_id, "in the middle")
    before = await store.everything(session_id)

    assert await store.prepare(work.token) == first
    assert await store.everything(session_id) == before


@pytest.mark.parametrize("repetition", range(3))
async def test_twins_settle_a_step_once(store: StoreKit, repetition: int) -> None:
    """One terminal event, whoever is first."""
    session_id = await store.new_session()
    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"), *work.called("call_1"))

    answers = await asyncio.gather(*(work.settle() for _ in range(TWINS)))

    assert answers == [False] * TWINS
    assert (await store.types(session_id)).count("step.ended") == 1
    row = await store.row(tables.session, session_id)
    assert (row["cost"], row["tokens_input"], row["tokens_output"]) == (0.5, 3, 5)


async def test_a_settlement_that_goes_on_says_so_every_time(store: StoreKit, session_id: str) -> None:
    """The continuation is recorded once, and every twin learns of it."""
    work = await store.begin(session_id)
    await work.say("half")
    cut = work.failed("overloaded", max_continuations=3)

    assert await asyncio.gather(*(work.settle(cut) for _ in range(TWINS))) == [True] * TWINS
    after = await store.everything(session_id)
    assert len(after["session_recovery"]) == 1
    assert await work.settle(cut) is True
    assert await store.everything(session_id) == after


async def test_a_late_twin_of_a_settlement_changes_nothing(store: StoreKit, session_id: str) -> None:
    """Not even with another outcome: an interrupt that comes too late finds the step settled."""
    work = await store.begin(session_id)
    await work.settle()
    before = await store.everything(session_id)

    assert await work.settle() is False
    assert await work.settle(USER_STOP) is False
    assert await store.everything(session_id) == before


async def test_a_repeated_claim_of_a_given_up_turn_says_so_again(store: StoreKit, session_id: str) -> None:
    """That a turn was cut off too often is part of the recorded answer."""
    await store.begin(session_id)
    idle = token_of(session_id, "run-2")
    first = await store.claim(idle, owner_run="closed", max_continuations=0)

    assert (first.held, first.exhausted) == (False, True)
    assert await store.claim(idle) == first

    await store.begin(session_id, "again", run="run-3")
    await store.admit(session_id, "more to do")
    busy = token_of(session_id, "run-4")
    second = await store.claim(busy, owner_run="closed", max_continuations=0)
    assert (second.held, second.exhausted) == (True, True)
    assert await store.claim(busy) == second


async def test_a_publication_made_again_is_the_same_one(store: StoreKit, session_id: str) -> None:
    """A commit whose answer was lost is repeated under the same ids, and gives the same sequences."""
    work = await store.begin(session_id)
    made: list[Any] = [work.started(), *work.called("call_1")]
    first = await work.publish(*made)
    before = await store.everything(session_id)
    work._ordinal = 0

    assert await work.publish(*made) == first
    assert await store.everything(session_id) == before


async def test_what_was_asked_before_the_release_is_answered_the_same_after_it(
    store: StoreKit, session_id: str
) -> None:
    """A signal during the release makes Temporal run the whole last workflow task again, claim and all."""
    work = await store.begin(session_id)
    prepared = await store.prepare(work.token)
    settled = await work.settle()
    assert await store.release(work.token) == "done"
    before = await store.everything(session_id)

    assert (await store.claim(work.token)).held
    assert await store.prepare(work.token) == prepared
    assert await work.settle() == settled
    assert await store.release(work.token) == "done"
    assert await store.everything(session_id) == before


async def test_a_release_asked_again_tells_of_work_that_came_since(store: StoreKit, session_id: str) -> None:
    """The run has to claim anew then, under another execution id."""
    work = await store.begin(session_id)
    await work.settle()
    await store.release(work.token)
    await store.admit(session_id, "just after")

    assert (await store.claim(work.token)).held
    assert await work.settle() is False
    assert await store.release(work.token) == "lost"


async def test_a_last_task_done_again_keeps_the_session_for_what_was_promoted(store: StoreKit, session_id: str) -> None:
    """A worker dies after the release said `more` and the next step was prepared, before Temporal heard of either."""
    work = await store.begin(session_id)
    await work.say("an answer")
    assert (await store.admit(session_id, "meanwhile", delivery="steer")).claimed, "so nobody sends a wake"
    assert await work.settle() is False
    assert await store.release(work.token) == "more"
    promoted = await store.prepare(work.token, 2)
    before = await store.everything(session_id)

    assert await work.settle() is False
    assert await store.release(work.token, 1) == "more"
    assert await store.prepare(work.token, 2) == promoted
    assert promoted.promoted == 1
    assert await store.everything(session_id) == before


async def test_an_interruption_done_again_touches_nothing_of_the_next_turn(store: StoreKit, session_id: str) -> None:
    """The run has claimed anew for what came after the interrupt, and prepared it, before its worker died."""
    work = await store.begin(session_id)
    await work.say("half")
    await work.settle(USER_STOP)
    await store.admit(session_id, "after the interrupt")
    assert await store.release(work.token, interrupted=True) == "more"
    second = token_of(session_id, ordinal=2)
    await store.claim(second)
    prepared = await store.prepare(second)
    before = await store.events(session_id)

    assert await work.settle(USER_STOP) is False
    with pytest.raises(OwnershipLostError):
        await store.release(work.token, interrupted=True)
    assert (await store.claim(second)).held
    assert await store.prepare(second) == prepared
    assert await store.events(session_id) == before


async def test_a_claim_that_found_nothing_says_when_it_is_asked_again(store: StoreKit, session_id: str) -> None:
    """Input may have come since: the run then claims under another id, since a late twin of this one must not hold."""
    await store.admit(session_id)
    first, second = token_of(session_id), token_of(session_id, ordinal=2)
    await store.claim(first)
    await store.prepare(first)
    await store.do(steps.settle, first, 1, USER_STOP, LEASE)
    assert await store.release(first, interrupted=True) == "done"
    assert (await store.claim(second)).repeated is False
    await store.admit(session_id, "just after")

    again = await store.claim(second)
    assert (again.held, again.repeated) == (False, True)
    assert (await store.claim(token_of(session_id, ordinal=3))).held


async def test_a_late_twin_of_a_release_ends_no_later_step(store: StoreKit, session_id: str) -> None:
    """The session is at a step that has promoted nothing, as after tools, and its inbox is empty."""
    work = await store.begin(session_id)
    await work.settle()
    await store.prepare(work.token, 2)

    assert await store.release(work.token, 1) == "more"
    assert (await store.prepare(work.token, 1)).promoted == 0
    assert await store.release(work.token, 2) == "done"


async def test_an_execution_that_was_taken_away_answers_nothing_from_the_ledger(
    store: StoreKit, session_id: str
) -> None:
    """Only its own release leaves answers behind; a reconciled execution is a stale one."""
    work = await store.begin(session_id)
    await store.claim(token_of(session_id, ordinal=2))

    with pytest.raises(OwnershipLostError):
        await store.prepare(work.token)
    with pytest.raises(OwnershipLostError):
        await work.settle()
