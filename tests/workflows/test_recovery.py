"""Sessions that nobody works on go on by themselves: the recovery workflow, its schedule, and a worker that starts."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client, ScheduleOverlapPolicy, WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode

from fencepost.domain import contracts, scanning
from fencepost.domain.inbox import Location, Prompt
from fencepost.domain.scanning import RecoveryResult
from fencepost.providers.script import Action, Gate, Hang, Pause, Say
from fencepost.recoveries import schedule
from fencepost.store import inbox, sessions, tables
from fencepost.store.sessions import NewSession
from tests.end_to_end.test_worker_loss import stage, texts
from tests.house_kit import House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import is_held

HALF = "The first half, "
REST = "and the second half."


def cut_off(gate: Gate) -> list[list[Action]]:
    """Give an answer that stops in the middle, and then the rest of it."""
    return [[Say(HALF), Pause(gate), Hang()], [Say(REST)], [Say("Yes?")]]


async def scan(house: House) -> RecoveryResult:
    """Have the recovery workflow scan once, as its schedule does."""
    result: RecoveryResult = await house.client.execute_workflow(
        scanning.RECOVERY,
        id=f"{house.task_queue}-{secrets.token_hex(4)}",
        task_queue=house.task_queue,
        result_type=RecoveryResult,
    )
    return result


async def set_of(house: House, table: Any, session_id: str, **values: Any) -> None:
    """Set columns of the session's rows, as the time that passes would."""

    async def work(conn: AsyncConnection) -> None:
        await conn.execute(update(table).where(table.c.session_id == session_id).values(**values))

    await house.services.database.transact(work)


async def admitted(house: House, text: str = "run after restart") -> str:
    """Give a new session with one input, long ago, whose wake was lost."""
    session_id = house.new_id()

    async def work(conn: AsyncConnection) -> None:
        await sessions.create(conn, session_id, NewSession(Location(directory=str(house.directory))))
        await inbox.admit(conn, session_id, f"msg_{session_id[4:]}", Prompt(text=text), "steer", resume=True)

    await house.services.database.transact(work)
    await set_of(house, tables.session_input, session_id, time_created=1)
    return session_id


async def logged(house: House, session_id: str, kind: str, count: int = 1) -> None:
    """Wait until the log has so many events of this stored type."""
    while True:
        if (await house.types(session_id)).count(kind) >= count:
            return
        await asyncio.sleep(0.05)


async def input_of(house: House, session_id: str) -> Any:
    """Give the session's only input."""
    async with house.services.database.read() as conn:
        return (await conn.execute(select(tables.session_input).filter_by(session_id=session_id))).one()


async def answered(house: House, session_id: str, count: int) -> None:
    """Wait until the session has so many answers, and nobody owns it."""
    while True:
        if len(texts(await house.messages(session_id))) >= count and not await is_held(house, session_id):
            return
        await asyncio.sleep(0.05)


async def forgotten(house: House, session_id: str) -> None:
    """Have Temporal forget the session's run, as a cluster does that is lost and made anew."""
    service, namespace = house.client.workflow_service, house.client.namespace
    execution = WorkflowExecution(workflow_id=session_id)
    await service.delete_workflow_execution(
        DeleteWorkflowExecutionRequest(namespace=namespace, workflow_execution=execution)
    )
    handle = house.client.get_workflow_handle(session_id)
    while True:
        try:
            await handle.describe()
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return
            raise
        await asyncio.sleep(0.05)


@pytest.mark.conformance("REC-11")
async def test_input_whose_wake_was_lost_is_run_by_a_scan(house: MakeHouse) -> None:
    h = await house([[Say("Here I am.")]])
    session_id = await admitted(h)
    result = await scan(h)
    await answered(h, session_id, 1)

    assert (result.done, result.cut_off) == ({"woken": 1}, None)
    [request] = h.provider.requests
    assert request["messages"][-1]["content"] == "run after restart"
    row = await input_of(h, session_id)
    assert (row.wake_pending, isinstance(row.promoted_seq, int)) == (False, True)
    assert (await scan(h)).done == {}
    await assert_replays(h, session_id)


