"""The command on the servers that all tests share, and on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Command


@pytest.fixture
def fencepost(stack_home: Path, postgres_url: str, temporal_address: str, tmp_path: Path) -> Command:
    """The command in local mode, its servers being those that run for all tests."""
    return Command(stack_home, tmp_path, {})


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
