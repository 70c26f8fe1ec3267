"""The servers, workers and client of a chaos run, in one directory of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from fencepost.client import Client, open_client
from fencepost.domain.inbox import Location
from fencepost.local import LocalStack
from fencepost.local.postgres import PostgresServer
from fencepost.local.temporal import TemporalServer
from fencepost.providers.scripted import ScriptedProvider
from fencepost.store import migrate
from tests.cable import Cable, cable_to_postgresql, cable_to_temporal
from tests.chaos.model import Model
from tests.faulty_worker import PROBES, SIDES, Deed, Fault
from tests.house_kit import house_settings
from tests.worker_process import ROOT, environment

QUEUE = "chaos"

_FAULTY = 0.6
"""How many of the workers have a fault of their own."""
_LATEST = 12
"""At which pass of its probe it happens at the latest."""


def say(line: str) -> None:
    """Show progress where it does not mix with the result."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass
class Worker:
    """One place for a worker, and its cables: whatever happens to its process, there will be another one."""

    environ: dict[str, str]
    cables: list[tuple[str, Cable]]
    process: asyncio.subprocess.Process
    busy: bool = False


@dataclass
class Arena:
    """What the players and the faults of a run share."""

    seed: int
    home: Path
    client: Client
    model: Model
    location: Location
    workers: list[Worker] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _processes: Iterator[int] = field(default_factory=count)

    def chance(self, *what: object) -> random.Random:
        """Give choices that follow from the seed and from what they are for."""
        return random.Random(":".join(map(str, (self.seed, *what))))

    def fault(self, kind: str, about: str = "") -> None:
        """Note a fault that is done now."""
        self.faults.append(kind)
        if os.environ.get("CHAOS_LOG"):
            say(f"{asyncio.get_running_loop().time():.2f} {kind} {about}")

    async def new_process(self, environ: dict[str, str]) -> asyncio.subprocess.Process:
        """Start a worker's process; its log goes to a file. Most of them die or err by themselves, at a probe."""
        chance = self.chance("process", next(self._processes))
        module = "worker"
        if chance.random() < _FAULTY:
            module = "tests.faulty_worker"
            deed: Deed = chance.choice(("kill", "error"))
            fault = Fault(chance.choice(PROBES), chance.choice(SIDES), deed, chance.randint(1, _LATEST))
            mark = self.home / "marks" / f"{chance.random()}"
            environ = environ | Fault(fault.probe, fault.side, fault.deed, fault.nth, str(mark)).to_environment()
        with (self.home / "workers.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module), cwd=ROOT, env=environ, stderr=log, start_new_session=True
            )

    def note_probes(self) -> None:
        """Count the faults that workers have done by themselves."""
        self.faults += ["at a probe" for _ in (self.home / "marks").iterdir()]

    async def restart_postgresql(self, *, crash: bool) -> None:
        """Stop PostgreSQL, by a crash or in good order, and start it again."""
        server = PostgresServer(self.home)
        pid = server.pid()
        if crash and pid is not None:
            os.kill(pid, signal.SIGQUIT)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start, fast=False)

    async def restart_temporal(self) -> None:
        """Stop Temporal, and start it again on its ports."""
        server = TemporalServer(self.home)
        seen = server.seen()
        assert seen is not None, "Temporal runs"
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start, seen[1], seen[2])


@asynccontextmanager
async def open_arena(seed: int, home: Path, workers: int) -> AsyncIterator[Arena]:
    """Start everything, and end it."""
    project, effects = home / "project", home / "effects"
    for folder in (project, effects, home / "marks"):
        folder.mkdir()
    model = Model(seed, effects)
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(LocalStack(home, temporal_port=0, ui_port=0, progress=say))
        await migrate.upgrade(servers.database_url)
        provider = await stack.enter_async_context(ScriptedProvider(model))
        url = provider.base_url
        environ = environment(
            home / "fencepost.toml", servers.database_url, servers.temporal_address, QUEUE, project, url
        )
        settings = house_settings(servers.database_url, QUEUE, project, url)
        client = await stack.enter_async_context(open_client(settings, environ))
        arena = Arena(seed, home, client, model, Location(directory=str(project)))
        try:
            for _ in range(workers):
                database, database_url = await stack.enter_async_context(cable_to_postgresql(servers.database_url))
                temporal, address = await stack.enter_async_context(cable_to_temporal(servers.temporal_address))
                near = environ | {"FENCEPOST_DATABASE_URL": database_url, "TEMPORAL_ADDRESS": address}
                process = await arena.new_process(near)
                arena.workers.append(Worker(near, [("PostgreSQL", database), ("Temporal", temporal)], process))
            yield arena
        finally:
            for worker in arena.workers:
                if worker.process.returncode is None:
                    worker.process.kill()
                await worker.process.wait()
