"""A user stops a turn: at any moment, within a second, and without losing what was said or sent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError

from fencepost.domain.contracts import TurnResult
from fencepost.domain.errors import UnavailableError
from fencepost.domain.messages import AssistantMessage, FailedTool, UserMessage
from fencepost.domain.projection import INTERRUPTED
from fencepost.providers.script import Action, CallTool, Cut, Fail, Gate, Hang, Pause, Say
from fencepost.store import tables
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Listener
from fencepost.store.readers import follow
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.worker_process import exists
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_turn import said, tools

SOON = 1.5


async def interrupt(house: House, session_id: str, **given: Any) -> TurnResult:
    """Interrupt the open run, and wait for its end, which comes soon."""
    handle = house.client.get_workflow_handle(session_id)
    begun = asyncio.get_running_loop().time()
    await handle.signal("interrupt", given)
    result = await house.ended(session_id)
    assert asyncio.get_running_loop().time() - begun < SOON
    return result


async def in_phase(handle: WorkflowHandle[Any, Any], phase: str) -> None:
    """Wait until the open run says that it is in this phase."""
    while True:
        status: Any = await handle.query("status")
        if status["phase"] == phase:
            return
        await asyncio.sleep(0.02)


async def logged(house: House, session_id: str, kind: str) -> None:
    """Wait until the log has an event of this stored type."""
    listener = Listener(house.services.database)
    try:
        async for item in follow(house.services.database, listener, session_id):
            if isinstance(item, StoredEvent) and item.type == kind:
                return
    finally:
        await listener.close()


async def pending(house: House, session_id: str) -> dict[str, bool]:
    """Give the texts that wait in the inbox, and whether they ask for execution."""
    inbox = tables.session_input
    async with house.services.database.read() as conn:
        rows = await conn.execute(select(inbox).where(inbox.c.session_id == session_id, inbox.c.promoted_seq.is_(None)))
        return {row.prompt["text"]: row.wake_pending for row in rows}


async def is_held(house: House, session_id: str) -> bool:
    """Say whether anybody owns the session."""
    execution = tables.session_execution
    async with house.services.database.read() as conn:
        rows = await conn.execute(select(execution.c.id).where(execution.c.session_id == session_id))
        return rows.first() is not None


class Outage:
    """A database that is away for one activity, until the body ends: the turn waits with a timer."""

    def __init__(self, house: House, activity: str) -> None:
        self._database = house.services.database
        self._activity = activity
        self.felt = asyncio.Event()

    def __enter__(self) -> Outage:
        inner = self._database.transact

        async def transact(work: Any, **how: Any) -> Any:
            if f".{self._activity}." in work.__qualname__:
                self.felt.set()
                raise UnavailableError("away")
            return await inner(work, **how)

        self._database.transact = transact  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        del self._database.transact


async def interruptions(house: House, session_id: str) -> list[dict[str, Any]]:
    return [e.data for e in await house.events(session_id) if e.type == "session.next.step.interrupted.1"]


def check_transcript(body: dict[str, Any]) -> None:
    """Check that each tool call has exactly one result, right after its assistant message."""
    messages = [m for m in body["messages"] if m["role"] != "system"]
    expected: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert expected, "a result without a call"
            expected.remove(message["tool_call_id"])
        else:
            assert not expected, "a call without a result"
            expected = [call["id"] for call in message.get("tool_calls") or ()]
    assert not expected


async def test_the_next_prompt_after_an_interrupt_sees_a_valid_transcript(house: MakeHouse) -> None:
    tool, gate = HeldTool(), Gate()
    calls: list[Action] = [Say("Two things."), CallTool("hold", {"note": "a"}), CallTool("hold", {"note": "b"})]
    h = await house([[*calls, Say("Wait."), Pause(gate), Hang()], [Say("Fine.")]], registry=tool.registry)
    session_id = h.new_id()
    await h.start(session_id, "Do two things.")
    await gate.reached()
    await tool.started(2)
    result = await interrupt(h, session_id, id="int_1", reason="enough")

    assert result.outcome == "interrupted"
    assert tool.cancelled == 2
    assert not await is_held(h, session_id)
    [said_so] = await interruptions(h, session_id)
    assert (said_so["reason"], said_so["note"], said_so["interruptID"]) == ("user", "enough", "int_1")
    again = await h.run(session_id, "Never mind.")
    messages = await h.messages(session_id)

    assert again.outcome == "done"
    assert [message.type for message in messages] == ["user", "assistant", "user", "assistant"]
    for part in tools(messages[1]):
        assert isinstance(part.state, FailedTool)
        assert part.state.error.message == INTERRUPTED
    check_transcript(h.provider.requests[1])
    assert [m["role"] for m in h.provider.requests[1]["messages"] if m["role"] != "system"] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert await assert_replays(h, session_id) == 2
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_kills_the_command_that_runs(house: MakeHouse, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 300"
    h = await house([[CallTool("bash", {"command": command})]])
    session_id = h.new_id()
    await h.start(session_id, "Sleep.")
    await exists(pid_file)
    result = await interrupt(h, session_id)
    messages = await h.messages(session_id)

    assert result.outcome == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    [part] = tools(messages[1])
    assert isinstance(part.state, FailedTool)
    assert part.state.error.message == INTERRUPTED
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-65")
async def test_an_interrupt_while_tools_are_awaited(house: MakeHouse) -> None:
    """The stream has ended; one tool is done, the other one runs."""
    tool = HeldTool()
    h = await house([[CallTool("read", {"path": "none"}), CallTool("hold")]], registry=tool.registry)
    session_id = h.new_id()
    await h.start(session_id, "Go.")
    await tool.started(1)
    await logged(h, session_id, "session.next.tool.failed.1")
    result = await interrupt(h, session_id)
    types = await h.types(session_id)
    awaited = tools((await h.messages(session_id))[1])[1].state

    assert result.outcome == "interrupted"
    assert isinstance(awaited, FailedTool)
    assert awaited.error.message == INTERRUPTED
    assert tool.cancelled == 1
    assert types.count("session.next.tool.failed.1") == 2
    assert types[-1] == "session.next.step.interrupted.1"
    assert not [kind for kind in types if kind.startswith(("session.next.step.ended", "session.next.step.failed"))]
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_during_a_back_off(house: MakeHouse) -> None:
    h = await house([[Fail(429, headers={"retry-after": "30"})], [Say("Never said.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await in_phase(handle, "retrying")
    result = await interrupt(h, session_id)

    assert result.outcome == "interrupted"
    assert len(h.provider.requests) == 1
    assert not await is_held(h, session_id)
    assert len(await interruptions(h, session_id)) == 1
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("activity", ["admit_start", "_claim", "resolve_model"])
async def test_an_interrupt_while_the_turn_waits_for_the_database(house: MakeHouse, activity: str) -> None:
    """The interrupt comes before any request was made: none is made."""
    h = await house([[Say("Hello.")]])
    session_id = h.new_id()
    with Outage(h, activity) as outage:
        # Claim and first step go with the admission of a start input, and by themselves after any other.
        await (h.start if activity == "admit_start" else h.prompt)(session_id, "Go.")
        handle = h.services.temporal.get_workflow_handle(session_id)
        await outage.felt.wait()
        await handle.signal("interrupt")
        await in_phase(handle, "waiting")
    result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert h.provider.requests == []
    assert await pending(h, session_id) == ({"Go.": False} if activity == "_claim" else {})
    assert not await is_held(h, session_id)
    assert (await h.run(session_id, "Now.")).outcome == "done"
    assert await assert_replays(h, session_id) == 2
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("queued", [False, True])
async def test_an_interrupt_during_the_release(house: MakeHouse, queued: bool) -> None:
    """The turn is done and stays so; the next one does not begin."""
    gate = Gate()
    h = await house([[Pause(gate), Say("Done.")], [Say("Never said.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    if queued:
        await h.prompt(session_id, "Next.", delivery="queue")
    with Outage(h, "settle_step") as outage:
        gate.release()
        await outage.felt.wait()
        await handle.signal("interrupt")
        await in_phase(handle, "waiting")
    result = await h.ended(session_id)

    assert result.outcome == ("interrupted" if queued else "done")
    assert len(h.provider.requests) == 1
    assert await pending(h, session_id) == ({"Next.": False} if queued else {})
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_during_the_settlement_of_a_cut_answer(house: MakeHouse) -> None:
    """The answer was to go on by a continuation: it does not."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Cut()], [Say("Never said.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    with Outage(h, "settle_step") as outage:
        gate.release()
        await outage.felt.wait()
        await handle.signal("interrupt")
        await in_phase(handle, "waiting")
    result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert len(h.provider.requests) == 1
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_that_comes_with_the_start_stops_what_was_started(house: MakeHouse) -> None:
    """Both are there before any worker looks: the prompt is kept, and nothing is requested."""
    h = await house([[Say("Never said.")]])
    session_id = h.new_id()
    await h.client.start_workflow(
        "SessionTurn",
        {"prompt": {"text": "Go."}},
        id=session_id,
        task_queue=h.task_queue,
        start_signal="interrupt",
        start_signal_args=[{}],
    )
    result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert h.provider.requests == []
    assert await pending(h, session_id) == {"Go.": False}
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)


