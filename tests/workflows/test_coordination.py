"""Who waits for a turn, joins it, or comes while it is being stopped: what each of them gets, and what is run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from temporalio.client import WithStartWorkflowOperation, WorkflowUpdateHandle, WorkflowUpdateStage
from temporalio.common import WorkflowIDConflictPolicy

from fencepost.client import open_client
from fencepost.domain.contracts import SESSION_TURN, SIGNAL_WAKE, UPDATE_RESUME, TurnResult
from fencepost.domain.inbox import Location
from fencepost.domain.messages import AssistantMessage
from fencepost.providers.script import Action, Cut, ErrorEvent, Gate, Hang, Pause, Say
from fencepost.store.sessions import NewSession
from tests.house_kit import House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import Outage, in_phase, interruptions, is_held, pending
from tests.workflows.test_steering import answered, asked, resume
from tests.workflows.test_turn import said

REFUSED = ErrorEvent("you shall not pass", code="invalid_request_error", type="invalid_request_error")


async def recorded(house: House, *texts: str, delivery: str = "steer") -> str:
    """Give a new session with input that waits for somebody's call."""
    session_id = house.new_id()
    for text in texts:
        await house.prompt(session_id, text, delivery=delivery, resume=False)
        await house.ended(session_id)
    return session_id


async def wake(house: House, session_id: str) -> None:
    """Wake a session, whether or not a run is open."""
    await house.client.start_workflow(
        SESSION_TURN,
        {},
        id=session_id,
        task_queue=house.task_queue,
        start_signal=SIGNAL_WAKE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )


async def resuming(house: House, session_id: str) -> WorkflowUpdateHandle[TurnResult]:
    """Resume a session, and come back as soon as the run knows."""
    start: WithStartWorkflowOperation[Any, Any] = WithStartWorkflowOperation(
        SESSION_TURN,
        {},
        id=session_id,
        task_queue=house.task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    handle: WorkflowUpdateHandle[TurnResult] = await house.client.start_update_with_start_workflow(
        UPDATE_RESUME,
        start_workflow_operation=start,
        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
        result_type=TurnResult,
    )
    return handle


async def runs_of(house: House, session_id: str) -> int:
    """Replay the session's runs and give how many there are."""
    return await assert_replays(house, session_id)


@pytest.mark.conformance("RUN-04")
async def test_callers_that_resume_at_once_share_one_run_and_one_request(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Pause(gate), Say("Once.")]])
    session_id = await recorded(h, "Go.")
    before = await runs_of(h, session_id)
    callers = await asyncio.gather(*(resuming(h, session_id) for _ in range(2)))
    await gate.reached()
    gate.release()
    results = await asyncio.gather(*(caller.result() for caller in callers))
    await h.ended(session_id)

    assert [result.outcome for result in results] == ["done", "done"]
    assert len(h.provider.requests) == 1
    assert await runs_of(h, session_id) == before + 1


@pytest.mark.conformance("RUN-07")
async def test_everybody_who_waits_for_a_failed_run_learns_the_same(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Pause(gate), REFUSED], [Say("Now I can.")]])
    session_id = await recorded(h, "Go.")
    callers = await asyncio.gather(*(resuming(h, session_id) for _ in range(2)))
    await gate.reached()
    gate.release()
    first, second = await asyncio.gather(*(caller.result() for caller in callers))
    await h.ended(session_id)

    assert first == second
    assert (first.outcome, first.error) == ("failed", "you shall not pass")
    assert len(h.provider.requests) == 1
    again = await resume(h, session_id)
    assert again.outcome == "done"
    assert len(h.provider.requests) == 2


