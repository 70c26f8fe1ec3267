"""Taking over after a death: what an ended execution left open is closed once, and the turn goes on if it has to."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from fencepost.domain import events
from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.messages import (
    AssistantMessage,
    CompletedTool,
    FailedTool,
    ReasoningPart,
    SyntheticMessage,
    TextPart,
    ToolPart,
)
from fencepost.domain.ownership import OwnerRun
from fencepost.domain.projection import INTERRUPTED, UNSETTLED
from fencepost.store import steps, tables
from tests.store.kit import LEASE, USER_STOP, StoreKit, Work, token_of

NEXT = "run-2"


async def _take_over(store: StoreKit, session_id: str, owner_run: OwnerRun = "closed", **wanted: int) -> bool:
    return (await store.claim(token_of(session_id, NEXT), owner_run=owner_run, **wanted)).held  # type: ignore[arg-type]


async def test_open_text_keeps_what_was_kept_live(store: StoreKit, session_id: str) -> None:
    """A killed worker costs the text since the last copy, not the whole part."""
    work = await store.begin(session_id)
    await work.publish(
        work.started(),
        events.TextStarted(**work.about, text_id="t1"),
        events.ReasoningStarted(**work.about, reasoning_id="r1"),
        events.ToolInputStarted(**work.about, call_id="call_1", name="bash"),
    )
    await work.keep_live("The word is", "t1")
    await work.keep_live("The word is her", "t1")
    await work.keep_live("Let me", "r1", "reasoning")
    await work.keep_live('{"comm', "call_1", "tool")

    assert await _take_over(store, session_id)
    spoken, thought, tool = (await store.assistant(session_id)).content
    assert isinstance(spoken, TextPart)
    assert spoken.text == "The word is her"
    assert isinstance(thought, ReasoningPart)
    assert thought.text == "Let me"
    assert thought.time is not None
    assert thought.time.completed is not None
    assert isinstance(tool, ToolPart)
    assert isinstance(tool.state, FailedTool)
    assert tool.state.error.message == INTERRUPTED
    [ended] = [e for e in await store.events(session_id) if e.type == "session.next.tool.input.ended.1"]
    assert ended.data["text"] == '{"comm'
    assert await store.rows(tables.live_part, session_id) == []


async def test_a_finished_part_is_not_cut_by_an_old_copy(store: StoreKit, session_id: str) -> None:
    """A copy that was kept late, of a part that has its durable text, is left aside."""
    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"))
    await work.keep_live("The whole")
    await work.publish(events.TextEnded(**work.about, text_id="t1", text="The whole truth"))
    await work.keep_live("The whole")  # the copy's transaction came to its end after the part's

    await _take_over(store, session_id)
    [part] = (await store.assistant(session_id)).content
    assert isinstance(part, TextPart)
    assert part.text == "The whole truth"


async def test_open_tools_fail_and_settled_ones_stay(store: StoreKit, session_id: str) -> None:
    """Planned, started or half-written: whether it took effect is unknown, so it never runs again."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("done"), *work.called("started"), *work.called("planned"))
    await work.publish(events.ToolInputStarted(**work.about, call_id="half", name="bash"))
    for call in ("done", "started"):
        await work.start_tool(call)
    await work.settle_tool("done", "fine")

    await _take_over(store, session_id)
    states = {part.id: part.state for part in (await store.assistant(session_id)).content if isinstance(part, ToolPart)}
    assert isinstance(states.pop("done"), CompletedTool)
    assert set(states) == {"started", "planned", "half"}
    for state in states.values():
        assert isinstance(state, FailedTool)
        assert state.error.message == INTERRUPTED
    failed = [e.data["callID"] for e in await store.events(session_id) if e.type == "session.next.tool.failed.1"]
    assert sorted(failed) == ["half", "planned", "started"]
    assert {row["status"] for row in await store.rows(tables.tool_call, session_id)} == {"settled"}


