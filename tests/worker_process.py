"""Workers as processes of their own, to be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.house_kit import MODEL

ROOT = Path(__file__).parents[1]


class WorkerProcess:
    """One running worker; its output is kept for the test's report."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
            if "worker ready" in self.lines[-1]:
                self._ready.set()
        self._ready.set()

    async def ready(self) -> None:
        """Wait until it polls; fails when it ended instead."""
        await self._ready.wait()
        assert self.process.returncode is None, "\n".join(self.lines)
        assert any("worker ready" in line for line in self.lines), "\n".join(self.lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end and give its exit code."""
        code = await self.process.wait()
        await self._reader
        return code


@asynccontextmanager
async def worker_process(environment: dict[str, str], module: str = "worker") -> AsyncIterator[WorkerProcess]:
    """Start a worker, or a module that acts as one, and kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    worker = WorkerProcess(process)
    try:
        await worker.ready()
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
        await worker.ended()


def environment(
    config: Path, database_url: str, temporal_address: str, task_queue: str, directory: Path, base_url: str
) -> dict[str, str]:
    """Write a configuration file and give the environment of a worker that serves it."""
    settings = {
        "default_model": MODEL,
        "task_queue": task_queue,
        "providers": {"scripted": {"base_url": base_url}},
        "workspace": {"directory": str(directory)},
        "tool_output": {"directory": str(config.parent / "tool-output")},
        "limits": {"heartbeat_timeout_seconds": 2, "heartbeat_seconds": 0.5, "drain_grace_seconds": 5},
    }
    config.write_text(_toml(settings))
    return {
        "PATH": os.environ["PATH"],
        "FENCEPOST_CONFIG": str(config),
        "FENCEPOST_DATABASE_URL": database_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "PYTHONPATH": str(ROOT),
    }


async def exists(path: Path) -> None:
    """Wait until a file is there, made by another process."""
    while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - a file tells nobody that it is there
        await asyncio.sleep(0.02)


def _toml(settings: Mapping[str, object], prefix: str = "") -> str:
    """Write nested tables of plain values, whose JSON spelling is TOML's as well."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    nested = []
    for key, value in settings.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            nested.append(f"[{name}]\n{_toml(value, name + '.')}")
    return "\n".join([*plain, *nested])
