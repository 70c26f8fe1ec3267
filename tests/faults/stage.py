"""A house with faulty and healthy workers as processes, a model that calls a tool, and the evidence of what it did."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle

from fencepost.domain.contracts import SESSION_TURN, SIGNAL_WAKE
from fencepost.providers.script import Action, CallTool, Say
from fencepost.store.live import Listener
from fencepost.store.readers import follow
from tests.cable import Cable, cable_to_postgresql, cable_to_temporal
from tests.checker import Evidence, check
from tests.faulty_worker import Fault
from tests.house_kit import House, open_house
from tests.worker_process import WorkerProcess, environment, exists, worker_process

# How long Temporal waits for a worker that died or stands still in a workflow task, and thus in a local activity.
TASK_SECONDS = 2


class Model:
    """Says words that nobody has said, and calls one tool, whose effect is a line in a file, until the transcript
    holds a call."""

    def __init__(self, effects: Path, tool: str = "bash") -> None:
        self._effects = effects
        self._tool = tool
        self._numbers = count(1)

    def __call__(self, body: dict[str, Any]) -> list[Action]:
        """Answer a request."""
        number = next(self._numbers)
        words = [f"w{number}.{n} " for n in range(4)]
        if any(message.get("tool_calls") for message in body["messages"]):
            return [Say("".join(words), delay=0.02)]
        call = f"call_{number}"
        given = {"command": f"echo {call} >> {self._effects}; echo done"}
        if self._tool == "write":
            given = {"path": str(self._effects), "content": f"{call}\n"}
        return [Say(words[0]), CallTool(self._tool, given, id=call), Say("".join(words[1:]), delay=0.1)]


class Stage:
    """What a test of faults works with."""

    def __init__(self, house: House, effects: Path, directory: Path, env: dict[str, str]) -> None:
        self.house = house
        self.session_id = house.new_id()
        self.evidence = Evidence()
        self._effects = effects
        self._directory = directory
        self._env = env
        self._stack = AsyncExitStack()
        self._reading: asyncio.Task[None] | None = None

    async def healthy(self) -> WorkerProcess:
        """Start a worker without a fault."""
        return await self._stack.enter_async_context(worker_process(self._env))

    async def faulty(self, fault: Fault) -> tuple[WorkerProcess, Path]:
        """Start a worker with a fault; the file is there once the fault has happened."""
        mark = self._directory / f"mark-{fault.probe}"
        given = Fault(fault.probe, fault.side, fault.deed, fault.nth, str(mark))
        env = {**self._env, **given.to_environment()}
        return await self._stack.enter_async_context(worker_process(env, "tests.faulty_worker")), mark

    async def wired(self) -> tuple[WorkerProcess, dict[str, Cable]]:
        """Start a worker without a fault that reaches its servers by cables: "postgresql" and "temporal"."""
        enter = self._stack.enter_async_context
        database, database_url = await enter(cable_to_postgresql(self._env["FENCEPOST_DATABASE_URL"]))
        temporal, address = await enter(cable_to_temporal(self._env["TEMPORAL_ADDRESS"]))
        env = {**self._env, "FENCEPOST_DATABASE_URL": database_url, "TEMPORAL_ADDRESS": address}
        return await enter(worker_process(env)), {"postgresql": database, "temporal": temporal}

    async def start(self, text: str) -> WorkflowHandle[Any, Any]:
        """Start a turn with a prompt that is to be answered, and a reader of the session."""
        self.evidence.inputs.append(text)
        self._reading = asyncio.create_task(self._read())
        return await self.house.client.start_workflow(
            SESSION_TURN,
            {"prompt": {"text": text}},
            id=self.session_id,
            task_queue=self.house.task_queue,
            task_timeout=timedelta(seconds=TASK_SECONDS),
        )

    async def wake(self) -> WorkflowHandle[Any, Any]:
        """Look at the session's inbox, by a new run if none is open."""
        return await self.house.client.start_workflow(
            SESSION_TURN,
            {},
            id=self.session_id,
            task_queue=self.house.task_queue,
            task_timeout=timedelta(seconds=TASK_SECONDS),
            start_signal=SIGNAL_WAKE,
        )

    async def _read(self) -> None:
        listener = Listener(self.house.services.database)
        try:
            async for item in follow(self.house.services.database, listener, self.session_id):
                self.evidence.shown.append(item)
        finally:
            await listener.close()

    async def close(self) -> None:
        """End the reader and the workers."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        await self._stack.aclose()

    async def traces(self) -> tuple[list[str], list[str]]:
        """Give what there is of the session so far: the ids of its events, and the effects of its tools."""
        effects = self._effects.read_text().split() if self._effects.exists() else []
        return [event.id for event in await self.house.events(self.session_id)], effects

    async def verify(self) -> None:
        """Check everything that has to hold of the session at rest."""
        _, self.evidence.effects = await self.traces()
        log = [f"{event.seq} {event.type} {event.data}" for event in await self.house.events(self.session_id)]
        violations = await check(self.house.services.database, self.session_id, self.evidence)
        assert not violations, "\n".join([*map(str, violations), "", *log])


@asynccontextmanager
async def open_stage(
    database_url: str,
    client: Client,
    task_queue: str,
    directory: Path,
    tool: str = "bash",
    replies: list[list[Action]] | None = None,
) -> AsyncIterator[Stage]:
    """Open a house without a worker; the model calls this tool, or gives these replies."""
    effects = directory / "effects"
    model = replies if replies is not None else Model(effects, tool)
    async with open_house(database_url, client, task_queue, directory, model, serve=False) as house:
        address = client.service_client.config.target_host
        config = directory / "fencepost.toml"
        env = environment(config, database_url, address, task_queue, directory, house.provider.base_url)
        stage = Stage(house, effects, directory, env)
        try:
            yield stage
        finally:
            await stage.close()


async def broken(worker: WorkerProcess, fault: Fault, mark: Path) -> None:
    """Wait until the fault has happened, and has stopped the worker when it is meant to."""
    await exists(mark)
    if fault.deed == "kill":
        assert await worker.ended() == -signal.SIGKILL
    elif fault.deed == "stop":
        while not await asyncio.to_thread(_stands, worker.process.pid):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.02)


def _stands(pid: int) -> bool:
    command = ["ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("T")