@pytest.mark.conformance("RUN-55")
async def test_a_steer_that_comes_while_the_request_fails_is_answered_afterwards(house: MakeHouse) -> None:
    """Who waits for the turn learns of its failure, not of what follows."""
    gate, second = Gate(), Gate()
    h = await house([[Pause(gate), REFUSED], [Pause(second), Say("Then this.")]])
    session_id = await recorded(h, "Go.")
    caller = await resuming(h, session_id)
    await gate.reached()
    await h.prompt(session_id, "And this.")
    gate.release()
    result = await caller.result()
    await second.reached()  # the follow-up is at work, and the caller has its answer
    second.release()
    await h.ended(session_id)

    assert (result.outcome, result.error) == ("failed", "you shall not pass")
    assert [asked(body) for body in h.provider.requests] == [["Go."], ["Go.", "And this."]]
    assert said((await h.messages(session_id))[-1]) == "Then this."
    assert await pending(h, session_id) == {}
    await assert_replays(h, session_id)


@pytest.mark.conformance("RUN-67")
@pytest.mark.parametrize("text", ["", "half of it"], ids=["before the first word", "after text"])
async def test_a_broken_stream_ends_the_step_as_failed(house: MakeHouse, text: str) -> None:
    """Nothing in the stream says why: the connection is gone."""
    script: list[Action] = [*([Say(text, chunks=1)] if text else []), Cut()]
    h = await house([script], limits={"max_provider_attempts": 1, "max_continuations": 0})
    session_id = await recorded(h, "Go.")
    result = await resume(h, session_id)
    await h.ended(session_id)
    message = (await h.messages(session_id))[-1]
    types = await h.types(session_id)

    assert result.outcome == "failed"
    assert isinstance(message, AssistantMessage)
    assert message.error is not None
    assert (message.finish, message.error.message, said(message)) == ("error", result.error, text)
    assert message.time.completed is not None
    assert types[-1] == "session.next.step.failed.2"
    assert not [kind for kind in types if kind.startswith(("session.next.step.ended", "session.next.step.interrupted"))]
    assert len(h.provider.requests) == 1
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("COO-02")
async def test_who_joins_a_run_that_a_wake_started_causes_no_other(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Pause(gate), Say("Once.")]])
    session_id = await recorded(h, "Go.")
    before = await runs_of(h, session_id)
    await wake(h, session_id)
    await gate.reached()
    caller = await resuming(h, session_id)
    gate.release()
    result = await caller.result()
    await h.ended(session_id)

    assert (result.outcome, result.steps) == ("done", 1)
    assert len(h.provider.requests) == 1
    assert await runs_of(h, session_id) == before + 1
    assert not await is_held(h, session_id)


@pytest.mark.conformance("COO-09")
async def test_an_interrupt_of_an_idle_session_changes_nothing(house: MakeHouse) -> None:
    """By a client it reaches nobody; with a start of its own it finds nothing to stop. Input that waits stays so."""
    h = await house([[Say("Hello.")]])
    session_id = await recorded(h, "Go.")
    before = await h.events(session_id)
    async with open_client(h.services.settings, h.services.environ) as client:
        assert await client.interrupt(session_id) is False
    handle = await h.client.start_workflow(
        SESSION_TURN, {}, id=session_id, task_queue=h.task_queue, start_signal="interrupt", start_signal_args=[{}]
    )
    stopped: Any = await handle.result()

    assert stopped["outcome"] == "idle"
    assert await h.events(session_id) == before
    assert h.provider.requests == []
    assert (await resume(h, session_id)).outcome == "done"


