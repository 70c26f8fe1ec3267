"""Input that comes while a turn runs, or at its very end: each one answered once, at the boundary it is meant for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import WithStartWorkflowOperation
from temporalio.common import WorkflowIDConflictPolicy

from fencepost.domain.contracts import SESSION_TURN, UPDATE_RESUME, Status, TurnResult
from fencepost.domain.inbox import Receipt
from fencepost.domain.messages import UserMessage
from fencepost.providers.script import Action, CallTool, Fail, Gate, Hang, Pause, Say
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import Outage, in_phase, interruptions, is_held


def asked(body: dict[str, Any]) -> list[str]:
    """Give what the model is asked in a request."""
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


async def answered(house: House, session_id: str) -> list[str]:
    """Give what users said, in the order in which the model came to see it."""
    return [m.text for m in await house.messages(session_id) if isinstance(m, UserMessage)]


async def resume(house: House, session_id: str) -> TurnResult:
    """Resume a session, whether or not a run is open."""
    start: WithStartWorkflowOperation[Any, Any] = WithStartWorkflowOperation(
        SESSION_TURN,
        {},
        id=session_id,
        task_queue=house.task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    result: TurnResult = await house.client.execute_update_with_start_workflow(
        UPDATE_RESUME, start_workflow_operation=start, result_type=TurnResult
    )
    return result


class During:
    """Something that happens while an activity runs for the first (or `nth`, or every) time, after its transaction has
    committed."""

    def __init__(self, house: House, activity: str, action: Callable[[], Awaitable[Any]], nth: int | None = 1) -> None:
        self._database = house.services.database
        self._activity = activity
        self._action = action
        self._nth = nth
        self.calls = 0

    def __enter__(self) -> During:
        inner = self._database.transact

        async def transact(work: Any, **how: Any) -> Any:
            result = await inner(work, **how)
            if f".{self._activity}." in work.__qualname__:
                self.calls += 1
                if self._nth in (self.calls, None):
                    await self._action()
            return result

        self._database.transact = transact  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        del self._database.transact


@pytest.mark.conformance("RUN-49", "RUN-50")
async def test_a_steer_is_seen_at_the_next_step_and_a_queued_input_after_the_turn(house: MakeHouse) -> None:
    tool, gate = HeldTool(), Gate()
    tool.gate.set()
    replies: list[list[Action]] = [[CallTool("hold"), Say("Wait."), Pause(gate)], [Say("Both done.")], [Say("Last.")]]
    h = await house(replies, registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await handle.signal("queue", {"text": "Afterwards."})
    await h.prompt(session_id, "Also this.")
    gate.release()
    await h.ended(session_id)

    assert [asked(body) for body in h.provider.requests] == [
        ["Go."],
        ["Go.", "Also this."],
        ["Go.", "Also this.", "Afterwards."],
    ]
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-51")
@pytest.mark.parametrize("old", [False, True], ids=["one run", "continued as new"])
async def test_queued_inputs_are_answered_one_in_a_turn_in_their_order(house: MakeHouse, old: bool) -> None:
    gate = Gate()
    # An answer that takes a second makes its run old enough to continue as new.
    first = [Say("0", delay=1.1)] if old else [Say("0")]
    h = await house([[Pause(gate), *first], [Say("1")], [Say("2")], [Say("3")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Zero.")
    await gate.reached()
    for text in ("One.", "Two.", "Three."):
        await handle.signal("queue", {"text": text})
    await handle.signal("steer", 42)  # not understood, and shown as long as the session works
    gate.release()
    result = await h.ended(session_id)
    status: Status = await h.client.get_workflow_handle(session_id).query("status", result_type=Status)

    assert result.outcome == "done"
    assert [asked(body)[-1] for body in h.provider.requests] == ["Zero.", "One.", "Two.", "Three."]
    assert await answered(h, session_id) == ["Zero.", "One.", "Two.", "Three."]
    assert [rejection.signal for rejection in status.rejected] == ["steer"]
    runs = await assert_replays(h, session_id)
    assert runs > 1 or not old  # a slow machine may make a young run old
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-52", "RUN-53", "RUN-54", "COO-08")
async def test_steers_go_together_and_before_queued_input_that_waits(house: MakeHouse) -> None:
    """What came during one answer is sorted out at its end, without another call of the client."""
    first, second = Gate(), Gate()
    replies: list[list[Action]] = [
        [Say("0"), Pause(first)],
        [Say("1")],
        [Say("2"), Pause(second)],
        [Say("3")],
        [Say("4")],
    ]
    h = await house(replies)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await first.reached()
    await handle.signal("queue", {"text": "Later."})
    await handle.signal("queue", {"text": "Last."})
    await h.prompt(session_id, "Steer.")
    first.release()
    await second.reached()
    await h.prompt(session_id, "And this.")
    await h.prompt(session_id, "And that.")
    second.release()
    await h.ended(session_id)

    seen: list[list[str]] = []
    for body in h.provider.requests:
        seen.append(asked(body)[sum(map(len, seen)) :])
    assert seen == [["Go."], ["Steer."], ["Later."], ["And this.", "And that."], ["Last."]]
    # An empty wake after that asks the model nothing.
    again = await h.start(session_id)
    assert (await again.result())["outcome"] == "idle"
    assert len(h.provider.requests) == 5


@pytest.mark.conformance("RUN-56")
async def test_a_wake_of_an_idle_session_starts_with_its_first_queued_input(house: MakeHouse) -> None:
    h = await house([[Say("1")], [Say("2")]])
    session_id = h.new_id()
    for text in ("First.", "Second."):
        await h.prompt(session_id, text, delivery="queue", resume=False)
        await h.ended(session_id)
    assert h.provider.requests == []
    await h.client.start_workflow(SESSION_TURN, {}, id=session_id, task_queue=h.task_queue, start_signal="wake")
    await h.ended(session_id)

    assert [asked(body) for body in h.provider.requests] == [["First."], ["First.", "Second."]]


@pytest.mark.conformance("RUN-05")
async def test_sessions_do_not_wait_for_one_another(house: MakeHouse) -> None:
    gate = Gate()
    h = await house(lambda body: [Pause(gate), Say("Done.")])
    ids = [h.new_id(), h.new_id()]
    handles = [await h.start(session_id, "Go.") for session_id in ids]
    await h.provider.received(2)  # both are held, so both are in flight
    gate.release()
    for handle in handles:
        await handle.result()

    assert {body["prompt_cache_key"] for body in h.provider.requests} == set(ids)


@pytest.mark.conformance("RUN-06")
async def test_session_ids_of_64_characters_are_cache_keys_without_their_prefix(house: MakeHouse) -> None:
    """OpenAI refuses longer keys, and two sessions must not share one."""
    h = await house(lambda body: [Say("Done.")])
    names = [secrets.token_hex(32) for _ in range(2)]
    for name in names:
        await h.start(f"ses_{name}", "Go.")
        await h.ended(f"ses_{name}")

    keys = [body["prompt_cache_key"] for body in h.provider.requests]
    assert keys == names
    assert [len(key) for key in keys] == [64, 64]


async def test_prompts_sent_at_once_all_get_a_receipt_and_are_answered_once(house: MakeHouse) -> None:
    h = await house(lambda body: [Say("Noted.")])
    session_id = h.new_id()
    texts = [f"Number {n}." for n in range(20)]
    receipts = await asyncio.gather(*(h.prompt(session_id, text) for text in texts))
    await h.ended(session_id)

    assert len({receipt.id for receipt in receipts}) == 20
    assert sorted(await answered(h, session_id)) == sorted(texts)
    assert asked(h.provider.requests[-1])[-1] in texts
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_resume_joins_the_turn_that_runs(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Pause(gate), Say("Once.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    joined = [asyncio.create_task(handle.execute_update("resume", result_type=TurnResult)) for _ in range(3)]
    await h.prompt(session_id, "Recorded.", delivery="queue", resume=False)  # by now the resumes are handled
    gate.release()
    results = await asyncio.gather(*joined)
    await handle.result()

    assert {result.outcome for result in results} == {"done"}
    assert len([body for body in h.provider.requests if asked(body) == ["Go."]]) == 1
    await assert_replays(h, session_id)


@pytest.mark.parametrize("forced", [False, True])
async def test_a_resume_that_comes_during_the_claim_joins_the_turn(house: MakeHouse, forced: bool) -> None:
    """It is no second turn: the model is asked once."""
    h = await house([[Say("Once.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "Go.", resume=False)
    await h.ended(session_id)
    handle = h.client.get_workflow_handle(session_id)
    with Outage(h, "admit_start") as outage:
        starting = asyncio.create_task(resume(h, session_id) if forced else h.start(session_id))
        await outage.felt.wait()
        again = asyncio.create_task(handle.execute_update("resume", result_type=TurnResult))
        await in_phase(handle, "waiting")
    result, answer = await h.ended(session_id), await again
    await starting

    assert (result.outcome, answer.outcome) == ("done", "done")
    assert len(h.provider.requests) == 1
    await assert_replays(h, session_id)


async def test_a_resume_of_an_idle_session_makes_exactly_one_request(house: MakeHouse) -> None:
    h = await house([[Say("One.")], [Say("Two.")]])
    session_id = h.new_id()
    await h.run(session_id, "Go.")
    handle = await h.start(session_id)
    assert (await handle.result())["outcome"] == "idle"
    result = await resume(h, session_id)
    await h.ended(session_id)

    assert (result.outcome, result.steps) == ("done", 1)
    assert len(h.provider.requests) == 2
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_resume_of_a_turn_that_is_being_stopped_starts_another_one(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Whole.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    with Outage(h, "settle_step") as outage:
        await handle.signal("interrupt")
        await outage.felt.wait()
        asking = asyncio.create_task(handle.execute_update("resume", result_type=TurnResult))
        await in_phase(handle, "waiting")
    answer = await asking
    await handle.result()

    assert answer.outcome == "done"
    assert len(h.provider.requests) == 2
    assert len(await interruptions(h, session_id)) == 1
    await assert_replays(h, session_id)


async def test_a_prompt_that_is_only_recorded_waits(house: MakeHouse) -> None:
    h = await house([[Say("Both.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "First.", resume=False)
    assert (await h.ended(session_id)).outcome == "idle"
    assert h.provider.requests == []
    await h.prompt(session_id, "Second.")
    assert (await h.ended(session_id)).outcome == "done"

    assert [asked(body) for body in h.provider.requests] == [["First.", "Second."]]


@pytest.mark.parametrize("signal", ["steer", "queue", "wake"])
@pytest.mark.parametrize("activity", ["settle_step", "resolve_model", "_claim", "admit_start"])
async def test_a_signal_that_comes_during_an_activity_is_not_lost(house: MakeHouse, activity: str, signal: str) -> None:
    """Temporal runs the workflow task again, with activities that were committed: the turn takes the same way."""
    h = await house(lambda body: [Say("Yes.")])
    session_id = h.new_id()
    handle = h.client.get_workflow_handle(session_id)

    async def send() -> None:
        await handle.signal(signal, *([] if signal == "wake" else [{"text": "More."}]))

    with During(h, activity, send):
        # Claim and first step go with the admission of a start input, and by themselves after any other.
        await (h.prompt if activity in ("_claim", "resolve_model") else h.start)(session_id, "Go.")
        result = await h.ended(session_id)

    assert result.outcome == "done"
    assert await answered(h, session_id) == (["Go."] if signal == "wake" else ["Go.", "More."])
    assert len(h.provider.requests) <= (1 if signal == "wake" else 2)
    assert asked(h.provider.requests[-1])[-1] == ("Go." if signal == "wake" else "More.")
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("along", [True, False], ids=["with a signal", "alone"])
async def test_what_comes_along_with_a_start_is_answered_together(house: MakeHouse, along: bool) -> None:
    """The first step begins with the claim, unless that would leave out what is not admitted yet."""
    h = await house(lambda body: [Say("Yes.")])
    session_id = h.new_id()
    signal: dict[str, Any] = {"start_signal": "steer", "start_signal_args": [{"text": "More."}]} if along else {}
    with During(h, "resolve_model", nothing) as resolving:
        await h.client.start_workflow(
            SESSION_TURN, {"prompt": {"text": "Go."}}, id=session_id, task_queue=h.task_queue, **signal
        )
        result = await h.ended(session_id)

    assert result.outcome == "done"
    assert [asked(body) for body in h.provider.requests] == [["Go.", "More."] if along else ["Go."]]
    assert resolving.calls == (1 if along else 0)
    await assert_replays(h, session_id)


async def nothing() -> None:
    pass


async def test_a_signal_during_the_release_of_an_interrupted_turn(house: MakeHouse) -> None:
    """The whole task is done again, the interrupt included: it still counts, and once."""
    h = await house([[Fail(429, headers={"retry-after": "30"})], [Say("As you like.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await in_phase(handle, "retrying")
    with During(h, "release_session", lambda: handle.signal("steer", {"text": "This instead."})):
        await handle.signal("interrupt", {"id": "int_1"})
        result = await h.ended(session_id)

    assert result.outcome == "done"
    assert [data["interruptID"] for data in await interruptions(h, session_id)] == ["int_1"]
    assert [asked(body) for body in h.provider.requests] == [["Go."], ["Go.", "This instead."]]
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_wake_during_the_release_of_an_interrupted_turn(house: MakeHouse) -> None:
    h = await house([[Fail(429, headers={"retry-after": "30"})]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await in_phase(handle, "retrying")
    with During(h, "release_session", lambda: handle.signal("wake")):
        await handle.signal("interrupt", {"id": "int_1"})
        result = await h.ended(session_id)

    assert result.outcome == "interrupted"
    assert [data["interruptID"] for data in await interruptions(h, session_id)] == ["int_1"]
    assert len(h.provider.requests) == 1
    await assert_replays(h, session_id)


async def test_a_prompt_that_comes_during_the_release_is_answered(house: MakeHouse) -> None:
    """Its update may find the run closing, and then gets a run of its own."""
    h = await house(lambda body: [Say("Yes.")])
    session_id = h.new_id()
    asking: list[asyncio.Task[Receipt]] = []

    async def send() -> None:
        asking.append(asyncio.create_task(h.prompt(session_id, "More.")))

    with During(h, "settle_step", send):
        await h.start(session_id, "Go.")
        await h.ended(session_id)
    receipt = await asking[0]
    await h.ended(session_id)

    assert receipt.prompt.text == "More."
    assert await answered(h, session_id) == ["Go.", "More."]
    assert asked(h.provider.requests[-1]) == ["Go.", "More."]
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
