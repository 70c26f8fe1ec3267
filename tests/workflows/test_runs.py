"""The client's view of runs while Temporal is away."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

from temporalio.client import Client

from fencepost import runs
from tests.cable import cable_to_temporal


async def test_an_update_waits_for_temporal_without_a_word_in_the_log(
    temporal_address: str, task_queue: str, monkeypatch: Any
) -> None:
    """What failed with it, such as the start that it carries, is nothing that asyncio has to tell."""
    told: list[dict[str, Any]] = []
    failed = asyncio.Event()
    through_outages = runs._through_outages

    async def watched(call: Any) -> Any:
        async def attempt() -> Any:
            try:
                return await call()
            except Exception:
                failed.set()
                raise

        return await through_outages(attempt)

    monkeypatch.setattr(runs, "_through_outages", watched)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with cable_to_temporal(temporal_address) as (cable, address):
        client = await Client.connect(address)
        asking = asyncio.create_task(runs.Runs(client).update("ses_away", task_queue, "prompt", [], "u", {}, dict))
        while not failed.is_set():
            cable.drop()  # until Temporal's own retries have ended
            with suppress(TimeoutError):
                await asyncio.wait_for(failed.wait(), 0.1)
        await asyncio.sleep(0)
        gc.collect()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        gc.collect()

    assert told == []
