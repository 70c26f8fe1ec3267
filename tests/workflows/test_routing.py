"""Tools run where the session's files are; while nobody is at work there the user is told, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from fencepost.domain.contracts import TurnResult
from fencepost.domain.errors import WorkspaceUnavailableError
from fencepost.domain.messages import CompletedTool, FailedTool
from fencepost.providers.script import CallTool, Gate, Pause, Say
from fencepost.services import Services
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import in_phase, interrupt, is_held
from tests.workflows.test_turn import tools
from worker import build_workers

FAR = {"directory": "/far/away", "workspaceID": "far"}
LIMITS = {"workspace_wait_seconds": 1, "lease_seconds": 2, "renew_seconds": 1}


@asynccontextmanager
async def at_workspace(services: Services) -> AsyncIterator[None]:
    """Serve only the workspace of these services, and no turns."""
    _, worker = build_workers(services)
    async with worker:
        yield


async def _houses(house: MakeHouse, replies: Any, **limits: Any) -> tuple[House, House, HeldTool]:
    """Give a house that serves turns, another one for the workspace `far` that does not serve yet, and its tool."""
    tool = HeldTool()
    h = await house(replies, registry=tool.registry, limits=LIMITS | limits)
    far = await house(
        registry=tool.registry, limits=LIMITS, workspace={"id": "far", "directory": h.directory}, serve=False
    )
    return h, far, tool


async def _told(handle: WorkflowHandle[Any, Any], words: str) -> None:
    """Wait until the run says these words of what it waits for."""
    while True:
        status: Any = await handle.query("status")
        if words in status["waitingFor"]:
            return
        await asyncio.sleep(0.05)


async def test_the_user_is_told_that_no_worker_serves_the_workspace_and_one_that_comes_goes_on(
    house: MakeHouse,
) -> None:
    """By the error's name, with what to do; for longer than a lease. Then the call starts, once, and that is shown."""
    h, far, tool = await _houses(house, [[CallTool("hold", id="call_1")], [Say("Done.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.", location=FAR)
    await in_phase(handle, "waiting")
    said: Any = await handle.query("status")
    await _told(handle, "for 3 s")
    async with at_workspace(far.services):
        await tool.started(1)
        await in_phase(handle, "busy")
        runs: Any = await handle.query("status")
        tool.gate.set()
        result = TurnResult.model_validate(await handle.result())

    assert said["waitingFor"].startswith(f"{WorkspaceUnavailableError.code}: no worker of workspace far ")
    for advice in (f"{h.task_queue}-workspace-far", "workspace.id = 'far'", f"fencepost session move {session_id} "):
        assert advice in said["waitingFor"]
    assert "tools" not in said or said["tools"] == []
    assert runs.get("waitingFor") is None
    assert len(runs["tools"]) == 1
    assert (result.outcome, len(tool.invocations)) == ("done", 1)
    [part] = tools((await h.messages(session_id))[1])
    assert isinstance(part.state, CompletedTool)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.parametrize("streaming", [False, True], ids=["after the stream", "during the stream"])
async def test_an_interrupt_ends_the_wait_within_a_second(house: MakeHouse, streaming: bool) -> None:
    """A worker that comes afterwards finds nothing to do."""
    gate = Gate()
    more = [Say("Wait."), Pause(gate)] if streaming else []
    h, far, tool = await _houses(house, [[CallTool("hold"), *more], [Say("Fine.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.", location=FAR)
    await in_phase(handle, "waiting")
    result = await interrupt(h, session_id)

    assert result.outcome == "interrupted"
    assert not await is_held(h, session_id)
    async with at_workspace(far.services):
        assert (await h.run(session_id, "Never mind.")).outcome == "done"
    assert tool.invocations == []
    await assert_replays(h, session_id)


async def test_a_call_fails_where_that_is_configured_and_the_turn_goes_on(house: MakeHouse) -> None:
    """The model and the user are told why; the call never starts."""
    replies = [[CallTool("hold", id="call_1"), CallTool("hold", id="call_2")], [Say("I see.")], [Say("Still.")]]
    h, far, tool = await _houses(house, replies, workspace_absent="fail")
    session_id = h.new_id()
    result = await h.run(session_id, "Go.", location=FAR)
    async with at_workspace(far.services):
        assert (await h.run(session_id, "And now?")).outcome == "done"

    assert result.outcome == "done"
    parts = tools((await h.messages(session_id))[1])
    assert len(parts) == 2
    for part in parts:
        assert isinstance(part.state, FailedTool)
        assert part.state.error.message.startswith(f"{WorkspaceUnavailableError.code}: no worker of workspace far ")
    results = [message["content"] for message in h.provider.requests[1]["messages"] if message["role"] == "tool"]
    assert len(results) == 2
    assert all(WorkspaceUnavailableError.code in each for each in results)
    assert tool.invocations == []
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_directory_that_is_not_there_fails_the_call_clearly(house: MakeHouse) -> None:
    """The workspace is served, and the directory is gone."""
    h = await house([[CallTool("bash", {"command": "pwd"})], [Say("Oh.")]], workspace={"id": "far", "directory": "/"})
    session_id = h.new_id()
    gone = h.directory / "gone"
    gone.mkdir()
    handle = await h.start(session_id, None, location={"directory": str(gone), "workspaceID": "far"})
    await handle.result()
    gone.rmdir()
    assert (await h.run(session_id, "Go.")).outcome == "done"

    [part] = tools((await h.messages(session_id))[1])
    assert isinstance(part.state, FailedTool)
    assert "No such file or directory" in part.state.error.message
