"""The other processes of a benchmark: the provider, metered workers, readers, the plain HTTP reader."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 200.0
"""Seconds that a line is waited for."""
_MARK = "bench: "


def report(value: Any) -> None:
    """Say one value to the process that started this one."""
    sys.stdout.write(f"{_MARK}{json.dumps(value)}\n")
    sys.stdout.flush()


class Child:
    """A running process. Of what it prints, the lines of `report` are read; the last others are kept for an error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._values: asyncio.Queue[Any] = asyncio.Queue()
        self.last: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            if text.startswith(_MARK):
                self._values.put_nowait(json.loads(text.removeprefix(_MARK)))
            else:
                self.last = [*self.last[-20:], text]
        self._values.put_nowait(None)

    async def next(self, patience: float = PATIENCE) -> Any:
        """Give the next value that the process says. Raises RuntimeError when it has ended, or is silent."""
        try:
            value = await asyncio.wait_for(self._values.get(), patience)
        except TimeoutError:
            raise RuntimeError(self._said(f"said nothing for {patience:g} seconds")) from None
        if value is None:
            raise RuntimeError(self._said("ended"))
        return value

    def _said(self, what: str) -> str:
        return "\n".join([f"a process of the benchmark {what}; its last lines:", *self.last])

    def check(self) -> None:
        """Raise RuntimeError when the process has ended."""
        if self.process.returncode is not None:
            raise RuntimeError(self._said("ended"))

    async def tell(self, value: Any) -> None:
        """Write one value to the process's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        await self.process.stdin.drain()

    async def end(self) -> None:
        """Stop the process, gently at first."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), 15)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()
        await self._reading


@asynccontextmanager
async def child(module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    """Run a module of this folder as a process for as long as the body runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"bench.{module}",
        *arguments,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**24,
    )
    running = Child(process)
    try:
        yield running
    finally:
        await running.end()