@pytest.mark.conformance("COO-10")
async def test_an_interrupt_takes_the_wake_that_waits_with_it(house: MakeHouse) -> None:
    """One run and one request: what was woken for before the interrupt does not run after it."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Never said.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await h.prompt(session_id, "Next.", delivery="queue")
    await wake(h, session_id)
    await handle.signal("interrupt")
    result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert len(h.provider.requests) == 1
    assert await pending(h, session_id) == {"Next.": False}
    assert await runs_of(h, session_id) == 1
    assert not await is_held(h, session_id)


@pytest.mark.conformance("COO-11")
@pytest.mark.parametrize("came", ["before", "meanwhile"])
async def test_a_wake_that_comes_while_an_interrupt_is_settled_runs(house: MakeHouse, came: str) -> None:
    """It is a call of its own, so also what the interrupt would have left waiting is run."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Next it is.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    if came == "before":
        await h.prompt(session_id, "Next.", delivery="queue")
    with Outage(h, "settle_step") as outage:
        await handle.signal("interrupt")
        await outage.felt.wait()
        if came == "meanwhile":
            await h.prompt(session_id, "Next.", delivery="queue")
        else:
            await wake(h, session_id)
        await in_phase(handle, "waiting")
    await h.ended(session_id)

    assert len(await interruptions(h, session_id)) == 1
    assert await answered(h, session_id) == ["Go.", "Next."]
    assert said((await h.messages(session_id))[-1]) == "Next it is."
    assert len(h.provider.requests) == 2
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)


@pytest.mark.conformance("COO-12")
async def test_a_resume_that_comes_while_an_interrupt_is_settled_makes_its_step(house: MakeHouse) -> None:
    """A wake began the turn; the resume forces one although the inbox is empty by then."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Whole.")]])
    session_id = await recorded(h, "Go.")
    await wake(h, session_id)
    await gate.reached()
    handle = h.client.get_workflow_handle(session_id)
    with Outage(h, "settle_step") as outage:
        await handle.signal("interrupt")
        await outage.felt.wait()
        caller = await resuming(h, session_id)
        await in_phase(handle, "waiting")
    result = await caller.result()
    await h.ended(session_id)

    assert result.outcome == "done"
    assert [said(m) for m in await h.messages(session_id) if isinstance(m, AssistantMessage)] == ["Half", "Whole."]
    assert len(h.provider.requests) == 2
    assert len(await interruptions(h, session_id)) == 1
    await assert_replays(h, session_id)


@pytest.mark.conformance("COO-14")
async def test_a_client_that_stops_waiting_stops_nothing(house: MakeHouse) -> None:
    """Of two who resumed and one who waits for the result, two go away in the middle."""
    gate = Gate()
    h = await house([[Say("Half "), Pause(gate), Say("and whole.")]])
    async with open_client(h.services.settings, h.services.environ) as client:
        session_id = (await client.create(NewSession(Location(directory=str(h.directory))))).id
        await client.prompt(session_id, "Go.", resume=False)
        leaving = [asyncio.create_task(client.resume(session_id))]
        await gate.reached()
        staying = await resuming(h, session_id)
        leaving.append(asyncio.create_task(client.result(session_id)))
        await client.open_queue(session_id)  # the second one waits by now
        for task in leaving:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    gate.release()
    result = await staying.result()
    await h.ended(session_id)

    assert all(task.cancelled() for task in leaving)
    assert result.outcome == "done"
    assert said((await h.messages(session_id))[-1]) == "Half and whole."
    assert len(h.provider.requests) == 1
    assert await interruptions(h, session_id) == []


async def test_a_prompt_after_an_interrupt_is_not_stopped_with_what_came_before(house: MakeHouse) -> None:
    """The client knows that it has just interrupted: its prompt comes behind, although the session is still at work."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("As you like.")]])
    session_id = h.new_id()
    async with open_client(h.services.settings, h.services.environ) as client:
        handle = await h.start(session_id, "Go.")
        await gate.reached()
        with Outage(h, "admit_input") as outage:
            await handle.signal("steer", {"text": "Before."})
            await outage.felt.wait()
            await client.interrupt(session_id)
            prompting = asyncio.create_task(client.prompt(session_id, "This instead."))
            await in_phase(handle, "waiting")
        receipt = await prompting
        result = await client.result(session_id)

    assert receipt.prompt.text == "This instead."
    assert result.outcome == "done"
    assert await answered(h, session_id) == ["Go.", "Before.", "This instead."]
    assert len(await interruptions(h, session_id)) == 1
