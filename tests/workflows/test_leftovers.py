"""What an earlier process, a defect or an interrupt has left: it is settled or run by the next turn, and never lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from fencepost.domain.errors import UnavailableError
from fencepost.domain.inbox import Location
from fencepost.domain.messages import FailedTool
from fencepost.domain.projection import INTERRUPTED
from fencepost.providers.script import Action, CallTool, Finish, Gate, Hang, Pause, Say
from fencepost.store import sessions, tables
from fencepost.store.engine import Database
from fencepost.store.live import Announcer
from fencepost.store.sessions import NewSession
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild, served
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_coordination import recorded, wake
from tests.workflows.test_interrupts import check_transcript, interrupt, interruptions, is_held, logged, pending
from tests.workflows.test_ownership import left_running
from tests.workflows.test_steering import During, answered, asked, nothing, resume
from tests.workflows.test_turn import roles, said, tools

# A defect of the projection: the message of a promoted input cannot be written.
_DEFECT = (
    """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a defect';
END $$
""",
    "CREATE TRIGGER refuse BEFORE INSERT ON session_message FOR EACH ROW EXECUTE FUNCTION refuse()",
)
_MENDED = ("DROP TRIGGER refuse ON session_message",)


async def execute(house: House, *statements: str) -> None:
    async with house.services.database.begin() as conn:
        for statement in statements:
            await conn.exec_driver_sql(statement)


@pytest.mark.conformance("RUN-57")
@pytest.mark.parametrize(("delivery", "call"), [("queue", wake), ("steer", resume)], ids=["queue", "steer"])
async def test_input_that_an_interrupt_left_waiting_runs_with_the_next_call(
    house: MakeHouse, delivery: str, call: Any
) -> None:
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()], [Say("Later it is.")]])
    session_id = h.new_id()
    await h.start(session_id, "Go.")
    await gate.reached()
    await h.prompt(session_id, "Later.", delivery=delivery)
    result = await interrupt(h, session_id)

    assert result.outcome == "interrupted"
    assert await pending(h, session_id) == {"Later.": False}
    assert len(h.provider.requests) == 1
    await call(h, session_id)
    await h.ended(session_id)
    assert await pending(h, session_id) == {}
    assert await answered(h, session_id) == ["Go.", "Later."]
    assert said((await h.messages(session_id))[-1]) == "Later it is."
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize(
    "called",
    [
        pytest.param(True, marks=pytest.mark.conformance("RUN-58"), id="running"),
        pytest.param(False, marks=pytest.mark.conformance("RUN-60"), id="pending input"),
    ],
)
async def test_a_tool_call_that_an_earlier_process_left_fails_before_the_next_request(
    house: MakeHouse, called: bool
) -> None:
    """It is not executed again, and the model sees that it failed."""
    tool = HeldTool()
    h = await house([[Say("I see.")]], registry=tool.registry)
    session_id, new = h.new_id(), NewSession(Location(directory=str(h.directory)))
    await h.services.database.transact(lambda conn: sessions.create(conn, session_id, new))
    await left_running(h, session_id, called=called)
    before = len(await h.events(session_id))
    result = await resume(h, session_id)
    await h.ended(session_id)
    types = [event.type for event in (await h.events(session_id))[before:]]
    [part] = tools((await h.messages(session_id))[1])

    assert result.outcome == "done"
    assert types.index("session.next.tool.failed.1") < types.index("session.next.step.started.1")
    assert isinstance(part.state, FailedTool)
    assert part.state.error.message == INTERRUPTED
    [body] = h.provider.requests
    assert roles(body) == ["user", "assistant", "tool"]
    assert INTERRUPTED in body["messages"][-1]["content"]
    assert tool.invocations == []
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-61")
async def test_a_promotion_that_cannot_be_projected_leaves_its_input_waiting(house: MakeHouse) -> None:
    """The run fails, nothing of the promotion is there, and once the defect is mended a wake completes it."""
    h = await house([[Say("At last.")]])
    session_id = await recorded(h, "Go.")
    before = await h.events(session_id)
    await execute(h, *_DEFECT)
    await wake(h, session_id)
    with pytest.raises(WorkflowFailureError):
        await h.ended(session_id)
    assert await h.events(session_id) == before
    assert set(await pending(h, session_id)) == {"Go."}
    assert h.provider.requests == []
    await execute(h, *_MENDED)
    await wake(h, session_id)
    result = await h.ended(session_id)

    assert result.outcome == "done"
    assert [asked(body) for body in h.provider.requests] == [["Go."]]
    assert await pending(h, session_id) == {}
    assert not await is_held(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_first_step_that_cannot_be_begun_takes_no_input_along(house: MakeHouse) -> None:
    """What started the run is admitted all the same, as is what came meanwhile."""
    h = await house([[Say("At last.")]])
    session_id = h.new_id()
    handle = h.client.get_workflow_handle(session_id)
    await execute(h, *_DEFECT)
    with During(h, "admit_start", lambda: handle.signal("steer", {"text": "More."})):
        await h.start(session_id, "Go.")
        with pytest.raises(WorkflowFailureError):
            await h.ended(session_id)
    assert await pending(h, session_id) == {"Go.": True, "More.": True}
    await execute(h, *_MENDED)
    await wake(h, session_id)

    assert (await h.ended(session_id)).outcome == "done"
    assert [asked(body) for body in h.provider.requests] == [["Go.", "More."]]
    await assert_equal_to_rebuild(h, session_id)


async def test_a_first_step_that_takes_long_to_begin_is_begun_by_itself(
    house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admission does not wait for it, nor begin again and again because of it."""
    monkeypatch.setattr("activities.inbox._BEGIN_SECONDS", 0)
    h = await house([[Say("Yes.")]])
    session_id = h.new_id()
    with During(h, "resolve_model", nothing) as resolving:
        result = await h.run(session_id, "Go.")

    assert (result.outcome, resolving.calls) == ("done", 1)
    assert await answered(h, session_id) == ["Go."]
    await assert_replays(h, session_id)


