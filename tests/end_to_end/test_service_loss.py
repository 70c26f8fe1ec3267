"""A service dies in the middle of a turn and comes back: the turn goes on, and nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from fencepost.local import LocalStack
from fencepost.local.postgres import PostgresServer
from fencepost.local.temporal import TemporalServer
from fencepost.providers.script import Action, CallTool, Gate, Pause, Say
from fencepost.store import migrate
from tests.house_kit import House, assert_equal_to_rebuild, open_house
from tests.worker_process import WorkerProcess, environment, exists, worker_process


@asynccontextmanager
async def own_stack(
    home: Path, directory: Path, replies: list[list[Action]]
) -> AsyncIterator[tuple[House, WorkerProcess]]:
    """Give a house and a worker process on servers of their own, which the test may kill."""
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(LocalStack(home, temporal_port=0, ui_port=0))
        await migrate.upgrade(servers.database_url)
        client = await Client.connect(servers.temporal_address, data_converter=pydantic_data_converter)
        queue = "own-stack"
        house = await stack.enter_async_context(
            open_house(servers.database_url, client, queue, directory, replies, serve=False)
        )
        env = environment(
            directory / "fencepost.toml",
            servers.database_url,
            servers.temporal_address,
            queue,
            directory,
            house.provider.base_url,
        )
        worker = await stack.enter_async_context(worker_process(env))
        yield house, worker


@pytest.mark.timeout(120)
async def test_postgresql_restarted_in_the_middle_of_a_stream(home: Path, tmp_path: Path) -> None:
    gate = Gate()
    effects = tmp_path / "effects"
    replies: list[list[Action]] = [
        [
            Say("Before the outage. "),
            CallTool("bash", {"command": f"echo once >> {effects}"}),
            Say("Done? "),
            Pause(gate),
        ],
        [Say("After it.")],
        [Say("After it.")],
        [Say("After it.")],
    ]
    async with own_stack(home, tmp_path, replies) as (house, worker):
        session_id = house.new_id()
        handle = await house.start(session_id, "Go.")
        await gate.reached()
        await exists(effects)
        server = PostgresServer(home)
        server.stop()
        gate.release()  # the stream ends while nothing can be written
        server.start(fast=True)
        result: Any = await handle.result()
        types = await house.types(session_id)

        assert result["outcome"] == "done"
        assert effects.read_text() == "once\n"
        assert types.count("session.next.prompted.1") == 1
        starts = types.count("session.next.step.started.1")
        ends = [kind for kind in types if kind.startswith("session.next.step.") and not kind.endswith("started.1")]
        assert len(ends) >= starts
        await assert_equal_to_rebuild(house, session_id)
        assert worker.process.returncode is None


@pytest.mark.timeout(120)
async def test_temporal_restarted_in_the_middle_of_a_stream(home: Path, tmp_path: Path) -> None:
    gate = Gate()
    replies: list[list[Action]] = [[Say("Before. "), Pause(gate), Say("After.")], [Say("Again.")], [Say("Again.")]]
    async with own_stack(home, tmp_path, replies) as (house, worker):
        session_id = house.new_id()
        await house.start(session_id, "Go.")
        await gate.reached()
        server = TemporalServer(home)
        address = house.client.service_client.config.target_host
        server.stop()
        # The user of the stack who comes next finds Temporal gone and starts it on its old port.
        async with LocalStack(home) as again:
            assert again.temporal_address == address
            gate.release()
            result = await house.ended(session_id)
            types = await house.types(session_id)

            assert result.outcome == "done"
            assert types.count("session.next.prompted.1") == 1
            await assert_equal_to_rebuild(house, session_id)
            assert worker.process.returncode is None
