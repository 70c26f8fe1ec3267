"""A turn of many steps goes on in new runs: no history grows without end, and nobody sees where one ended."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from fencepost.domain.contracts import TurnResult
from fencepost.providers.script import Action, CallTool, Finish, Gate, Pause, Say
from tests.end_to_end.test_reset import reset
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import is_held
from tests.workflows.test_steering import During, answered, asked
from tests.workflows.test_turn import said

STEPS = 8
SHORT = {"max_run_events": 30}
"""Two or three steps of a turn."""


async def many_steps(house: MakeHouse, *last: Action, **options: Any) -> House:
    """Give a house whose model calls a tool in each of its first steps."""
    tool = HeldTool()
    tool.gate.set()
    numbers = itertools.count()

    def reply(_: dict[str, Any]) -> list[Action]:
        number = next(numbers)
        if number < STEPS:
            return [CallTool("hold", id=f"call_{number}"), Finish(usage=(10, 1))]
        return [*last, Say("At last.")] if number == STEPS else [Say("Next.")]

    return await house(reply, registry=tool.registry, **options)


async def histories(house: House, session_id: str) -> list[int]:
    """Give the length of each run's history."""
    runs = [run async for run in house.client.list_workflows(f"WorkflowId = '{session_id}'")]
    return [run.history_length for run in runs]


async def test_a_long_turn_goes_on_in_new_runs(house: MakeHouse) -> None:
    h = await many_steps(house, limits=SHORT)
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")
    types = await h.types(session_id)

    assert (result.outcome, result.steps, result.tokens.output) == ("done", STEPS + 1, STEPS + 2)
    assert len(h.provider.requests) == STEPS + 1
    assert [message.type for message in await h.messages(session_id)] == ["user", *["assistant"] * (STEPS + 1)]
    assert "session.next.step.interrupted.1" not in types
    assert types.count("session.next.tool.success.1") == STEPS
    assert await assert_replays(h, session_id) >= 3
    assert max(await histories(h, session_id)) < 80
    assert not await is_held(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_what_is_sent_while_a_turn_changes_its_run_is_not_lost(house: MakeHouse) -> None:
    """A signal at every settlement: each is admitted once, whichever run has heard of it."""
    h = await many_steps(house, limits=SHORT)
    session_id = h.new_id()
    sent: list[str] = []
    heard: list[str] = []
    sending: list[asyncio.Task[None]] = []

    async def signal(delivery: str, text: str) -> None:
        with suppress(RPCError):  # the last run has ended before it came: its sender is told
            await h.client.get_workflow_handle(session_id).signal(delivery, {"text": text})
            heard.append(text)

    async def send() -> None:
        # Not waited for here: once a run has tried to end, Temporal lets signals wait until its task is done.
        for delivery in ("steer", "queue") if len(sent) < 2 * STEPS else ():
            sent.append(f"{delivery} {len(sent)}")
            sending.append(asyncio.create_task(signal(delivery, sent[-1])))

    with During(h, "settle_step", send, nth=None):
        await h.start(session_id, "Go.")
        await h.ended(session_id)
        await asyncio.gather(*sending)
    await h.prompt(session_id, "Last.")
    await h.ended(session_id)

    assert sorted(await answered(h, session_id)) == sorted(["Go.", *heard, "Last."])
    assert len(heard) > STEPS
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_stops_a_turn_in_its_later_run(house: MakeHouse) -> None:
    gate = Gate()
    h = await many_steps(house, Say("Half"), Pause(gate), limits=SHORT)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await h.client.get_workflow_handle(session_id).signal("interrupt")
    result = TurnResult.model_validate(await handle.result())

    assert (result.outcome, result.steps) == ("interrupted", STEPS + 1)
    assert said((await h.messages(session_id))[-1]) == "Half"
    gate.release()
    assert (await h.run(session_id, "Again.")).outcome == "done"
    assert asked(h.provider.requests[-1])[-1] == "Again."
    await assert_equal_to_rebuild(h, session_id)


async def test_a_turn_that_is_terminated_between_its_runs_stays_stopped(house: MakeHouse) -> None:
    """The new run has not claimed the session yet; the one before, which has, did not end by its user's wish."""
    h = await many_steps(house, limits=SHORT)
    session_id = h.new_id()
    handle = h.client.get_workflow_handle(session_id)
    with During(h, "admit_start", handle.terminate, nth=2) as ended:
        await h.start(session_id, "Go.")
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    steps = len(h.provider.requests)
    result = await h.run(session_id, "Again.")

    assert ended.calls == 2
    assert steps < STEPS
    assert result.outcome == "done"
    assert await answered(h, session_id) == ["Go.", "Again."]
    assert "Again." in asked(h.provider.requests[steps])
    await assert_equal_to_rebuild(h, session_id)


async def test_a_reset_of_a_run_that_went_on_with_a_turn_answers_nothing_twice(house: MakeHouse) -> None:
    h = await many_steps(house, limits=SHORT)
    session_id = h.new_id()
    await h.run(session_id, "Go.")
    before = await h.events(session_id)
    fresh = await reset(h, session_id, 0)
    await fresh.result()

    assert await h.events(session_id) == before
    assert len(h.provider.requests) == STEPS + 1
    assert not await is_held(h, session_id)


async def test_a_reset_of_an_earlier_run_is_no_stop(house: MakeHouse) -> None:
    """Temporal terminates the open run for it, which is no user's doing."""
    gate = Gate()
    h = await many_steps(house, Say("Half"), Pause(gate), limits=SHORT)
    session_id = h.new_id()
    first = await h.start(session_id, "Go.")
    await gate.reached()
    fresh = await reset(h, session_id, 0, run_id=first.result_run_id)
    gate.release()
    result: Any = await fresh.result()

    assert result["outcome"] == "done"
    assert [event.data["reason"] for event in await h.events(session_id) if ".step.interrupted" in event.type] == [
        "reset"
    ]
    assert await answered(h, session_id) == ["Go."]
    await assert_equal_to_rebuild(h, session_id)
