"""The local stack seen from outside: what runs, who uses it, what it takes; and how it is ended and removed by hand."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fencepost.domain.errors import ConfigurationError
from fencepost.local import processes, temporal
from fencepost.local.postgres import PostgresServer
from fencepost.local.state import Holder, StateFile

OUTPUTS: Final = "tool-output"
_OURS: Final = (
    *("demo", "postgres", "stack.json", "stack.new", "temporal.log", OUTPUTS, "workers"),
    *("temporal.db", "temporal.db-journal", "temporal.db-shm", "temporal.db-wal"),
)
_PATTERNS: Final = ("postgres-programs-*",)
_LEAVE_SECONDS: Final = 45.0
"""What a command may take to hand over its work and to stop what it started."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server of the stack that runs. `address` is for its clients, `ui_url` for people; `answers` says whether it
    takes connections."""

    pid: int
    address: str
    answers: bool
    ui_url: str | None = None


@dataclass(frozen=True, slots=True)
class StackStatus:
    """What there is of the stack in one home directory."""

    home: Path
    postgresql: Server | None
    temporal: Server | None
    holders: tuple[Holder, ...]

    @property
    def runs(self) -> bool:
        """Whether any server runs."""
        return self.postgresql is not None or self.temporal is not None


def look(home: Path) -> StackStatus:
    """Look, without waiting for anybody and without changing anything."""
    postgres, pid, seen = PostgresServer(home), PostgresServer(home).pid(), temporal.TemporalServer(home).seen()
    database = Server(pid, postgres.url, postgres.is_ready()) if pid is not None else None
    server = None
    if seen is not None:
        number, port, ui_port = seen
        address = f"{temporal.HOST}:{port}"
        server = Server(number, address, temporal.answers(port), f"http://{temporal.HOST}:{ui_port}")
    return StackStatus(home, database, server, StateFile(home).read().holders)


def disk_use(folder: Path) -> int:
    """Give the bytes that a directory takes on its disk, as far as it may be looked into."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118 - thousands of files
            except OSError:
                continue  # removed meanwhile
    return total


def end_holders(holders: Sequence[Holder], seconds: float = _LEAVE_SECONDS) -> None:
    """End the commands that use the stack, which stop what they started; those that are still there after so many
    seconds are killed."""
    for holder in holders:
        processes.end(holder.pid, ((signal.SIGTERM, 0.0),))

    def gone() -> bool:
        return not any(holder.is_alive() for holder in holders)

    if not processes.wait_until(gone, seconds):
        for holder in holders:
            if holder.is_alive():
                processes.end(holder.pid, ((signal.SIGKILL, 5.0),))


def remove(home: Path, *, outputs: bool) -> bool:
    """Delete the state in a home: what fencepost has put there, and nothing else. Say whether it did: not while a
    server runs or a command uses it.

    The directory stays, and the lock in it, since somebody may wait for that. `outputs` says whether tool output that
    is kept there goes too. Raises ConfigurationError when something cannot be deleted.
    """
    if not home.is_dir():
        return True
    with StateFile(home).locked(lambda: None):
        status = look(home)
        if status.runs or status.holders:
            return False
        found = [home / name for name in _OURS if outputs or name != OUTPUTS]
        for path in (*found, *(each for pattern in _PATTERNS for each in home.glob(pattern))):
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise ConfigurationError(f"{path}: cannot be deleted ({error.strerror}): delete it yourself") from None
    return True