async def test_the_open_step_ends_with_one_interruption_and_nothing_else(store: StoreKit, session_id: str) -> None:
    """It names the execution that was lost, and why."""
    work = await store.begin(session_id)
    await work.publish(work.started())

    await _take_over(store, session_id)
    assert (await store.types(session_id))[-1] == "step.interrupted"
    terminal = [e for e in await store.events(session_id) if ".step." in e.type and "started" not in e.type]
    [interrupted] = terminal
    assert interrupted.data["executionID"] == work.token.execution_id
    assert interrupted.data["assistantMessageID"] == work.message_id
    assert interrupted.data["reason"] == "lost"
    answer = await store.assistant(session_id)
    assert (answer.finish, answer.error and answer.error.message) == ("error", UNSETTLED)


async def test_a_request_without_an_answer_is_interrupted_too(store: StoreKit, session_id: str) -> None:
    """The intent was durable, so that something may have been said; there is no assistant message to name."""
    await store.begin(session_id)

    await _take_over(store, session_id)
    assert (await store.types(session_id))[-2:] == ["prompted", "step.interrupted"]
    assert "assistantMessageID" not in (await store.events(session_id))[-1].data
    assert len(await store.rows(tables.session_recovery, session_id)) == 1


async def test_one_continuation_leads_the_turn_on(store: StoreKit, session_id: str) -> None:
    """It is a synthetic message of its own, promoted by the next preparation, once."""
    work = await store.begin(session_id)
    await work.say("half an ans")
    await _take_over(store, session_id)
    [recovery] = await store.rows(tables.session_recovery, session_id)
    assert (recovery["execution_id"], recovery["phase"], recovery["wake_pending"]) == (
        work.token.execution_id,
        "pending",
        True,
    )
    token = token_of(session_id, NEXT)

    prepared = await store.prepare(token)
    assert (prepared.continued, prepared.promoted) == (True, 0)
    newest = (await store.messages(session_id))[-1]
    assert isinstance(newest, SyntheticMessage)
    assert newest.id == recovery["continuation_message_id"]
    [recovery] = await store.rows(tables.session_recovery, session_id)
    assert (recovery["phase"], recovery["wake_pending"]) == ("promoted", False)
    assert (await store.types(session_id)).count("synthetic") == 1


async def test_queued_input_waits_while_a_turn_is_continued(store: StoreKit, session_id: str) -> None:
    """The turn is not over yet; a steer joins it."""
    await store.begin(session_id)
    await store.admit(session_id, "later", delivery="queue")
    await store.admit(session_id, "now")
    await _take_over(store, session_id)

    prepared = await store.prepare(token_of(session_id, NEXT), queued=True)
    assert (prepared.continued, prepared.promoted) == (True, 1)
    texts = {m.text for m in await store.messages(session_id) if m.type == "user"}
    assert texts == {"hello", "now"}


async def test_a_continuation_alone_holds_queued_input_back(store: StoreKit, session_id: str) -> None:
    """Its turn comes when the continued one is over."""
    await store.begin(session_id)
    await store.admit(session_id, "later", delivery="queue")
    await _take_over(store, session_id)
    token = token_of(session_id, NEXT)

    assert (await store.prepare(token, 1, queued=True)).promoted == 0
    assert (await store.prepare(token, 2, queued=True)).promoted == 1


async def test_promoted_input_without_a_request_is_still_owed_an_answer(store: StoreKit, session_id: str) -> None:
    """The worker died between the preparation and the request."""
    await store.admit(session_id)
    await store.claim(token_of(session_id))
    await store.prepare(token_of(session_id))

    assert await _take_over(store, session_id)
    assert (await store.types(session_id))[-1] == "step.interrupted"
    assert len(await store.rows(tables.session_recovery, session_id)) == 1