@pytest.mark.conformance("REC-01", "REC-03", "COO-05")
@pytest.mark.parametrize("how", ["forgotten", "timed out"])
async def test_a_turn_whose_run_is_lost_goes_on_by_itself_once(house: MakeHouse, how: str) -> None:
    gate = Gate()
    h = await house(cut_off(gate))
    session_id = h.new_id()
    handle: Any = await h.client.start_workflow(
        contracts.SESSION_TURN,
        {"prompt": {"text": "Tell me all."}},
        id=session_id,
        task_queue=h.task_queue,
        run_timeout=timedelta(seconds=3) if how == "timed out" else None,
    )
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    if how == "forgotten":
        await forgotten(h, session_id)
    else:
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert (await scan(h)).done == {}  # its lease has not run out yet
    await set_of(h, tables.session_execution, session_id, expires_at=1)

    results = await asyncio.gather(*(scan(h) for _ in range(3)))
    await answered(h, session_id, 2)
    assert [result.done for result in results].count({}) >= 1
    assert sum(result.done.get("continued", 0) for result in results) == 1
    assert sum(result.done.get("woken", 0) for result in results) == 1
    assert (await scan(h)).done == {}
    messages = await h.messages(session_id)
    assert [message.type for message in messages] == ["user", "assistant", "synthetic", "assistant"]
    assert texts(messages)[1] == REST
    assert len(h.provider.requests) == 2
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_terminated_turn_is_settled_and_not_continued(house: MakeHouse) -> None:
    gate = Gate()
    h = await house(cut_off(gate))
    session_id = h.new_id()
    handle = await h.start(session_id, "Tell me all.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    await handle.signal("steer", {"text": "For later."})
    await logged(h, session_id, "session.next.prompt.admitted.1", count=2)
    await handle.terminate("enough")
    await set_of(h, tables.session_execution, session_id, expires_at=1)
    await set_of(h, tables.session_input, session_id, time_created=1)

    first, second = await scan(h), await scan(h)
    assert first.done.get("settled") == 1
    assert "continued" not in first.done
    interrupted = [event for event in await h.events(session_id) if ".step.interrupted" in event.type]
    assert [event.data["reason"] for event in interrupted] == ["terminated"]
    # What came after the last thing that the turn did is work of its own, and goes on.
    assert (first.done.get("woken", 0), second.done) == (1, {})
    await answered(h, session_id, 2)
    messages = await h.messages(session_id)
    assert [message.type for message in messages] == ["user", "assistant", "user", "assistant"]


async def test_a_terminated_turn_waits_for_the_next_prompt(house: MakeHouse) -> None:
    gate = Gate()
    h = await house(cut_off(gate))
    session_id = h.new_id()
    handle = await h.start(session_id, "Tell me all.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    await handle.terminate("enough")
    await set_of(h, tables.session_execution, session_id, expires_at=1)

    done: dict[str, int] = {}
    while not done:
        done = (await scan(h)).done  # a scan passes a row that the stream, which has not heard of the end, has locked
    assert done == {"settled": 1}
    assert (await scan(h)).done == {}
    assert len(h.provider.requests) == 1
    assert (await h.run(session_id, "And now?")).outcome == "done"
    assert texts(await h.messages(session_id))[1:] == [REST]
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("REC-04")
async def test_a_turn_that_runs_is_left_alone(house: MakeHouse) -> None:
    """Also when its lease has run out, for whatever reason: its run is open, and goes on under the same claim."""
    gate = Gate()
    h = await house([[Say(HALF), Pause(gate), Say(REST)]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Tell me all.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    assert (await scan(h)).done == {}
    await set_of(h, tables.session_execution, session_id, expires_at=1)
    assert (await scan(h)).done == {"postponed": 1}
    gate.release()
    await handle.result()

    assert [message.type for message in await h.messages(session_id)] == ["user", "assistant"]
    assert texts(await h.messages(session_id)) == [HALF + REST]


async def test_a_scan_is_replayed_to_the_same_decisions(house: MakeHouse) -> None:
    """And what it leaves in Temporal is small."""
    h = await house([])
    name = f"{h.task_queue}-scan"
    handle: Any = await h.client.start_workflow(scanning.RECOVERY, id=name, task_queue=h.task_queue)
    await handle.result()
    history = await handle.fetch_history()

    assert await assert_replays(h, name) == 1
    assert len(history.events) <= 11
    assert sum(event.ByteSize() for event in history.events) < 4_000


async def test_the_schedule_is_made_once_and_scans_by_itself(house: MakeHouse, task_queue: str) -> None:
    """One for each deployment, however many workers start; a wake that is lost later is found within its interval."""
    h = await house([[Say("One.")], [Say("Two.")]])
    early = await admitted(h)
    name = scanning.recovery_id("blue", task_queue)
    handle = h.client.get_schedule_handle(name)
    try:
        await asyncio.gather(*(schedule(h.client, "blue", task_queue) for _ in range(3)))
        await answered(h, early, 1)
        described = await handle.describe()
        assert described.schedule.policy.overlap == ScheduleOverlapPolicy.SKIP
        assert [one.every for one in described.schedule.spec.intervals] == [timedelta(seconds=10)]
        late = await admitted(h)
        await answered(h, late, 1)
        runs = [
            one.id async for one in h.client.list_workflows(f"WorkflowType = 'Recovery' AND TaskQueue = '{task_queue}'")
        ]
        assert all(one.startswith(name) for one in runs)
    finally:
        await handle.delete()


async def test_a_worker_that_starts_scans_at_once(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Any
) -> None:
    """Nobody has to use the session, or to wait for the schedule."""
    async with stage(database_url, temporal_client, task_queue, tmp_path, [[Say("Here I am.")]]) as (h, start):
        session_id = await admitted(h)
        worker = await start()
        await answered(h, session_id, 1)
        await h.client.get_schedule_handle(scanning.recovery_id("default", task_queue)).delete()

    assert not any("Traceback" in line for line in worker.lines)
