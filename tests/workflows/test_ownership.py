"""Somebody else comes to own the session while a turn is at work: from then on its hands write and begin nothing."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text, update
from temporalio.client import WorkflowHandle

from fencepost.domain.events import (
    DurableEvent,
    Prompted,
    StepStarted,
    ToolCalled,
    ToolInputEnded,
    ToolInputStarted,
    ToolProviderInfo,
)
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Prompt
from fencepost.domain.models import ModelRef
from fencepost.providers.script import CallTool, Gate, Pause, Say
from fencepost.store import event_log, tables
from fencepost.store.event_log import CLOCK, Entry
from tests.house_kit import MODEL, HeldTool, House
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import in_phase
from tests.workflows.test_steering import During
from tests.workflows.test_turn import tools

SUCCESSOR = {"id": "provider-successor", "owner_id": "successor", "phase": "ready"}

# Replaces the owner inside the very transaction that appends the event of a call.
_ROBBERY = (
    """
CREATE FUNCTION rob() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE session_execution SET id = 'provider-successor', owner_id = 'successor' WHERE session_id = NEW.aggregate_id;
    RETURN NEW;
END $$
""",
    """
CREATE TRIGGER rob AFTER INSERT ON event FOR EACH ROW
    WHEN (NEW.type = 'session.next.tool.called.1') EXECUTE FUNCTION rob()
""",
)


class Theft:
    """Another owner with a whole lease, and how long the log was when it came."""

    def __init__(self, house: House, session_id: str) -> None:
        self._house = house
        self._session_id = session_id
        self.types: list[str] = []

    async def __call__(self) -> None:
        """Replace the session's owner."""
        execution = tables.session_execution
        values = {**SUCCESSOR, "expires_at": text(f"{CLOCK} + 60000")}
        async with self._house.services.database.begin() as conn:
            await conn.execute(update(execution).where(execution.c.session_id == self._session_id).values(**values))
        self.types = await self._house.types(self._session_id)


async def refused(house: House, handle: WorkflowHandle[Any, Any]) -> None:
    """Wait until the former owner's run has found that it lost the session and leaves the new owner alone; end it."""
    await in_phase(handle, "waiting")
    status: Any = await handle.query("status")
    assert "is owned by run successor" in status["waitingFor"]
    await handle.terminate()
    async with house.services.database.read() as conn:
        [row] = await conn.execute(tables.session_execution.select())
    assert (row.id, row.owner_id) == (SUCCESSOR["id"], SUCCESSOR["owner_id"])


@pytest.mark.conformance("OWN-01")
@pytest.mark.parametrize(
    "activity",
    ["admit_start", "_claim", "resolve_model"],
    ids=["as it begins", "before it is resolved", "while it is resolved"],
)
async def test_no_request_goes_out_for_a_session_that_has_another_owner(house: MakeHouse, activity: str) -> None:
    h = await house([[Say("Never said.")]])
    session_id = h.new_id()
    theft = Theft(h, session_id)
    with During(h, activity, theft):
        await (h.start if activity == "admit_start" else h.prompt)(session_id, "Go.")
        await refused(h, h.client.get_workflow_handle(session_id))

    assert h.provider.requests == []
    assert theft.types
    assert await h.types(session_id) == theft.types


@pytest.mark.conformance("OWN-02")
async def test_nothing_streamed_is_recorded_for_a_session_that_has_another_owner(house: MakeHouse) -> None:
    gate = Gate()
    h = await house([[Pause(gate), Say("stale output")]])
    session_id = h.new_id()
    theft = Theft(h, session_id)
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await theft()
    gate.release()
    await refused(h, handle)

    assert await h.types(session_id) == theft.types
    assert [message.type for message in await h.messages(session_id)] == ["user"]


@pytest.mark.conformance("OWN-03")
async def test_no_tool_starts_when_the_owner_changes_as_its_call_is_recorded(house: MakeHouse) -> None:
    """In the same transaction even: the stream's hand has done its last, and the tool's does nothing."""
    tool = HeldTool()
    tool.gate.set()
    h = await house([[CallTool("hold", id="call_1")], [Say("Never said.")]], registry=tool.registry)
    async with h.services.database.begin() as conn:
        for statement in _ROBBERY:
            await conn.exec_driver_sql(statement)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await refused(h, handle)
    types = await h.types(session_id)
    messages = await h.messages(session_id)

    assert tool.invocations == []
    assert types[-1] == "session.next.tool.called.1"
    [part] = tools(messages[1])
    assert part.state.status == "running"
    assert len(h.provider.requests) == 1


async def left_running(house: House, session_id: str, *, called: bool = True) -> None:
    """Leave a session as a process did that ended in the middle of a tool call, or of its input, and was forgotten."""
    message_id = fresh_id("msg")
    step: dict[str, Any] = {"timestamp": 1, "session_id": session_id, "assistant_message_id": message_id}
    prompt = Prompt(text="Go.")
    made: list[DurableEvent] = [
        Prompted(timestamp=1, session_id=session_id, message_id=fresh_id("msg"), prompt=prompt, delivery="steer"),
        StepStarted(**step, agent="build", model=ModelRef.parse(MODEL)),
        ToolInputStarted(**step, call_id="call_1", name="hold"),
    ]
    if called:
        provider = ToolProviderInfo(executed=False)
        made += [
            ToolInputEnded(**step, call_id="call_1", text="{}"),
            ToolCalled(**step, call_id="call_1", tool="hold", input={}, provider=provider),
        ]
    async with house.services.database.begin() as conn:
        head = await event_log.lock(conn, session_id)
        await event_log.append(conn, head, [Entry(fresh_id("evt"), event) for event in made])


@pytest.mark.conformance("OWN-04")
async def test_a_former_owner_does_not_fail_the_tools_that_were_left_running(house: MakeHouse) -> None:
    h = await house([[Say("Never said.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "Recorded.", resume=False)
    await h.ended(session_id)
    await left_running(h, session_id)
    theft = Theft(h, session_id)
    with During(h, "_claim", theft):
        await h.prompt(session_id, "Go.")
        await refused(h, h.client.get_workflow_handle(session_id))
    messages = await h.messages(session_id)

    assert await h.types(session_id) == theft.types
    [part] = tools(messages[1])
    assert part.state.status == "running"
    assert h.provider.requests == []
