"""A worker's sign of life, with services that come and go, and what Temporal's native part says about that."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from temporalio.client import Client

from fencepost.domain.errors import UnavailableError
from fencepost.serving import Seldom, beat
from fencepost.store.engine import Database
from tests.house_kit import open_house
from tests.worker_process import exists


class FickleDatabase(Database):
    """The database, which can be away."""

    away = False

    async def ping(self) -> None:
        """Answer, or be away."""
        if self.away:
            raise UnavailableError("away")
        await super().ping()


async def gone(path: Path) -> None:
    """Wait until a file is not there any more."""
    while await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - a file tells nobody that it goes
        await asyncio.sleep(0.02)


async def test_the_file_is_there_while_the_services_answer(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    health = tmp_path / "health"
    database = FickleDatabase(database_url, pool_size=1)
    async with open_house(database_url, temporal_client, task_queue, tmp_path, serve=False) as house:
        beating = asyncio.create_task(beat(replace(house.services, database=database), health, 0.02))
        async with asyncio.timeout(20):
            await exists(health)
            before = health.stat().st_mtime_ns
            while health.stat().st_mtime_ns == before:  # noqa: ASYNC110 - a file tells nobody that it is fresh
                await asyncio.sleep(0.02)
            database.away = True
            await gone(health)
            database.away = False
            await exists(health)
        beating.cancel()
        await asyncio.wait({beating})
        await database.close()


def test_what_every_poller_says_is_said_once() -> None:
    """While the server is away each of many pollers says so, again and again."""
    filtered = Seldom()

    def passes(message: str, seconds: float) -> bool:
        record = logging.LogRecord("temporalio.native", logging.WARNING, "", 0, message, None, None)
        record.created = seconds
        return filtered.filter(record)

    said = "[sdk_core::temporalio_client::retry] gRPC call {} retried {} times"

    assert passes(said.format("poll_workflow_task_queue", 6), 100)
    assert not passes(said.format("poll_activity_task_queue", 7), 110)
    assert passes("[sdk_core::temporalio_sdk_core::worker] something else", 111)
    assert passes(said.format("poll_workflow_task_queue", 12), 131)
