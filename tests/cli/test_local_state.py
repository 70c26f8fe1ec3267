"""`fencepost local`, and what `fencepost dev` says about others: seen, stopped by hand, deleted."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.cli.workers import sweep_workers
from fencepost.local import sweep
from tests.cli.command import Command, ended, left_behind, read_until
from tests.cli.nursery import Nursery

_FILES = ("postgres/data/PG_VERSION", "temporal.db", "temporal.log", "workers/q/worker.log", "demo/a/b", "mine.txt")


def _fill(home: Path, *more: str) -> None:
    for name in (*_FILES, *more):
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x" * 5000)


def _names(home: Path) -> set[str]:
    return {file.name for file in home.iterdir()}


@pytest.mark.timeout(120)
def test_two_share_one_stack_which_is_stopped_only_by_force(nursery: Nursery, alone: Command) -> None:
    """Each says what it does otherwise than usual, and both are named to whoever wants to stop the stack."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # of last time, as it seems
        (alone.home / "stack.json").write_text(json.dumps({"temporal_port": port}))
        with alone.started("dev") as first:
            said = read_until(first.stderr, "the worker is ready")
            with alone.started("dev", "--port", "1") as second:
                joined = read_until(second.stderr, "worker ready")
                status, human = nursery(alone, "local", "status", "--json"), nursery(alone, "local", "status")
                stop, reset = nursery(alone, "local", "stop"), nursery(alone, "local", "reset", "--yes")
                forced = nursery(alone, "local", "stop", "--force")
                ends = [ended(first), ended(second)]

    (found,) = status.objects()
    address = found["temporal"]["address"]
    assert f"in use by another program: Temporal takes {address.rpartition(':')[2]}" in said
    assert address != f"127.0.0.1:{port}"
    assert "port 1 is not taken: Temporal runs already" in joined
    assert f"joined the local stack that is used already by fencepost dev (process {first.pid})" in joined
    assert [holder["command"] for holder in found["holders"]] == ["fencepost dev", "fencepost dev --port 1"]
    assert found["workers"][0]["holders"] == [first.pid, second.pid]
    assert found["postgresql"]["answers"]
    assert found["size"] > 10_000_000
    for words in (address, found["temporal"]["ui"], found["postgresql"]["address"], str(alone.home), "fencepost dev"):
        assert words in human.out
    assert (stop.code, reset.code) == (1, 1)
    for refused in (stop, reset):
        assert f"in use by fencepost dev (process {first.pid}), fencepost dev --port 1" in refused.complaint()
    assert "`fencepost local stop --force`" in reset.complaint()
    assert (forced.code, forced.out) == (0, "stopped; the state stays\n")
    assert [each.code for each in ends] == [0, 0]
    assert left_behind(alone.home) == []


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Command]:
    """The command with a home whose servers no other test run ends, though nobody uses them."""
    home = Path(tempfile.mkdtemp(prefix="fencepost-apart-", dir="/tmp"))
    home.chmod(0o711 if os.geteuid() == 0 else 0o700)
    yield Command(home, tmp_path, {})
    sweep_workers(home, 0.5)
    sweep(home)
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.timeout(120)
def test_what_a_killed_command_has_left_is_stopped_and_deleted(nursery: Nursery, apart: Command) -> None:
    """Servers and worker live on without it; `doctor` says so, and `stop` ends them."""
    with apart.started("dev") as process:
        said = read_until(process.stderr, "the worker is ready")
        process.kill()
        process.wait()
    left = left_behind(apart.home)
    doctor, status = nursery(apart, "doctor", "--json"), nursery(apart, "local", "status")
    reset, stop = nursery(apart, "local", "reset", "--yes"), nursery(apart, "local", "stop")
    after = left_behind(apart.home)
    deleted = nursery(apart, "local", "reset", "--yes")

    assert "starting PostgreSQL" in said
    assert len(left) >= 3  # two servers, a worker
    (state,) = [each for each in json.loads(doctor.out)["checks"] if each["name"] == "local state"]
    assert state["status"] == "warning"
    assert "PostgreSQL (process " in state["detail"]
    assert "a worker (process " in state["detail"]
    assert state["mend"] == "run `fencepost local stop`"
    assert "used by: nobody; `fencepost local stop` ends what was left" in status.out
    assert reset.code == 1
    assert "the local stack runs, though nobody uses it: stop it first" in reset.complaint()
    assert (stop.code, stop.out) == (0, "stopped; the state stays\n")
    assert after == []
    assert deleted.code == 0
    assert _names(apart.home) == {"stack.lock"}


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_deleting_is_agreed_to(alone: Command, answer: str, code: int) -> None:
    """At a terminal the command asks. What is not fencepost's stays."""
    _fill(alone.home)
    above, below = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fencepost.cli", "local", "reset"],
        env=alone.environ(),
        stdin=below,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(above, f"{answer}\n".encode())
        out, err = process.communicate(timeout=50)
    os.close(above)
    os.close(below)

    assert f"Delete all local sessions in {alone.home}" in err
    assert process.returncode == code
    assert out.startswith("deleted") == (code == 0)
    everything = {*(name.split("/")[0] for name in _FILES)}
    assert _names(alone.home) - {"stack.lock"} == ({"mine.txt"} if code == 0 else everything)


def test_without_anybody_to_ask_there_is_an_option(nursery: Nursery, alone: Command) -> None:
    """Scripts say --yes, or nothing happens. Nor is there anything to stop."""
    _fill(alone.home)
    unasked, stop = nursery(alone, "local", "reset"), nursery(alone, "local", "stop")

    assert unasked.code == 2
    assert "add --yes" in unasked.complaint()
    assert (stop.code, stop.out) == (0, "nothing was running\n")
    assert (alone.home / "temporal.db").exists()


def test_ctrl_c_is_no_answer(alone: Command) -> None:
    """Nothing is deleted, and the exit code says why."""
    _fill(alone.home)
    above, below = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fencepost.cli", "local", "reset"],
        env=alone.environ(),
        stdin=below,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.read(6) == b"Delete"
        process.send_signal(signal.SIGINT)
        assert process.wait(50) == 130
    os.close(above)
    os.close(below)

    assert (alone.home / "postgres/data/PG_VERSION").exists()


def test_tool_output_stays_beside_configured_services(nursery: Nursery, alone: Command) -> None:
    """Workers on this machine keep there what belongs to sessions elsewhere."""
    _fill(alone.home, "tool-output/tool_1")
    services = {"FENCEPOST_DATABASE_URL": "postgresql://h/d", "TEMPORAL_ADDRESS": "127.0.0.1:9"}

    assert nursery(alone.given(**services), "local", "reset", "--yes").code == 0
    assert _names(alone.home) == {"mine.txt", "stack.lock", "tool-output"}
    assert nursery(alone, "local", "reset", "--yes").code == 0
    assert _names(alone.home) == {"mine.txt", "stack.lock"}


def test_a_home_that_cannot_be_made_is_one_line(alone: Command, tmp_path: Path) -> None:
    """Whatever is started there."""
    (tmp_path / "file").touch()
    done = alone.given(FENCEPOST_HOME=str(tmp_path / "file" / "inner"))("dev")

    assert done.code == 2
    assert "set FENCEPOST_HOME to a directory of yours" in done.complaint()