async def test_results_of_tools_are_still_owed_an_answer(store: StoreKit, session_id: str) -> None:
    """The step was settled, and the model has yet to see what its tools gave."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    await work.start_tool("call_1")
    await work.settle_tool("call_1")
    await work.settle(work.ended("tool-calls"))

    assert await _take_over(store, session_id)
    assert len(await store.rows(tables.session_recovery, session_id)) == 1
    assert "step.interrupted" not in await store.types(session_id)


@pytest.mark.parametrize("how", ["answered", "failed", "claimed only"])
async def test_nothing_is_continued_that_is_not_owed(store: StoreKit, session_id: str, how: str) -> None:
    """An answer that is complete, or failed for good, or a claim that promoted nothing."""
    if how == "claimed only":
        await store.admit(session_id)
        await store.claim(token_of(session_id))
    else:
        work = await store.begin(session_id)
        await work.say("an answer")
        await work.settle(work.ended() if how == "answered" else work.failed())
    log = await store.events(session_id)

    held = await _take_over(store, session_id)
    assert held is (how == "claimed only")
    assert await store.events(session_id) == log
    assert await store.rows(tables.session_recovery, session_id) == []
    assert len(await store.rows(tables.session_execution, session_id)) == int(held)


@pytest.mark.parametrize("owner_run", ["terminated", "cancelled"])
async def test_what_a_user_ended_from_outside_does_not_go_on(
    store: StoreKit, session_id: str, owner_run: OwnerRun
) -> None:
    """The step is settled as interrupted, with that reason, and there is no continuation."""
    work = await store.begin(session_id)
    await work.say("half an ans")

    assert not await _take_over(store, session_id, owner_run)
    last = (await store.events(session_id))[-1]
    assert (last.type, last.data["reason"]) == ("session.next.step.interrupted.1", owner_run)
    assert await store.rows(tables.session_recovery, session_id) == []
    assert await store.rows(tables.session_execution, session_id) == []


async def test_ending_a_run_from_outside_holds_back_only_what_it_had_in_sight(store: StoreKit, session_id: str) -> None:
    """Input that came after its last event is run, input from before waits for the client."""
    work = await store.begin(session_id)
    before = (await store.admit(session_id, "before", delivery="queue")).receipt
    await work.say("half an ans")
    after = (await store.admit(session_id, "after")).receipt

    await _take_over(store, session_id, "terminated")
    wakes = {row["id"]: row["wake_pending"] for row in await store.rows(tables.session_input, session_id)}
    assert (wakes[before.id], wakes[after.id]) == (False, True)


async def test_what_an_ended_run_promoted_at_the_last_moment_is_answered_when_somebody_calls(
    store: StoreKit, session_id: str
) -> None:
    """Its worker had not heard of the end yet, and prepared a step for what was sent since: that was no part of it."""
    token = token_of(session_id)
    await store.admit(session_id, "sent after the end")
    await store.claim(token)
    assert (await store.prepare(token)).promoted == 1

    assert await _take_over(store, session_id, "terminated")
    going_on = await store.prepare(token_of(session_id, NEXT))
    assert (going_on.promoted, going_on.continued) == (0, True)


async def test_what_an_ended_run_promoted_is_not_continued_beside_other_input(store: StoreKit, session_id: str) -> None:
    """Its user stopped it; the model sees what was said before when it answers what is said next."""
    token = token_of(session_id)
    await store.admit(session_id, "stopped")
    await store.claim(token)
    await store.prepare(token)
    await store.admit(session_id, "what comes next")

    assert await _take_over(store, session_id, "terminated")
    going_on = await store.prepare(token_of(session_id, NEXT))
    assert (going_on.promoted, going_on.continued) == (1, False)


async def _between_steps(store: StoreKit, session_id: str) -> Work:
    """Give work whose step has ended with a tool's result, which the model has not seen."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    await work.start_tool("call_1")
    await work.settle_tool("call_1")
    await work.settle(work.ended("tool-calls"))
    return work


async def test_a_turn_that_is_carried_over_goes_on_without_a_word(store: StoreKit, session_id: str) -> None:
    work = await _between_steps(store, session_id)
    before = await store.events(session_id)

    claimed = await store.claim(token_of(session_id, NEXT), owner_run="closed", carried=True)
    assert (claimed.held, claimed.carried) == (True, True)
    assert await store.events(session_id) == before
    assert await store.rows(tables.session_recovery, session_id) == []
    with pytest.raises(OwnershipLostError):
        await store.prepare(work.token, 2)


async def test_a_turn_that_is_lost_while_it_is_carried_over_is_continued(store: StoreKit, session_id: str) -> None:
    """The new run had claimed the session and not yet prepared its step: an answer is owed all the same."""
    await _between_steps(store, session_id)
    await store.claim(token_of(session_id, NEXT), owner_run="closed", carried=True)

    assert (await store.claim(token_of(session_id, "run-3"), owner_run="closed")).held
    assert (await store.prepare(token_of(session_id, "run-3"))).continued


