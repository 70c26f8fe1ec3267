"""Who uses the local stack: a small file beside it, changed only under an exclusive lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local.processes import arguments_of, start_mark

_WAIT_SECONDS: Final = 120
_PATIENCE_SECONDS: Final = 1
_POLL_SECONDS: Final = 0.05


class Holder(BaseModel):
    """One user of the stack. It counts while its process, known by pid and start, is alive."""

    model_config = ConfigDict(frozen=True)

    token: str
    pid: int
    started: str

    def is_alive(self) -> bool:
        return start_mark(self.pid) == self.started

    def command(self) -> str:
        """Give the command line of the process, as somebody would type it; empty when it is gone."""
        program, *arguments = arguments_of(self.pid) or [""]
        if Path(program).name.startswith("python") and arguments:
            program, *arguments = arguments[1:] if arguments[0] == "-m" else arguments
        program = "fencepost" if program == "fencepost.cli" else Path(program).name
        return " ".join((program, *arguments))


class StackState(BaseModel):
    """What is remembered between starts. Ports are kept so that addresses stay the same."""

    model_config = ConfigDict(frozen=True)

    holders: tuple[Holder, ...] = ()
    temporal_port: int | None = None
    ui_port: int | None = None

    def pruned(self) -> StackState:
        """Leave out the holders that are gone without saying so."""
        return self.model_copy(update={"holders": tuple(one for one in self.holders if one.is_alive())})


class StateFile:
    """The state of the stack in one home directory."""

    def __init__(self, home: Path) -> None:
        self._file = home / "stack.json"
        self._lock = home / "stack.lock"

    @contextlib.contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock. `waiting` is called once when that takes more than a moment.

        Raises UnavailableError after two minutes, and ConfigurationError where no file can be made. The kernel frees
        the lock of a process that dies.
        """
        try:
            handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"{self._lock}: cannot be opened ({error.strerror}): set FENCEPOST_HOME to a directory of yours"
            ) from None
        try:
            begun, told = time.monotonic(), False
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - begun
                if waited > _WAIT_SECONDS:
                    raise UnavailableError(f"{self._lock}: another fencepost has held this lock for {waited:.0f} s")
                if waited > _PATIENCE_SECONDS and not told:
                    told = True
                    waiting()
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(handle)

    def read(self) -> StackState:
        """Give the state without holders that are gone. A file that cannot be read counts as none."""
        try:
            return StackState.model_validate_json(self._file.read_bytes()).pruned()
        except (OSError, ValidationError):
            return StackState()

    def write(self, state: StackState) -> None:
        """Replace the state in one step, so that a crash leaves the old one or the new one."""
        new = self._file.with_suffix(".new")
        new.write_text(state.model_dump_json(indent=1))
        new.chmod(0o600)
        new.replace(self._file)