async def test_a_next_step_that_cannot_be_begun_leaves_its_step_settled(house: MakeHouse) -> None:
    """The step has its one end, and what was to be promoted waits."""
    gate = Gate()
    h = await house([[CallTool("read", {"path": "none"}), Pause(gate), Finish()], [Say("At last.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await logged(h, session_id, "session.next.step.started.1")
    await h.prompt(session_id, "More.")
    await execute(h, *_DEFECT)
    gate.release()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert (await h.types(session_id))[-1] == "session.next.step.ended.2"
    assert await pending(h, session_id) == {"More.": True}
    await execute(h, *_MENDED)
    await wake(h, session_id)

    assert (await h.ended(session_id)).outcome == "done"
    assert await answered(h, session_id) == ["Go.", "More."]
    assert await interruptions(h, session_id) == []
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-62")
@pytest.mark.parametrize("activity", ["admit_start", "resolve_model"])
async def test_a_failure_after_the_commit_of_a_promotion_strands_nothing(house: MakeHouse, activity: str) -> None:
    """The promotion is durable when the worker hears that the database is away: asked again, it takes the same way."""
    h = await house([[Say("Yes.")]])
    session_id = h.new_id()

    async def fail() -> None:
        raise UnavailableError("away")

    with During(h, activity, fail) as during:
        await (h.start if activity == "admit_start" else h.prompt)(session_id, "Go.")
        result = await h.ended(session_id)
    types = await h.types(session_id)

    assert during.calls > 1
    assert result.outcome == "done"
    assert types.count("session.next.prompted.1") == 1
    assert len(h.provider.requests) == 1
    assert await pending(h, session_id) == {}
    await assert_replays(h, session_id)


@pytest.mark.conformance("RUN-62")
async def test_a_live_channel_that_cannot_be_reached_strands_nothing(house: MakeHouse) -> None:
    h = await house([[Say("Yes.")]], serve=False)
    nowhere = Database("postgresql://nobody@127.0.0.1:9/none", pool_size=1)
    broken = Announcer(nowhere)
    await broken.start()
    session_id = h.new_id()
    async with served(replace(h.services, announcer=broken)):
        result = await h.run(session_id, "Go.")
    await broken.close()
    await nowhere.close()

    assert result.outcome == "done"
    assert said((await h.messages(session_id))[-1]) == "Yes."
    assert await pending(h, session_id) == {}


@pytest.mark.conformance("RUN-63")
async def test_an_interrupt_fails_the_tools_that_run_and_twice_is_like_once(house: MakeHouse) -> None:
    tool, gate = HeldTool(), Gate()
    calls: list[Action] = [CallTool("hold", {"note": note}, id=f"call_{note}") for note in "ab"]
    h = await house([[*calls, Say("Both."), Pause(gate), Hang()], [Say("Fine.")]], registry=tool.registry)
    session_id = h.new_id()
    await h.start(session_id, "Do two things.")
    await gate.reached()
    await tool.started(2)
    await interrupt(h, session_id)
    log = await h.events(session_id)
    parts = tools((await h.messages(session_id))[1])
    await h.client.start_workflow(
        "SessionTurn", {}, id=session_id, task_queue=h.task_queue, start_signal="interrupt", start_signal_args=[{}]
    )
    again = await h.ended(session_id)

    assert [part.state.status for part in parts] == ["error", "error"]
    assert {part.state.error.message for part in parts if isinstance(part.state, FailedTool)} == {INTERRUPTED}
    assert again.outcome == "idle"
    assert await h.events(session_id) == log
    await assert_equal_to_rebuild(h, session_id)
    assert (await resume(h, session_id)).outcome == "done"
    await h.ended(session_id)
    assert roles(h.provider.requests[1]) == ["user", "assistant", "tool", "tool"]
    check_transcript(h.provider.requests[1])
    assert len(tool.invocations) == 2
    assert len(await interruptions(h, session_id)) == 1
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("ITR-04")
async def test_an_interrupted_step_leaves_its_execution_in_phase_unknown_until_it_is_given_back(
    house: MakeHouse,
) -> None:
    gate = Gate()
    h = await house([[Say("Half"), Pause(gate), Hang()]])
    session_id = h.new_id()
    seen: list[tuple[str, str, int]] = []

    async def probe() -> None:
        async with h.services.database.read() as conn:
            [row] = await conn.execute(tables.session_execution.select())
        seen.append((row.id, row.phase, len(await interruptions(h, session_id))))

    await h.start(session_id, "Go.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    await probe()
    with During(h, "settle_step", probe):
        await interrupt(h, session_id)
    [(before, ready, none), (after, unknown, one)] = seen

    assert after == before
    assert (ready, unknown) == ("ready", "unknown")
    assert (none, one) == (0, 1)
    assert (await interruptions(h, session_id))[0]["executionID"] == before
    assert not await is_held(h, session_id)