@pytest.mark.parametrize("owner_run", ["terminated", "cancelled"])
async def test_a_turn_that_its_user_ended_is_not_carried_over(
    store: StoreKit, session_id: str, owner_run: OwnerRun
) -> None:
    await _between_steps(store, session_id)

    assert not (await store.claim(token_of(session_id, NEXT), owner_run=owner_run, carried=True)).held
    assert await store.rows(tables.session_recovery, session_id) == []


@pytest.mark.parametrize("reason", ["user", "cancelled"])
async def test_a_stopped_step_keeps_its_row_and_its_input_waits(
    store: StoreKit, session_id: str, reason: events.InterruptReason
) -> None:
    """Phase unknown under the same id, one interruption, and nothing wakes what was in the inbox."""
    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"))
    await work.keep_live("so far")
    waiting = (await store.admit(session_id, "later", delivery="queue")).receipt
    stop = steps.Settlement(steps.Interruption(reason, interrupt_id="int_1", note="enough"))
    await work.settle(stop)

    row = await store.row(tables.session_execution, session_id)
    assert (row["id"], row["phase"]) == (work.token.execution_id, "unknown")
    log = await store.events(session_id)
    assert [e.data["reason"] for e in log if e.type == "session.next.step.interrupted.1"] == [reason]
    assert (log[-1].data["interruptID"], log[-1].data["note"]) == ("int_1", "enough")
    inputs = {row["id"]: row for row in await store.rows(tables.session_input, session_id)}
    assert (inputs[waiting.id]["wake_pending"], inputs[waiting.id]["promoted_seq"]) == (False, None)
    answer = await store.assistant(session_id)
    assert isinstance(answer.content[0], TextPart)
    assert answer.content[0].text == "so far"

    assert await _take_over(store, session_id)  # the queued input is there to be run
    assert await store.rows(tables.session_recovery, session_id) == []
    assert (await store.types(session_id)).count("step.interrupted") == 1


@pytest.mark.parametrize("began", [True, False], ids=["in the answer", "before the first word"])
async def test_a_run_that_dies_after_the_stop_is_not_continued(store: StoreKit, session_id: str, began: bool) -> None:
    """The user stopped the turn; that its run was lost before the release changes nothing of that."""
    work = await store.begin(session_id)
    if began:
        await work.publish(work.started(), *work.called("call_1"))
    await work.settle(USER_STOP)
    log = await store.events(session_id)

    assert not await _take_over(store, session_id)
    assert await store.events(session_id) == log
    assert await store.rows(tables.session_recovery, session_id) == []


async def test_an_interrupt_clears_wakes_up_to_what_its_user_saw(store: StoreKit, session_id: str) -> None:
    """What was admitted after the sequence that the user had on the screen still runs."""
    work = await store.begin(session_id)
    seen = (await store.admit(session_id, "seen", delivery="queue")).receipt
    unseen = (await store.admit(session_id, "unseen")).receipt
    await work.settle(steps.Settlement(steps.Interruption("user", "int_1", up_to=seen.admitted_seq)))

    wakes = {row["id"]: row["wake_pending"] for row in await store.rows(tables.session_input, session_id)}
    assert (wakes[seen.id], wakes[unseen.id]) == (False, True)
    assert await store.release(work.token, interrupted=True) == "more"


async def test_a_turn_is_continued_so_often_and_then_given_up(store: StoreKit, session_id: str) -> None:
    """Each death counts; after the last one the session is free again, and a new prompt works."""
    work = await store.begin(session_id, run="run-0")
    for n in range(1, 3):
        token = token_of(session_id, f"run-{n}")
        claimed = await store.claim(token, owner_run="closed", max_continuations=2)
        assert (claimed.held, claimed.exhausted) == (True, False)
        assert (await store.row_of_ledger(token))["continuations"] == n
        work = await store.request(token)
        await work.publish(work.started())
    last = await store.claim(token_of(session_id, "run-3"), owner_run="closed", max_continuations=2)

    assert (last.held, last.exhausted) == (False, True)
    assert (await store.types(session_id))[-1] == "step.interrupted"
    assert await store.rows(tables.session_execution, session_id) == []
    assert len(await store.rows(tables.session_recovery, session_id)) == 2
    fresh = await store.begin(session_id, "try again", run="run-4")
    assert (await store.row_of_ledger(fresh.token))["continuations"] == 0


