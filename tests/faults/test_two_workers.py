"""Two workers serve one session, and whatever comes at once is answered once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from temporalio.client import Client, WorkflowExecutionStatus

from tests.faults.stage import Stage, open_stage


async def at_rest(stage: Stage) -> None:
    """Wait until no run of the session is open."""
    handle = stage.house.client.get_workflow_handle(stage.session_id)
    while True:
        await handle.result()
        if (await handle.describe()).status != WorkflowExecutionStatus.RUNNING:
            return


async def test_two_workers_and_many_inputs_at_once(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Prompts, steers and wakes come together, and one of the workers is drained in between."""
    async with open_stage(database_url, temporal_client, task_queue, tmp_path) as stage:
        first, _ = await asyncio.gather(stage.healthy(), stage.healthy())
        await stage.start("Input 0.")

        async def prompt(number: int) -> None:
            text = f"Input {number}."
            stage.evidence.inputs.append(text)
            delivery = "queue" if number % 3 == 0 else "steer"
            await stage.house.prompt(stage.session_id, text, delivery=delivery)

        await asyncio.gather(*(prompt(number) for number in range(1, 7)), *(stage.wake() for _ in range(3)))
        first.signal(signal.SIGTERM)
        await asyncio.gather(*(prompt(number) for number in range(7, 11)), stage.wake(), first.ended())
        await at_rest(stage)

        await stage.verify()
