"""Runs that end from outside, and hands that go on all the same: reset, terminated, paused, run twice at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities import turn_activities
from fencepost.domain import contracts
from fencepost.domain.contracts import (
    AdmitStart,
    ClaimInput,
    ClaimResult,
    PromptInput,
    ReleaseInput,
    Resolved,
    ResolveInput,
    SettleInput,
    StartInput,
    StreamInput,
    StreamResult,
    ToolInput,
)
from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.messages import FailedTool, UserMessage
from fencepost.domain.projection import INTERRUPTED
from fencepost.providers.script import Action, CallTool, Gate, Hang, Pause, Say
from tests.end_to_end.test_worker_loss import kept, stage, texts
from tests.faults.stage import TASK_SECONDS
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild, open_house, served
from tests.replay import assert_replays
from tests.worker_process import exists
from tests.workflows.test_interrupts import check_transcript, interruptions, is_held
from tests.workflows.test_turn import tools

Replies = list[list[Action]]


async def tasks_done(handle: WorkflowHandle[Any, Any]) -> list[int]:
    """Give the ids of the events with which workflow tasks were completed."""
    history = await handle.fetch_history()
    return [e.event_id for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED]


async def reset(house: House, session_id: str, task: int, run_id: str | None = None) -> WorkflowHandle[Any, Any]:
    """Reset a run, by default the session's newest one, to one of its workflow tasks, counted from 0."""
    handle = house.client.get_workflow_handle(session_id, run_id=run_id)
    done = await tasks_done(handle)
    answer = await house.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=house.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=session_id, run_id=run_id or ""),
            reason="a test",
            request_id=house.new_id(),
            workflow_task_finish_event_id=done[task],
        )
    )
    return house.client.get_workflow_handle(session_id, run_id=answer.run_id)


def after_interruption(log: list[Any], reason: str) -> list[Any]:
    """Give the events after the interruption with this reason, the only one."""
    [at] = [n for n, event in enumerate(log) if event.type.startswith("session.next.step.interrupted")]
    assert log[at].data["reason"] == reason
    return log[at + 1 :]


async def said_by_users(house: House, session_id: str) -> list[str]:
    return [m.text for m in await house.messages(session_id) if isinstance(m, UserMessage)]


@asynccontextmanager
async def held_house(
    database_url: str, client: Client, task_queue: str, directory: Path, replies: Replies, tool: HeldTool
) -> AsyncIterator[tuple[House, AsyncExitStack]]:
    """Give a house that is served until its test says so: then every hand has done whatever it still did."""
    options: dict[str, Any] = {"registry": tool.registry, "serve": False}
    async with (
        open_house(database_url, client, task_queue, directory, replies, **options) as house,
        AsyncExitStack() as workers,
    ):
        await workers.enter_async_context(served(house.services))
        yield house, workers


