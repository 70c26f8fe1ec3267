"""A worker lives and is cut off from a server: it lets go of its work, which goes on, and nothing of it is seen late.

Nothing tells a worker that the network is gone. Cut off from PostgreSQL, it no longer beats once its renewals are too
old to be trusted, 20 seconds; cut off from Temporal, its beats are missed. Half of it runs with the suite, everything
with FAULTS=all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from fencepost.providers.script import Action, CallTool, Gate, Pause, Say
from tests.faults.stage import Stage, open_stage
from tests.worker_process import WorkerProcess, exists

pytestmark = pytest.mark.timeout(120)

EVERY = os.environ.get("FAULTS") == "all"


async def ended(worker: WorkerProcess, stage: Stage) -> None:
    """End a worker that can reach its servers again; whatever it still does changes nothing."""
    before = await stage.traces()
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert await stage.traces() == before


@pytest.mark.parametrize("server", ["postgresql", "temporal"] if EVERY else ["postgresql"])
async def test_a_stream_of_a_worker_that_is_cut_off_is_closed_and_the_turn_goes_on(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, server: str
) -> None:
    held = Gate()
    replies: list[list[Action]] = [
        [Say("w1.1 w1.2 "), Pause(held), Say("w1.3 "), CallTool("bash", {"command": "echo call_1 >> effects"})],
        [Say("w2.1 "), CallTool("bash", {"command": "echo call_2 >> effects"}, id="call_2")],
        [Say("w3.1 w3.2")],
    ]
    async with open_stage(database_url, temporal_client, task_queue, tmp_path, replies=replies) as stage:
        alone, cables = await stage.wired()
        handle = await stage.start("Do it, and say so.")
        await held.reached()
        cables[server].cut()
        await stage.healthy()
        await stage.house.provider.left()
        held.release()
        cables[server].mend()
        result: Any = await handle.result()
        await ended(alone, stage)

        assert result["outcome"] == "done"
        assert (tmp_path / "effects").read_text() == "call_2\n"
        await stage.verify()


@pytest.mark.parametrize("server", ["postgresql", "temporal"] if EVERY else ["temporal"])
async def test_a_tool_of_a_worker_that_is_cut_off_is_dead_and_is_not_started_again(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, server: str
) -> None:
    command = "echo $$ > pid; echo call_1 >> effects; sleep 300; echo late >> effects"
    replies: list[list[Action]] = [
        [Say("w1.1 "), CallTool("bash", {"command": command}, id="call_1")],
        [Say("w2.1 w2.2")],
    ]
    async with open_stage(database_url, temporal_client, task_queue, tmp_path, replies=replies) as stage:
        alone, cables = await stage.wired()
        handle = await stage.start("Do it, and say so.")
        await exists(tmp_path / "effects")
        pid = int((tmp_path / "pid").read_text())
        cables[server].cut()
        await stage.healthy()
        while _lives(pid):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)
        cables[server].mend()
        result: Any = await handle.result()
        await ended(alone, stage)

        assert result["outcome"] == "done"
        await stage.verify()


@pytest.mark.skipif(not EVERY, reason="runs with FAULTS=all")
async def test_a_worker_that_stays_cut_off_from_postgresql_hands_its_turn_over_when_it_is_stopped(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    held = Gate()
    replies: list[list[Action]] = [[Say("w1.1 w1.2 "), Pause(held), Say("w1.3 ")], [Say("w2.1 w2.2")]]
    async with open_stage(database_url, temporal_client, task_queue, tmp_path, replies=replies) as stage:
        alone, cables = await stage.wired()
        handle = await stage.start("Say so.")
        await held.reached()
        cables["postgresql"].cut()
        await stage.healthy()
        alone.signal(signal.SIGTERM)
        result: Any = await handle.result()
        held.release()

        assert await alone.ended() == 0
        assert result["outcome"] == "done"
        await stage.verify()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
