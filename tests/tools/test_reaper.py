"""The reaper: commands end when their worker dies or stops, and never start without protection."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.domain.errors import UnavailableError
from fencepost.tools import processes
from fencepost.tools import reaper as reaper_process
from fencepost.tools.processes import Reaper, ShellRunner
from tests.tools.conftest import Workspace, alive, pids_in, text_of, wait_until

COMMAND = (
    "trap '' TERM; setsid sh -c 'echo $$ >> pids; exec sleep 300' & "
    "(echo x; exec sleep 300) & echo $! >> pids; echo $$ >> pids; wait"
)


@contextmanager
def _worker(directory: Path, silence: float) -> Iterator[tuple[subprocess.Popen[str], list[int], int]]:
    """Run a worker until its command runs; give it, the command's processes, and the reaper's process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.worker_script", str(directory), COMMAND, str(silence)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        reaper = int(process.stdout.readline())
        pids = wait_until(lambda: pids_in(directory / "pids", 3))
        assert all(alive(pid) for pid in pids)
        yield process, pids, reaper
    finally:
        process.kill()
        process.communicate()


def test_the_commands_of_a_killed_worker_are_killed(tmp_path: Path) -> None:
    with _worker(tmp_path, silence=60) as (process, pids, reaper):
        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), 5)
        wait_until(lambda: not alive(reaper), 5)


def test_the_commands_of_a_stopped_worker_are_killed_after_its_silence(tmp_path: Path) -> None:
    with _worker(tmp_path, silence=1) as (process, pids, reaper):
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not any(alive(pid) for pid in pids), 8)
        wait_until(lambda: not alive(reaper), 5)


def test_signals_of_the_terminal_or_the_service_do_not_end_the_reaper(tmp_path: Path) -> None:
    with _worker(tmp_path, silence=60) as (process, pids, reaper):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(reaper, number)
        assert os.getsid(reaper) == reaper
        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), 5)


async def test_a_reaper_that_was_killed_is_replaced_and_protects_what_runs(workspace: Workspace) -> None:
    reaper = Reaper(silence=60, beat=0.05)
    runner = ShellRunner(reaper)
    await runner.start()
    workspace.runner = runner
    task = asyncio.create_task(workspace.call("bash", command="echo $$ > pids; trap '' TERM; sleep 300; sleep 300"))
    (pid,) = await asyncio.to_thread(wait_until, lambda: pids_in(workspace.root / "pids", 1))
    first = reaper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: reaper.pid != first)
    assert text_of(await workspace.call("bash", command="echo again")) == "again\n"
    await runner.close()
    await asyncio.to_thread(wait_until, lambda: not alive(pid))
    assert "[ended by signal 9]" in text_of(await task)


async def test_a_command_is_not_started_for_a_worker_that_lost_its_reaper(tmp_path: Path) -> None:
    class _Late(Reaper):
        """A worker that was stopped between the start of a process and its protection: the reaper is gone."""

        async def register(self, process: asyncio.subprocess.Process, group: int, marker: str) -> None:
            process.kill()
            await process.wait()
            await super().register(process, group, marker)

    runner = ShellRunner(_Late(beat=60))
    await runner.start()
    with pytest.raises(UnavailableError):
        await runner.run(["/bin/sh", "-c", "touch ran"], directory=str(tmp_path), timeout=10, effect_key="k")
    await runner.close()
    assert not (tmp_path / "ran").exists()


async def test_nothing_runs_without_a_started_reaper(tmp_path: Path) -> None:
    runner = ShellRunner(Reaper())
    with pytest.raises(UnavailableError, match="start it"):
        await runner.run(["/bin/true"], directory=str(tmp_path), timeout=10, effect_key="k")


def test_a_gate_that_never_opens_starts_nothing(tmp_path: Path) -> None:
    gated = subprocess.run(
        ["/bin/sh", "-c", processes._GATE, "sh", "touch", str(tmp_path / "ran")], input=b"", check=False
    )
    assert gated.returncode != 0
    assert not (tmp_path / "ran").exists()


def test_the_reaper_is_light() -> None:
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, fencepost.tools.reaper; print('pydantic' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert modules == "False\n"
    assert reaper_process.find_processes(os.getpgid(0) + 10_000_000, "no-such-marker") == []