async def test_interrupts_twice_count_once(house: MakeHouse) -> None:
    """Two impatient ones, and the first one's id again: one interruption."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    for name in ("int_1", "int_2", "int_1"):
        await handle.signal("interrupt", {"id": name})
    result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert [data["interruptID"] for data in await interruptions(h, session_id)] == ["int_1"]
    await assert_replays(h, session_id)


async def test_an_interrupt_sent_again_does_not_stop_the_next_turn(house: MakeHouse) -> None:
    """The client did not hear that its first attempt arrived."""
    first, second = Gate(), Gate()
    h = await house([[Pause(first), Hang()], [Say("Still "), Pause(second), Say("here.")], [Say("Later it is.")]])
    session_id = h.new_id()
    await h.start(session_id, "Go.")
    await first.reached()
    await interrupt(h, session_id, id="int_1")
    handle = await h.start(session_id, "Go on.")
    await second.reached()
    await handle.signal("interrupt", {"id": "int_1"})
    await h.prompt(session_id, "Later.", delivery="queue")  # handled after the interrupt
    second.release()
    result = await h.ended(session_id)
    messages = await h.messages(session_id)

    assert result.outcome == "done"
    assert [said(m) for m in messages if isinstance(m, AssistantMessage)] == ["Still here.", "Later it is."]
    assert len(await interruptions(h, session_id)) == 1
    await assert_replays(h, session_id)


async def test_an_interrupt_of_an_idle_session_stops_nothing_that_comes_later(house: MakeHouse) -> None:
    h = await house([[Say("Hello.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "Wait.", resume=False)
    await h.ended(session_id)
    handle = await h.client.start_workflow(
        "SessionTurn", {}, id=session_id, task_queue=h.task_queue, start_signal="interrupt", start_signal_args=[{}]
    )
    await h.prompt(session_id, "Go.")
    await handle.result()
    await h.ended(session_id)

    assert len(h.provider.requests) == 1
    assert await interruptions(h, session_id) == []


async def test_an_interrupt_stops_what_was_sent_before_it(house: MakeHouse) -> None:
    """A steer of before the interrupt stays, and runs only with the client's next call."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Both.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await handle.signal("steer", {"text": "And this."})
    await handle.signal("queue", {"text": "Then that."})
    result = await interrupt(h, session_id)

    assert result.outcome == "interrupted"
    assert len(h.provider.requests) == 1
    assert await pending(h, session_id) == {"And this.": False, "Then that.": False}
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_stops_nothing_that_was_sent_after_it(house: MakeHouse) -> None:
    """Stop, do this instead: both sent at once, and the second one is answered."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("As you like.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await handle.signal("interrupt")
    await handle.signal("steer", {"text": "Do this instead."})
    result = await h.ended(session_id)
    messages = await h.messages(session_id)

    assert result.outcome == "done"
    assert [m.text for m in messages if isinstance(m, UserMessage)] == ["Go.", "Do this instead."]
    assert said(messages[-1]) == "As you like."
    assert len(h.provider.requests) == 2
    assert await pending(h, session_id) == {}
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_reaches_as_far_as_its_sender_had_seen(house: MakeHouse) -> None:
    """With a cursor, what its sender had not seen yet keeps its wake, and runs."""
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Seen.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    seen = (await h.events(session_id))[-1].seq
    await h.prompt(session_id, "From somebody else.")
    await handle.signal("interrupt", {"after": seen})
    result = await h.ended(session_id)

    assert result.outcome == "done"
    assert len(h.provider.requests) == 2
    await assert_replays(h, session_id)


async def test_an_interrupt_between_two_steps(house: MakeHouse) -> None:
    """The tool is done, and the interrupt comes before the second request."""
    tool = HeldTool()
    h = await house([[CallTool("hold")], [Say("Never said."), Hang()]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await tool.started(1)
    with Outage(h, "settle_step") as outage:
        tool.gate.set()
        await outage.felt.wait()
        await handle.signal("interrupt")
        await in_phase(handle, "waiting")
    result = await h.ended(session_id)
    types = await h.types(session_id)

    assert result.outcome == "interrupted"
    assert len(h.provider.requests) == 1
    assert types.count("session.next.step.ended.2") == 1
    assert types[-1] == "session.next.step.interrupted.1"
    [data] = await interruptions(h, session_id)
    assert "assistantMessageID" not in data
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_cancelled_workflow_leaves_a_session_that_goes_on(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Whole.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)
    described = await handle.describe()
    assert described.status is not None
    assert described.status.name == "CANCELED"
    [data] = await interruptions(h, session_id)
    assert data["reason"] == "cancelled"
    assert not await is_held(h, session_id)
    result = await h.run(session_id, "Again.")
    messages = await h.messages(session_id)

    assert result.outcome == "done"
    assert isinstance(messages[1], AssistantMessage)
    assert [message.type for message in messages] == ["user", "assistant", "user", "assistant"]
    assert await assert_replays(h, session_id) == 2
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("first", ["prompt", "resume"])
async def test_a_workflow_cancelled_at_its_start_answers_what_came_along(house: MakeHouse, first: str) -> None:
    """Cancelled while its first database work waits: updates are answered, and the run ends as cancelled."""
    h = await house([[Say("Never said.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "Before.", resume=False)
    await h.ended(session_id)
    with Outage(h, "admit_start") as outage:
        handle = await h.start(session_id)
        await outage.felt.wait()
        arguments = [{"text": "Go."}] if first == "prompt" else []
        answering = asyncio.create_task(handle.execute_update(first, args=arguments))
        await handle.cancel()
        await in_phase(handle, "waiting")
    answer: Any = await answering
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)

    assert answer["admittedSeq" if first == "prompt" else "outcome"]
    assert h.provider.requests == []
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
