"""`make bench`: start everything on this machine, measure, print a table and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.turns import Bench, measure
from fencepost.config import Settings
from fencepost.domain.inbox import Location
from fencepost.local import LocalStack
from fencepost.process import leave
from fencepost.services import open_services
from fencepost.store import migrate
from fencepost.telemetry import configure_logging


def say(line: str) -> None:
    """Show progress where it does not mix with the result."""
    print(line, file=sys.stderr, flush=True)


@asynccontextmanager
async def scripted_provider() -> AsyncIterator[str]:
    """Run the scripted provider in a process of its own, so that its time is not the worker's. Gives its address."""
    command = [sys.executable, "-m", "fencepost.providers.scripted", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"the scripted provider did not start: {line!r}")
        yield found[0]
    finally:
        process.terminate()
        await process.wait()


def settings_for(stack: LocalStack, base_url: str, folder: Path) -> Settings:
    """Give settings for the benchmark's worker."""
    return Settings(
        database_url=stack.database_url,
        task_queue="fencepost-bench",
        default_model="scripted/bench",
        providers={"scripted": {"base_url": base_url}},
        workspace={"directory": folder},
    )


async def run(turns: int, sessions: int, home: Path) -> dict[str, Any]:
    """Start the servers, measure, stop the servers."""
    project = home / "project"
    project.mkdir()
    (project / "note.txt").write_text("heron\n")
    async with LocalStack(home, temporal_port=0, ui_port=0, progress=say) as stack, scripted_provider() as base_url:
        await migrate.upgrade(stack.database_url)
        environ = {**os.environ, "TEMPORAL_ADDRESS": stack.temporal_address}
        async with open_services(settings_for(stack, base_url, project), environ=environ) as services:
            bench = Bench(services.temporal, services, Location(directory=str(project)))
            return await measure(bench, turns=turns, sessions=sessions, say=say)


def table(result: dict[str, Any]) -> str:
    """Give the figures for people."""
    turn, rate = result["turn_ms"], result["turns_per_s"]
    crowd = f"{result['sessions']} sessions at once, turns/s"
    lines = [
        f"{'a turn: two steps, one tool call':38}{'floor':>10}{'fencepost':>12}{'ratio':>8}",
        f"{'one session, median ms a turn':38}{turn['floor']:10.1f}{turn['fencepost']:12.1f}{turn['ratio']:8.2f}",
        f"{crowd:38}{rate['floor']:10.1f}{rate['fencepost']:12.1f}{rate['ratio']:8.2f}",
    ]
    for stored in result["history"]:
        what = f"history of a turn at {stored['messages']} messages"
        lines.append(f"{what:38}{stored['events']:>10} events {stored['bytes']:>8} bytes")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmarks. Gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--turns", type=int, default=40, help="turns of the one session")
    parser.add_argument("--sessions", type=int, default=50, help="sessions at once")
    given = parser.parse_args()
    configure_logging("error", "json")
    home = Path(tempfile.mkdtemp(prefix="fencepost-bench-", dir="/tmp"))
    home.chmod(0o711)
    try:
        result = asyncio.run(run(given.turns, given.sessions, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(table(result))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    leave(main())