async def test_a_reset_to_the_first_task_in_the_middle_of_a_stream(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """The new run takes over; nothing that the old one's activities still do is seen, and no input comes twice."""
    gate, tool = Gate(), HeldTool()
    replies: Replies = [
        [Say("Old words. "), CallTool("hold", id="call_1"), Say("Wait."), Pause(gate), Say("Late words.")],
        [Say("New words.")],
        [Say("More.")],
    ]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        handle = await house.start(session_id, "Go.")
        await gate.reached()
        await tool.started(1)
        await handle.signal("steer", {"text": "Steer."})
        await house.prompt(session_id, "Update.", delivery="queue")
        fresh = await reset(house, session_id, 0)
        await house.provider.received(2)  # by now the new run has taken over
        gate.release()
        tool.gate.set()
        result: Any = await fresh.result()
        await workers.aclose()
        log = await house.events(session_id)
        messages = await house.messages(session_id)

        assert result["outcome"] == "done"
        assert sorted(await said_by_users(house, session_id)) == ["Go.", "Steer.", "Update."]
        old = messages[1]
        later = after_interruption(log, "reset")
        assert not [event for event in later if event.data.get("assistantMessageID") == old.id]
        assert not [event for event in log if "Late words" in str(event.data)]
        assert len(tool.invocations) == 1
        [part] = tools(old)
        assert isinstance(part.state, FailedTool)
        assert part.state.error.message == INTERRUPTED
        for body in house.provider.requests:
            check_transcript(body)
        assert not await is_held(house, session_id)
        assert await assert_replays(house, session_id) >= 2
        await assert_equal_to_rebuild(house, session_id)


async def test_a_reset_after_a_finished_step(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """What is settled stays settled, and its tool is not started again."""
    gate, tool = Gate(), HeldTool()
    tool.gate.set()
    replies: Replies = [
        [CallTool("hold", id="call_1")],
        [Say("Second step. "), Pause(gate), Say("Late words.")],
        [Say("New words.")],
    ]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        handle = await house.start(session_id, "Go.")
        await gate.reached()
        done = await tasks_done(handle)
        fresh = await reset(house, session_id, len(done) - 2)
        await house.provider.received(3)
        gate.release()
        result: Any = await fresh.result()
        await workers.aclose()
        log = await house.events(session_id)
        messages = await house.messages(session_id)

        assert result["outcome"] == "done"
        assert len(tool.invocations) == 1
        assert not [event for event in log if "Late words" in str(event.data)]
        later = after_interruption(log, "reset")
        assert not [event for event in later if event.data.get("assistantMessageID") in {m.id for m in messages[:3]}]
        assert texts(messages)[-1] == "New words."
        check_transcript(house.provider.requests[-1])
        assert not await is_held(house, session_id)
        assert await assert_replays(house, session_id) == 2
        await assert_equal_to_rebuild(house, session_id)


@pytest.mark.parametrize("task", [0, 1, -1])
async def test_a_reset_of_a_closed_run_answers_nothing_twice(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, task: int
) -> None:
    tool = HeldTool()
    tool.gate.set()
    replies: Replies = [[CallTool("hold")], [Say("Once.")]]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        await house.run(session_id, "Go.")
        before = await house.events(session_id)
        fresh = await reset(house, session_id, task)
        await fresh.result()
        await workers.aclose()

        assert await house.events(session_id) == before
        assert len(house.provider.requests) == 2
        assert len(tool.invocations) == 1
        assert not await is_held(house, session_id)
        await assert_replays(house, session_id)


async def test_a_reset_does_not_interrupt_again(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Temporal applies the signals of the old run to the new one. The interrupt stopped the first answer only."""
    first, second, tool = Gate(), Gate(), HeldTool()
    replies: Replies = [
        [Say("Half"), Pause(first), Hang()],
        [Say("Another "), Pause(second), Hang()],
        [Say("Whole.")],
    ]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        handle = await house.start(session_id, "Go.")
        await first.reached()
        await handle.signal("interrupt")
        await handle.signal("steer", {"text": "Go on."})
        await second.reached()
        fresh = await reset(house, session_id, 0)
        result: Any = await fresh.result()
        await workers.aclose()

        assert result["outcome"] == "done"
        assert [data["reason"] for data in await interruptions(house, session_id)] == ["user", "reset"]
        assert await said_by_users(house, session_id) == ["Go.", "Go on."]
        assert texts(await house.messages(session_id))[-1] == "Whole."
        assert await assert_replays(house, session_id) >= 2  # one more, if the first was old before it was reset
        await assert_equal_to_rebuild(house, session_id)


async def test_what_came_by_update_and_by_signal_keeps_its_order_after_a_reset(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Temporal applies both to the new run at once, in one order when it runs and in another when it is replayed."""
    gate, tool = Gate(), HeldTool()
    replies: Replies = [[Say("Half"), Pause(gate), Hang()], [Say("Whole.")], [Say("And more.")]]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        await house.prompt(session_id, "Go.")
        handle = house.client.get_workflow_handle(session_id)
        await gate.reached()
        await handle.signal("interrupt")
        await handle.signal("steer", {"text": "Go on."})
        await house.prompt(session_id, "Afterwards.", delivery="queue")
        await house.ended(session_id)
        before = await house.events(session_id)
        fresh = await reset(house, session_id, 0)
        await fresh.result()
        await workers.aclose()

        assert await house.events(session_id) == before
        assert await assert_replays(house, session_id) >= 2
        await assert_equal_to_rebuild(house, session_id)


async def test_a_terminated_run_is_settled_by_the_next_prompt(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Terminating is a user's interrupt: the answer does not go on by itself, and nothing late is seen of it."""
    gate, tool = Gate(), HeldTool()
    replies: Replies = [
        [Say("Old words. "), CallTool("hold", id="call_1"), Say("Wait."), Pause(gate), Say("Late words.")],
        [Say("New words.")],
    ]
    async with held_house(database_url, temporal_client, task_queue, tmp_path, replies, tool) as (house, workers):
        session_id = house.new_id()
        handle = await house.start(session_id, "Go.")
        await gate.reached()
        await tool.started(1)
        await handle.terminate("enough")
        running = asyncio.create_task(house.run(session_id, "Now this."))
        await house.provider.received(2)
        gate.release()
        tool.gate.set()
        result = await running
        await workers.aclose()
        log = await house.events(session_id)
        messages = await house.messages(session_id)

        assert result.outcome == "done"
        assert [m.type for m in messages] == ["user", "assistant", "user", "assistant"]
        later = after_interruption(log, "terminated")
        assert not [event for event in later if event.data.get("assistantMessageID") == messages[1].id]
        assert not [event for event in log if "Late words" in str(event.data)]
        assert len(tool.invocations) == 1
        check_transcript(house.provider.requests[-1])
        assert not await is_held(house, session_id)
        await assert_equal_to_rebuild(house, session_id)


async def started(house: House, session_id: str, text: str) -> WorkflowHandle[Any, Any]:
    """Start a turn of which Temporal does not wait long for a worker that stands still with a workflow task."""
    return await house.client.start_workflow(
        contracts.SESSION_TURN,
        {"prompt": {"text": text}},
        id=session_id,
        task_queue=house.task_queue,
        task_timeout=timedelta(seconds=TASK_SECONDS),
    )


async def test_a_paused_worker_that_streams_shows_nothing_after_its_session_was_taken_over(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    gate = Gate()
    replies: Replies = [
        [
            Say("The first half, ", chunks=2),
            Pause(gate),
            Say("late words"),
            CallTool("bash", {"command": "touch late"}),
        ],
        [Say("and the second half.")],
    ]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        paused = await start()
        session_id = house.new_id()
        handle = await started(house, session_id, "Tell me all.")
        await gate.reached()
        await kept(house, "The first half, ")
        paused.signal(signal.SIGSTOP)
        await start()
        result: Any = await handle.result()
        before = await house.events(session_id)
        gate.release()
        paused.signal(signal.SIGCONT)
        paused.signal(signal.SIGTERM)
        assert await paused.ended() == 0  # it has done whatever it still does

        assert result["outcome"] == "done"
        assert texts(await house.messages(session_id)) == ["The first half, ", "and the second half."]
        assert await house.events(session_id) == before
        assert not (tmp_path / "late").exists()
        assert len(house.provider.requests) == 2
        await assert_replays(house, session_id)
        await assert_equal_to_rebuild(house, session_id)


async def test_a_paused_worker_that_runs_a_tool_does_not_finish_it(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Its command is dead before anybody else goes on, and the call is settled as interrupted, once."""
    effects, go = tmp_path / "effects", tmp_path / "go"
    command = f"echo begun >> {effects}; while ! [ -e {go} ]; do sleep 0.05; done; echo ended >> {effects}"
    replies: Replies = [[CallTool("bash", {"command": command}, id="call_1")], [Say("I stopped.")]]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        paused = await start()
        session_id = house.new_id()
        handle = await started(house, session_id, "Do it.")
        await exists(effects)
        paused.signal(signal.SIGSTOP)
        await start()
        result: Any = await handle.result()
        before = await house.events(session_id)
        go.touch()
        paused.signal(signal.SIGCONT)
        paused.signal(signal.SIGTERM)
        assert await paused.ended() == 0
        messages = await house.messages(session_id)

        assert result["outcome"] == "done"
        assert effects.read_text() == "begun\n"
        assert await house.events(session_id) == before
        [part] = tools(messages[1])
        assert isinstance(part.state, FailedTool)
        assert part.state.error.message == INTERRUPTED
        await assert_replays(house, session_id)
        await assert_equal_to_rebuild(house, session_id)


class Hands:
    """The activities of a worker, called directly, as often and as simultaneously as Temporal might."""

    def __init__(self, house: House, session_id: str, run_id: str) -> None:
        self._by_name: dict[str, Callable[..., Any]] = {
            getattr(function, "__temporal_activity_definition").name: function
            for function in turn_activities(house.services)
        }
        self._session_id = session_id
        self._run_id = run_id

    async def call(self, name: str, given: Any) -> Any:
        """Call an activity once; an ownership loss is an answer."""
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, workflow_id=self._session_id, workflow_run_id=self._run_id)
        try:
            return await environment.run(self._by_name[name], given)
        except ApplicationError as error:
            if error.type != OwnershipLostError.code:
                raise
            return OwnershipLostError.code

    async def twice(self, name: str, given: Any) -> Any:
        """Call an activity twice at once; both give the same answer."""
        one, other = await asyncio.gather(self.call(name, given), self.call(name, given))
        assert one == other
        return one

    async def once(self, name: str, given: Any) -> Any:
        """Call an activity twice at once; one of the two may do its work."""
        answers = await asyncio.gather(self.call(name, given), self.call(name, given))
        [answer] = [answer for answer in answers if answer != OwnershipLostError.code]
        return answer


@pytest.mark.parametrize("repetition", range(3))
async def test_every_activity_of_a_turn_done_twice_at_once(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, repetition: int
) -> None:
    tool = HeldTool()
    tool.gate.set()
    replies: Replies = [[Say("Once. "), CallTool("hold", id="call_1")]]
    async with open_house(
        database_url, temporal_client, task_queue, tmp_path, replies, registry=tool.registry, serve=False
    ) as house:
        session_id, run_id = house.new_id(), f"run-{repetition}"
        hands = Hands(house, session_id, run_id)
        start = StartInput(prompt=PromptInput(text="Go."))
        await hands.twice(contracts.ADMIT_START, AdmitStart(session_id=session_id, start=start, input_id="msg_1"))
        claim: ClaimResult = await hands.twice(contracts.CLAIM_SESSION, ClaimInput(session_id=session_id, ordinal=1))
        assert claim.token is not None
        about: dict[str, Any] = {"token": claim.token, "step": 1}
        begun: Resolved = await hands.twice(contracts.RESOLVE_MODEL, ResolveInput(**about))
        plan = begun.plan
        assert plan is not None
        about["assistant_message_id"] = begun.assistant_message_id
        result: StreamResult = await hands.once(contracts.STREAM_PROVIDER, StreamInput(**about, attempt=1, plan=plan))
        await hands.once(contracts.EXECUTE_TOOL, ToolInput(**about, call_id=result.calls[0].id, plan=plan))
        await hands.twice(contracts.SETTLE_STEP, SettleInput(**about, plan=plan, result=result))
        released = await hands.twice(contracts.RELEASE_SESSION, ReleaseInput(token=claim.token, step=1))
        types = await house.types(session_id)

        assert released.state == "done"
        assert len(house.provider.requests) == 1
        assert len(tool.invocations) == 1
        assert types == [
            "session.next.prompt.admitted.1",
            "session.next.prompted.1",
            "session.next.step.started.1",
            "session.next.text.started.1",
            "session.next.text.ended.1",
            "session.next.tool.input.started.1",
            "session.next.tool.input.ended.1",
            "session.next.tool.called.1",
            "session.next.tool.success.1",
            "session.next.step.ended.2",
        ]
        await assert_equal_to_rebuild(house, session_id)
