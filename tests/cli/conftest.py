"""The command on servers that all these tests share, and on its own."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command import Command, Ended, read_until
from tests.cli.nursery import Nursery


@pytest.fixture(scope="session")
def scripted_url() -> Iterator[str]:
    """The scripted provider as a process of its own."""
    line = [sys.executable, "-m", "fencepost.providers.scripted", "--until-stdin-ends"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield read_until(process.stdout, "http").split()[-1]
        process.terminate()


@pytest.fixture(scope="session")
def development(
    stack_home: Path,
    postgres_url: str,
    temporal_address: str,
    scripted_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Command]:
    """The command beside a `fencepost dev` with the same settings, whose default model is the scripted one."""
    config = tmp_path_factory.mktemp("config") / "fencepost.toml"
    config.write_text(
        f'default_model = "scripted/test"\n[providers.scripted]\nbase_url = "{scripted_url}"\n'
        "[limits]\nheartbeat_timeout_seconds = 2\nheartbeat_seconds = 0.5\nworkspace_wait_seconds = 1\n"
    )
    command = Command(stack_home, config.parent, {"FENCEPOST_CONFIG": str(config)})
    with command.started("dev") as process:
        read_until(process.stdout, "export FENCEPOST_DATABASE_URL")
        yield command


@pytest.fixture
def beside(development: Command, tmp_path: Path) -> Command:
    """The command in a directory of this test's own, sharing servers and worker with `fencepost dev`."""
    return Command(development.home, tmp_path, development.variables)


@pytest.fixture
def alone(home: Path, tmp_path: Path) -> Command:
    """The command with a home of its own where nothing runs."""
    return Command(home, tmp_path, {})


@pytest.fixture
def connected(home: Path, database_url: str, temporal_address: str, task_queue: str, tmp_path: Path) -> Command:
    """The command with both services configured, on a task queue that nobody serves."""
    variables = {
        "FENCEPOST_DATABASE_URL": database_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "FENCEPOST_TASK_QUEUE": task_queue,
    }
    return Command(home, tmp_path, variables)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where commands come from that have nothing to do with how a process starts."""
    process = Nursery()
    yield process
    process.close()


@pytest.fixture
def quick(nursery: Nursery, connected: Command) -> Callable[..., Ended]:
    """The command with both services configured and no worker, quickly."""
    return functools.partial(nursery, connected)
