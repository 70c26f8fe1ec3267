"""Runs that cannot progress, found, ended and gone on with: nothing that they were sent is lost, or counts twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from fencepost import unread
from fencepost.domain import contracts
from fencepost.domain.errors import UnavailableError
from fencepost.domain.tools import ToolOutput
from fencepost.providers.script import CallTool, Fail, Gate, Hang, Say
from fencepost.recoveries import Scan
from fencepost.repairs import Findings, Inspection, Trouble
from fencepost.run_states import REPAIR, state_of_run
from fencepost.runs import Runs
from fencepost.store import tables
from fencepost.tools.registry import ToolContext
from tests.end_to_end.test_worker_loss import kept, stage, texts
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild, open_house, served
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import Outage, interruptions, is_held, pending
from tests.workflows.test_recovery import HALF, REST, admitted, answered, cut_off, forgotten, logged, scan, set_of

ATTEMPTS = 2


@workflow.defn(name=contracts.SESSION_TURN)
class _Broken:
    """A release in which no turn can go on."""

    @workflow.run
    async def run(self, *args: Any) -> NoReturn:
        """Fail the workflow task, for ever."""
        raise RuntimeError("a test says so: this release is broken")


@asynccontextmanager
async def broken(client: Client, task_queue: str) -> AsyncIterator[None]:
    """Run a worker of the broken release."""
    runner = UnsandboxedWorkflowRunner()
    async with Worker(client, task_queue=task_queue, workflows=[_Broken], workflow_runner=runner):
        yield


@workflow.defn(name=contracts.SESSION_TURN)
class _Silent:
    """A turn that goes on in a second run, which does not say what it does."""

    @workflow.run
    async def run(self, *args: Any) -> None:
        """Continue as new once, then stand still."""
        if workflow.info().continued_run_id is None:
            workflow.set_query_handler(contracts.QUERY_STATUS, lambda: "fine")
            workflow.continue_as_new()
        await workflow.wait_condition(lambda: False)


@asynccontextmanager
async def _silent(client: Client, task_queue: str) -> AsyncIterator[None]:
    runner = UnsandboxedWorkflowRunner()
    async with Worker(client, task_queue=task_queue, workflows=[_Silent], workflow_runner=runner):
        yield


class Deaf(HeldTool):
    """A tool that does not end when it is cancelled."""

    async def _run(self, context: ToolContext, given: HeldTool.Input) -> ToolOutput:
        while True:
            try:
                return await super()._run(context, given)
            except asyncio.CancelledError:
                await asyncio.shield(self.gate.wait())
                raise


async def has(handle: WorkflowHandle[Any, Any], kind: EventType.ValueType) -> bool:
    """Say whether the run's history has such an event."""
    return any(event.event_type == kind for event in (await handle.fetch_history()).events)


async def owned(house: House, session_id: str, run_id: str | None) -> None:
    """Give the session to this run, by a claim whose lease has run out."""
    row = {"id": "exe_1", "session_id": session_id, "owner_id": run_id, "phase": "ready"}
    await house.services.database.transact(
        lambda conn: conn.execute(tables.session_execution.insert().values(**row, time_created=1, expires_at=1))
    )


async def end_of(house: House, session_id: str) -> None:
    """Repair the session's run, as if it could not progress."""
    tools = inspection(house, attempts=0)
    found = await tools.look([session_id])
    await tools.repair(found)
    assert [each.deeds for each in found.troubles] == [["ended"]]


async def failing(client: Client, session_id: str) -> str:
    """Wait until the workflow task of the session's run has failed, and give the run."""
    while True:
        described = await client.get_workflow_handle(session_id).describe()
        if described.raw_description.pending_workflow_task.attempt >= ATTEMPTS:
            return described.run_id or ""
        await asyncio.sleep(0.05)


def inspection(house: House, attempts: int = ATTEMPTS) -> Inspection:
    """Give the tools of one look."""
    runs = Runs(house.client)
    return Inspection(Scan(house.services.database, runs, house.task_queue), house.client, attempts)


async def look(house: House, *ids: str) -> list[Trouble]:
    """Look once."""
    return (await inspection(house).look(ids or None)).troubles


async def repaired(house: House, *ids: str) -> Findings:
    """Look and repair once."""
    tools = inspection(house)
    found = await tools.look(ids or None)
    await tools.repair(found)
    return found