async def test_new_input_gives_a_turn_its_continuations_back(store: StoreKit, session_id: str) -> None:
    """The count is of one turn: a promotion begins it anew."""
    await store.begin(session_id, run="run-0")
    token = token_of(session_id, "run-1")
    await store.claim(token, owner_run="closed", max_continuations=1)
    await store.admit(session_id, "and this")
    await store.request(token)

    claimed = await store.claim(token_of(session_id, "run-2"), owner_run="closed", max_continuations=1)
    assert (claimed.held, claimed.exhausted) == (True, False)


async def test_a_failure_that_may_pass_is_continued_by_its_settlement_once(store: StoreKit, session_id: str) -> None:
    """The next execution counts it, and reconciling adds nothing to it."""
    work = await store.begin(session_id)
    await work.say("half")
    assert await work.settle(work.failed("overloaded", max_continuations=3))
    log = await store.events(session_id)
    again = token_of(session_id, ordinal=2)
    assert (await store.claim(again)).held

    assert await store.events(session_id) == log
    assert (await store.row_of_ledger(again))["continuations"] == 1
    assert len(await store.rows(tables.session_recovery, session_id)) == 1


async def test_tools_left_open_by_an_earlier_hand_fail_before_anything_else(store: StoreKit, session_id: str) -> None:
    """A preparation that finds them, whoever left them, fails them and promotes after that."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    async with store.database.begin() as conn:
        # The books say that the step was settled, by whatever mishap; the transcript says otherwise.
        moved = text("UPDATE execution_ledger SET stage = 'settled' WHERE execution_id = :id")
        await conn.execute(moved, {"id": work.token.execution_id})
    await store.admit(session_id, "go on")

    await store.prepare(work.token, 2)
    assert (await store.types(session_id))[-3:] == ["prompt.admitted", "tool.failed", "prompted"]
    [part] = (await store.assistant(session_id)).content
    assert isinstance(part, ToolPart)
    assert isinstance(part.state, FailedTool)


async def test_every_settlement_has_an_assistant_message(store: StoreKit, session_id: str) -> None:
    """An empty answer and a failure before the first word begin the step that they end."""
    for number, settled in enumerate(("ended", "failed"), 1):
        work = await store.begin(session_id, f"prompt {number}", run=f"run-{number}")
        await work.settle(work.ended() if settled == "ended" else work.failed())
        assert (await store.types(session_id))[-2:] == ["step.started", f"step.{settled}"]
        answer = await store.assistant(session_id)
        assert isinstance(answer, AssistantMessage)
        assert (answer.id, answer.content) == (work.message_id, ())
        assert await store.release(work.token) == "done"


async def test_a_stop_between_two_steps_names_no_message(store: StoreKit, session_id: str) -> None:
    """The step before stays settled as it was."""
    work = await store.begin(session_id)
    await work.say("done")
    await work.settle()
    answer = await store.assistant(session_id)
    await store.do(steps.settle, work.token, 2, USER_STOP, LEASE)

    assert "assistantMessageID" not in (await store.events(session_id))[-1].data
    assert await store.assistant(session_id) == answer


async def test_a_step_that_ends_well_sets_the_count_of_continuations_back(store: StoreKit, session_id: str) -> None:
    """A long turn that meets one lost worker after another is not given up while it gets on."""
    work = await store.begin(session_id)
    await work.say("half")
    await store.claim(token_of(session_id, ordinal=2), max_continuations=1)
    token = token_of(session_id, ordinal=2)
    await store.prepare(token)
    again = await store.request(token)
    await again.publish(again.started(), *again.called("call_1"))
    await again.settle()

    await store.claim(token_of(session_id, ordinal=3), max_continuations=1)
    assert (await store.row_of_ledger(token_of(session_id, ordinal=3)))["continuations"] == 1
