"""What every measurement uses: the servers of this machine, the provider's process, a client of sessions."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.worker import Worker

from bench.children import Child, child
from fencepost.client import Client, open_client
from fencepost.config import Settings
from fencepost.domain.contracts import SESSION_TURN
from fencepost.domain.inbox import Location
from fencepost.local import LocalStack
from fencepost.services import open_services
from fencepost.serving import spare_collector
from fencepost.store import migrate
from fencepost.store.sessions import NewSession
from worker import build_workers

TOOL_STEP = 'tool: read {"path": "note.txt"}\nthen:\n'
ANSWER = "say: The note says heron."
TURN_SECONDS = 300


def say(line: str) -> None:
    """Show progress where it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


def fresh_queue(what: str) -> str:
    """Give a task queue that nobody has used."""
    return f"{what}-{secrets.token_hex(4)}"


async def together(work: Iterable[Coroutine[object, object, None]]) -> None:
    """Do all of it at the same time; when one fails the others are stopped."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far: seconds of CPU in all its threads, and the most memory it had, in bytes."""

    cpu: float
    memory: int


@dataclass(frozen=True, slots=True)
class MeteredWorker:
    """A worker in a process of its own, which says what it uses."""

    process: Child
    queue: str

    async def usage(self) -> Usage:
        """Give what the worker has used up to now."""
        self.process.process.send_signal(signal.SIGUSR1)
        return Usage(**await self.process.next())


@dataclass(frozen=True)
class House:
    """The running servers. `environ` is what a process needs to find them, `location` where sessions work."""

    client: Client
    settings: Settings
    environ: dict[str, str]
    base_url: str
    location: Location

    async def session(self) -> str:
        """Create a session and give its id."""
        return (await self.client.create(NewSession(self.location))).id

    async def sessions(self, count: int) -> list[str]:
        """Create so many sessions and give their ids."""
        return [await self.session() for _ in range(count)]

    async def turn(self, session_id: str, prompt: str, queue: str) -> None:
        """Run one turn of a session as a plain Temporal client does. Raises RuntimeError when it does not end well."""
        given = {"session": {"location": self.location.to_wire()}, "prompt": {"text": prompt}}
        running = self.client.temporal.execute_workflow(
            SESSION_TURN, given, id=session_id, task_queue=queue, result_type=dict
        )
        result = await asyncio.wait_for(running, TURN_SECONDS)
        if result["outcome"] != "done":
            raise RuntimeError(f"a turn of the benchmark ended as {result}")

    @asynccontextmanager
    async def serving(self, others: Sequence[Worker] = ()) -> AsyncIterator[str]:
        """Run a worker of the product, and others, in this process. Gives the product's task queue."""
        settings = self.settings.model_copy(update={"task_queue": fresh_queue("product")})
        async with open_services(settings, environ={**os.environ, **self.environ}) as services:
            workers = [*others, *build_workers(services)]
            spare_collector()  # as a worker's process does
            running = [asyncio.create_task(worker.run()) for worker in workers]
            try:
                yield settings.task_queue
            finally:
                await asyncio.gather(*(worker.shutdown() for worker in workers))
                await asyncio.gather(*running)

    @asynccontextmanager
    async def metered(self) -> AsyncIterator[MeteredWorker]:
        """Run a worker in a process of its own, on a task queue of its own."""
        queue = fresh_queue("metered")
        async with child("metered", environ={**self.environ, "FENCEPOST_TASK_QUEUE": queue}) as process:
            while not await self.client.is_served(queue):
                process.check()
                await asyncio.sleep(0.1)
            try:
                yield MeteredWorker(process, queue)
            except Exception:
                say("\n".join(["the worker's last lines:", *process.last]))
                raise

    @asynccontextmanager
    async def reading(self, session_ids: Sequence[str], turns: int) -> AsyncIterator[Child]:
        """Run a process that follows these sessions for so many turns each; it follows when the body begins."""
        async with child("readers", environ=self.environ) as process:
            await process.tell({"sessions": session_ids, "turns": turns})
            await process.next()
            yield process


@asynccontextmanager
async def open_house(home: Path) -> AsyncIterator[House]:
    """Start the servers and the provider in this directory, and end them."""
    project = home / "project"
    project.mkdir()
    (project / "note.txt").write_text("heron\n")
    (home / "fencepost.toml").touch()
    async with LocalStack(home, temporal_port=0, ui_port=0, progress=say) as stack, child("provider") as provider:
        base_url = await provider.next()
        await migrate.upgrade(stack.database_url)
        environ = {
            "FENCEPOST_CONFIG": str(home / "fencepost.toml"),
            "FENCEPOST_HOME": str(home),
            "FENCEPOST_DATABASE_URL": stack.database_url,
            "FENCEPOST_DEFAULT_MODEL": "scripted/bench",
            "FENCEPOST_PROVIDERS__SCRIPTED__BASE_URL": base_url,
            "TEMPORAL_ADDRESS": stack.temporal_address,
        }
        settings = Settings(
            database_url=stack.database_url,
            default_model="scripted/bench",
            providers={"scripted": {"base_url": base_url}},
            workspace={"directory": project},
            tool_output={"directory": home / "tool-output"},
        )
        async with open_client(settings, {**os.environ, **environ}) as client:
            yield House(client, settings, environ, base_url, Location(directory=str(project)))