@pytest.mark.parametrize(("reason", "state", "did"), [(REPAIR, "closed", "continued"), ("x", "terminated", "settled")])
async def test_a_run_ended_by_a_repair_counts_as_lost_and_one_by_its_user_does_not(
    house: MakeHouse, reason: str, state: str, did: str
) -> None:
    """The one goes on by a continuation, the other waits for the next prompt."""
    gate = Gate()
    h = await house(cut_off(gate))
    session_id = h.new_id()
    handle = await h.start(session_id, "Tell me all.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    run_id = (await handle.describe()).run_id
    assert run_id is not None
    await handle.terminate(reason=reason)
    assert await state_of_run(h.client, session_id, run_id) == state
    await set_of(h, tables.session_execution, session_id, expires_at=1)

    assert (await scan(h)).done.get(did) == 1
    if did == "continued":
        await answered(h, session_id, 2)
    expected = ["user", "assistant", "synthetic", "assistant"] if did == "continued" else ["user", "assistant"]
    assert [message.type for message in await h.messages(session_id)] == expected
    [interrupted] = [event for event in await h.events(session_id) if ".step.interrupted" in event.type]
    assert interrupted.data["reason"] == ("lost" if did == "continued" else "terminated")


async def test_a_turn_that_stands_still_goes_on_after_its_repair(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """A release that cannot go on with it came after its worker died. It is repaired from three places at once; what
    it was sent meanwhile is answered, once, and who waits for the result gets that of the run that goes on."""
    gate = Gate()
    async with stage(database_url, temporal_client, task_queue, tmp_path, cut_off(gate)) as (h, start):
        worker = await start()
        session_id = h.new_id()
        handle = await h.start(session_id, "Tell me all.")
        await gate.reached()
        await kept(h, HALF)
        worker.signal(signal.SIGKILL)
        await worker.ended()
        async with broken(h.client, task_queue):
            await handle.signal("queue", {"text": "For later."})
            run_id = await failing(h.client, session_id)
        waiting = asyncio.create_task(Runs(h.client).result(session_id))

        [trouble] = await look(h)
        assert (trouble.session_id, trouble.kind) == (session_id, "stuck-run")
        assert (trouble.facts["runID"], trouble.facts["attempt"] >= ATTEMPTS) == (run_id, True)
        assert trouble.facts["leaseLeft"] > 0
        status = await Runs(h.client, ATTEMPTS).status(session_id)
        assert (status.phase, "cannot progress" in (status.waiting_for or "")) == ("waiting", True)
        before = len(await h.events(session_id))
        results = await asyncio.gather(*(repaired(h) for _ in range(3)))
        deeds = [deed for found in results for each in found.troubles for deed in each.deeds]
        assert "ended" in deeds
        assert set(deeds) <= {"ended", "moves"}
        assert all(each.is_repaired for found in results for each in found.troubles)
        # It was admitted before the run was ended, so that no crash in between could lose it.
        assert len(await h.events(session_id)) == before + 1
        async with served(h.services):
            result = await waiting
            await answered(h, session_id, 3)
        assert await look(h) == []
        assert await look(h, session_id) == []
        messages = await h.messages(session_id)
        events = await h.events(session_id)

        assert result is not None
        assert result.outcome == "done"
        assert [m.type for m in messages] == ["user", "assistant", "synthetic", "assistant", "user", "assistant"]
        assert texts(messages) == [HALF, REST, "Yes?"]
        interrupted = [event.data["reason"] for event in events if ".step.interrupted" in event.type]
        assert interrupted == ["lost"]
        assert [e.type for e in events].count("session.next.prompt.admitted.1") == 2
        assert not await is_held(h, session_id)
        await assert_equal_to_rebuild(h, session_id)


async def test_a_run_that_never_began_is_gone_on_with_as_it_was_asked(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Nothing of it is in the database: session, prompt and signals are told to the next run, in their order."""
    replies = [[Say("One.")], [Say("Two.")], [Say("Three.")]]
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies, serve=False) as h:
        session_id = h.new_id()
        async with broken(h.client, task_queue):
            handle = await h.start(session_id, "First.", title="Kept")
            await handle.signal("queue", {"text": "Second."})
            await handle.signal("queue", {"text": ""})  # to be refused
            await handle.signal("queue", {"text": "Third."})
            await failing(h.client, session_id)
        [trouble] = await look(h, session_id)
        assert (trouble.kind, trouble.facts.get("executionID")) == ("stuck-run", None)

        found = await repaired(h, session_id)
        assert [each.deeds for each in found.troubles] == [["ended"]]
        async with served(h.services):
            await answered(h, session_id, 3)
            again = await repaired(h, session_id)
        created = (await h.events(session_id))[0]

        assert again.troubles == []
        assert created.data["info"]["title"] == "Kept"
        asked = [m.text for m in await h.messages(session_id) if m.type == "user"]
        assert asked == ["First.", "Second.", "Third."]
        assert len(h.provider.requests) == 3


async def test_an_interrupt_that_nobody_has_seen_still_counts(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """A user who wanted a standing turn to stop does not want it to go on after a repair."""
    gate = Gate()
    async with stage(database_url, temporal_client, task_queue, tmp_path, cut_off(gate)) as (h, start):
        worker = await start()
        session_id = h.new_id()
        handle = await h.start(session_id, "Tell me all.")
        await gate.reached()
        await kept(h, HALF)
        worker.signal(signal.SIGKILL)
        await worker.ended()
        async with broken(h.client, task_queue):
            await handle.signal("interrupt", {"reason": "enough"})
            await failing(h.client, session_id)
        await repaired(h)
        async with served(h.services):
            result = await h.ended(session_id)

        assert result.outcome == "interrupted"
        assert len(h.provider.requests) == 1


async def test_what_was_sent_after_an_interrupt_is_not_stopped_by_it(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """It is in the inbox before the next run hears of the interrupt."""
    gate = Gate()
    async with stage(database_url, temporal_client, task_queue, tmp_path, cut_off(gate)) as (h, start):
        worker = await start()
        session_id = h.new_id()
        handle = await h.start(session_id, "Tell me all.")
        await gate.reached()
        await kept(h, HALF)
        worker.signal(signal.SIGKILL)
        await worker.ended()
        async with broken(h.client, task_queue):
            await handle.signal("interrupt", {"reason": "enough"})
            await handle.signal("steer", {"text": "Do that instead."})
            await failing(h.client, session_id)
        await repaired(h)
        async with served(h.services):
            await answered(h, session_id, 2)
        [asked] = [r["messages"][-1]["content"] for r in h.provider.requests[1:]]

        assert "Do that instead." in str(asked)
        assert texts(await h.messages(session_id)) == [HALF, REST]
        await assert_equal_to_rebuild(h, session_id)


async def test_an_interrupt_that_was_seen_and_not_settled_still_counts(house: MakeHouse) -> None:
    """The worker had begun to cancel what ran, and one that is settled counts no more."""
    tool = Deaf()
    h = await house([[CallTool("hold", id="call_1")], [Say("On."), Hang()]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await tool.started(1)
    await handle.signal("interrupt", {"id": "int_1"})
    while not await has(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_CANCEL_REQUESTED):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.05)
    run_id = (await handle.describe()).run_id
    assert run_id is not None
    await end_of(h, session_id)
    result = await h.ended(session_id)
    tool.gate.set()

    assert result.outcome == "interrupted"
    assert (await interruptions(h, session_id))[-1]["interruptID"] == "int_1"
    left = await unread.admit(h.services.database, session_id, await unread.read(h.client, session_id, run_id), 1000)
    assert left.sent == ()


async def test_an_interrupt_that_a_run_has_outlived_is_not_told_again(house: MakeHouse) -> None:
    """It was settled with another one, whose id is the one in the log: what was begun later is not its business."""
    tool = Deaf()
    h = await house([[CallTool("hold", id="call_1")], [Say("On.")]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await tool.started(1)
    await handle.signal("interrupt", {"id": "int_1"})
    await handle.signal("interrupt", {"id": "int_2"})
    await handle.signal("steer", {"text": "On."})
    tool.gate.set()
    await h.ended(session_id)
    run_id = (await h.client.get_workflow_handle(session_id).describe()).run_id  # the one that went on
    assert run_id is not None
    sent = (await unread.read(h.client, session_id, run_id)).sent

    assert "interrupt" not in [one.signal for one in sent]
    assert len(h.provider.requests) == 2


class Late(Runs):
    """A client to which something is sent right before a run is ended."""

    async def end(self, session_id: str, run_id: str) -> None:
        """Send it, and end the run."""
        handle = self._temporal.get_workflow_handle(session_id)
        await handle.signal("steer", {"id": "msg_late", "text": "Me too."})
        await super().end(session_id, run_id)


async def test_what_comes_until_the_end_is_kept_although_nothing_is_started(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a session that was never created: Temporal goes away right after it has ended the run."""

    async def away(*_: Any) -> None:
        raise UnavailableError("a test says so: Temporal is away")

    async with open_house(database_url, temporal_client, task_queue, tmp_path, [[Say("Yes.")]], serve=False) as h:
        session_id = h.new_id()
        async with broken(h.client, task_queue):
            await h.start(session_id, "First.", title="Kept", location={"directory": str(tmp_path)})
            await failing(h.client, session_id)
        tools = inspection(h)
        found = await tools.look([session_id])
        tools.runs = Late(h.client)
        with monkeypatch.context() as patched:
            patched.setattr(unread, "send_again", away)
            await tools.repair(found)
        [trouble] = found.troubles

        assert (trouble.deeds, trouble.is_repaired) == (["ended", "untold"], False)
        assert "Temporal is away" in (trouble.error or "")
        assert await pending(h, session_id) == {"First.": True, "Me too.": True}
        assert (await h.events(session_id))[0].data["info"]["title"] == "Kept"
        again = await repaired(h, session_id)
        assert [each.kind for each in again.troubles] == []  # not yet: its wake is not lost before its time
        await set_of(h, tables.session_input, session_id, time_created=1)
        again = await repaired(h, session_id)
        assert [each.deeds for each in again.troubles if each.kind == "pending-wake"] == [["woken"]]
        async with served(h.services):
            await answered(h, session_id, 1)


async def test_a_database_that_goes_away_is_not_called_temporal(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Its error comes through, and nothing has been ended."""
    async with open_house(database_url, temporal_client, task_queue, tmp_path, serve=False) as h:
        session_id = h.new_id()
        async with broken(h.client, task_queue):
            handle = await h.start(session_id, "First.")
            await failing(h.client, session_id)
        tools = inspection(h)
        found = await tools.look([session_id])
        with Outage(h, "<locals>"), pytest.raises(UnavailableError, match="away"):
            await tools.repair(found)

        assert [each.deeds for each in found.troubles] == [[]]
        assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
        await handle.terminate()


async def test_what_cannot_be_admitted_is_refused_by_the_next_run(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Visibly, as this one would have: what is too large, and what has the id of something else."""
    async with open_house(
        database_url, temporal_client, task_queue, tmp_path, [[Say("Yes."), Hang()]], serve=False
    ) as h:
        session_id = await admitted(h)
        async with broken(h.client, task_queue):
            handle = await h.start(session_id)
            await handle.signal("steer", {"id": f"msg_{session_id[4:]}", "text": "Something else."})
            await handle.signal("steer", {"text": "x" * 1_000_001})
            await failing(h.client, session_id)
        await repaired(h, session_id)
        async with served(h.services):
            while len(refused := (await Runs(h.client).status(session_id)).rejected) < 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
            await h.client.get_workflow_handle(session_id).terminate()

        assert "stands for something else" in refused[0].reason
        assert "attach a file instead" in refused[1].reason
        assert await h.types(session_id) != []


async def test_a_run_that_waits_is_left_alone(house: MakeHouse) -> None:
    """Its lease has run out, and it answers: it gets its lease back, as from a scan, and goes on."""
    h = await house([[Fail(429, headers={"retry-after": "50"})]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Tell me all.")
    while (await Runs(h.client).status(session_id)).phase != "retrying":  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.05)
    await set_of(h, tables.session_execution, session_id, expires_at=1)

    found = await repaired(h)
    assert [(each.kind, each.facts["run"], each.facts["answers"]) for each in found.troubles] == [
        ("expired-claim", "open", True)
    ]
    assert [each.deeds for each in found.troubles] == [["postponed"]]
    assert await look(h) == []
    await handle.signal("interrupt")
    assert (await handle.result())["outcome"] == "interrupted"


async def test_a_frozen_run_is_ended_once_its_lease_has_run_out(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Its only worker stands still, so that no task fails and nothing answers. What that worker does later is void."""
    gate = Gate()
    async with stage(database_url, temporal_client, task_queue, tmp_path, cut_off(gate)) as (h, start):
        worker = await start()
        session_id = h.new_id()
        await h.start(session_id, "Tell me all.")
        await gate.reached()
        await kept(h, HALF)
        worker.signal(signal.SIGSTOP)
        assert await look(h) == []
        await set_of(h, tables.session_execution, session_id, expires_at=1)
        tools = inspection(h)
        seen = await tools.look()
        [trouble] = seen.troubles
        assert (trouble.kind, trouble.facts["answers"], trouble.facts["served"]) == ("stuck-run", False, True)
        await set_of(h, tables.session_execution, session_id, expires_at=2**50)
        await tools.repair(seen)  # its lease was renewed meanwhile
        assert trouble.deeds == ["moves"]
        await set_of(h, tables.session_execution, session_id, expires_at=1)
        found = await repaired(h)
        assert [each.deeds for each in found.troubles] == [["ended"]]
        async with served(h.services):
            worker.signal(signal.SIGCONT)
            await answered(h, session_id, 2)

        assert texts(await h.messages(session_id)) == [HALF, REST]
        assert [m.type for m in await h.messages(session_id)] == ["user", "assistant", "synthetic", "assistant"]
        await assert_equal_to_rebuild(h, session_id)


async def test_a_run_whose_own_workers_are_gone_is_left_to_the_next_one(house: MakeHouse) -> None:
    """Nobody has looked at it, so nothing is wrong with it, whoever serves other queues."""
    h = await house([[Say("Yes.")]])
    session_id = h.new_id()
    await h.run(session_id, "Hello")
    elsewhere = f"{h.task_queue}-elsewhere"
    handle = await h.client.start_workflow(contracts.SESSION_TURN, {}, id=session_id, task_queue=elsewhere)
    await owned(h, session_id, (await handle.describe()).run_id)
    found = await repaired(h, session_id)

    assert [(each.kind, each.facts.get("served"), each.deeds) for each in found.troubles] == [
        ("expired-claim", False, ["alone"])
    ]
    assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    await handle.terminate()


async def test_the_next_run_is_started_where_the_last_one_was(house: MakeHouse) -> None:
    """Whichever queue the doctor is told of."""
    h = await house()
    session_id, elsewhere = h.new_id(), f"{h.task_queue}-elsewhere"
    async with broken(h.client, elsewhere):
        await h.client.start_workflow(contracts.SESSION_TURN, {}, id=session_id, task_queue=elsewhere)
        run_id = await failing(h.client, session_id)
    found = await repaired(h, session_id)
    described = await h.client.get_workflow_handle(session_id).describe()

    assert [each.deeds for each in found.troubles] == [["ended"]]
    assert (described.task_queue, described.run_id != run_id) == (elsewhere, True)
    await h.client.get_workflow_handle(session_id).terminate()


async def test_a_silent_run_that_goes_on_for_the_owner_is_ended(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """The claim is that of the run before it, of whose history any worker can tell what it did."""
    async with open_house(database_url, temporal_client, task_queue, tmp_path, [[Say("Yes.")]], serve=False) as h:
        session_id = await admitted(h)
        async with _silent(h.client, task_queue):
            handle = await h.start(session_id)
            first = handle.first_execution_run_id
            assert first is not None
            while (await h.client.get_workflow_handle(session_id).describe()).run_id == first:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
            assert await Runs(h.client).answers(session_id, first)
            await owned(h, session_id, first)
            tools = inspection(h)
            found = await tools.look()
        [trouble] = found.troubles
        assert (trouble.kind, trouble.facts["answers"], trouble.facts["served"]) == ("stuck-run", False, True)
        assert trouble.facts["runID"] != first
        await tools.repair(found)
        assert trouble.deeds == ["ended"]
        async with served(h.services):
            await answered(h, session_id, 1)


async def test_a_lost_run_is_reconciled_and_its_session_goes_on(house: MakeHouse) -> None:
    """By the scan's own deeds, once, however many repair it."""
    gate = Gate()
    h = await house(cut_off(gate))
    session_id = h.new_id()
    await h.start(session_id, "Tell me all.")
    await gate.reached()
    await logged(h, session_id, "session.next.text.started.1")
    await forgotten(h, session_id)
    await set_of(h, tables.session_execution, session_id, expires_at=1)

    results = await asyncio.gather(*(repaired(h) for _ in range(3)))
    await answered(h, session_id, 2)
    deeds = [deed for found in results for each in found.troubles for deed in each.deeds]
    assert deeds.count("continued") == 1
    assert "woken" in deeds  # once more, when the first wake takes long
    assert texts(await h.messages(session_id))[1] == REST
    assert len(h.provider.requests) == 2
