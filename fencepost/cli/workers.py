"""The worker process of local mode: one for all commands that run with the same settings, ended by the last of them.

A worker that drains hands its sessions over, which their users would see; so no command ends a worker that another
one still uses. Commands with other settings get a worker on a task queue of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from fencepost.cli.choice import SCRIPTED, Choice, with_provider
from fencepost.config import Settings
from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local import processes
from fencepost.local.state import Holder, StateFile

READY: Final = "worker ready"
Others: TypeAlias = Literal["avoid", "share", "refuse"]
"""What to do about a worker with other settings on the queue that is asked for: take another queue, use that worker,
or give up."""

_START_SECONDS: Final = 60
_WATCH_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 1.0
_ELSEWHERE: Final = ("home", "database_url", "mixed", "task_queue", "log_level", "log_format")


def fingerprint(settings: Settings, environ: Mapping[str, str]) -> str:
    """Give a text that is the same for settings and keys with which a worker does the same."""
    keys = sorted({each.api_key_env for each in settings.providers.values() if each.api_key_env})
    wanted = {"settings": settings.model_dump(mode="json", exclude=set(_ELSEWHERE))}
    wanted["keys"] = {name: environ.get(name) for name in keys}
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


class _Process(BaseModel):
    """The worker that was started last for a queue, and where the scripted provider is that it was given."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str
    fingerprint: str
    scripted: str | None = None

    def is_alive(self) -> bool:
        return processes.start_mark(self.pid) == self.started


class SharedWorker:
    """A command's share in a worker process. Its methods block: call them in a thread.

    `private` says that no other command will ever have these settings. `scripted` is the address of a scripted provider
    that a worker which is started here is to know besides its settings.
    """

    def __init__(
        self,
        home: Path,
        queue: str,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        others: Others,
        private: bool = False,
        scripted: str | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.queue = queue
        self._home = home
        self._settings = settings
        self._environ = environ
        self._fingerprint = fingerprint(settings, environ)
        self._grace = settings.limits.drain_grace_seconds
        self._others = others
        self._private = private
        self._scripted = scripted
        self._is_scripted_beside = False
        self.apart: str | None = None
        """What the worker on the queue that was asked for is like, when it is not this one."""
        self._say = say
        self._token: str | None = None

    @property
    def log(self) -> Path:
        """The file that the worker writes its log to."""
        return self._folder / "worker.log"

    @property
    def _folder(self) -> Path:
        plain = re.fullmatch(r"[A-Za-z0-9_-]{1,80}", self.queue)
        return self._home / "workers" / (self.queue if plain else hashlib.sha256(self.queue.encode()).hexdigest()[:16])

    def join(self) -> None:
        """Become a user of the worker, starting it if it does not run. Raises UnavailableError when it does not start.

        Raises ConfigurationError when one with other settings is there and that is not wanted.
        """
        if not self._try_join():
            self.queue = f"{self.queue}-{self._fingerprint}"
            self._others = "share"
            lacks_scripted = self._private and not self._is_scripted_beside
            self.apart = "has no scripted model" if lacks_scripted else "has other settings or keys"
            self._say(f"taking a worker of its own: the one of the fencepost command that runs {self.apart}")
            self._try_join()

    def restart_if_gone(self) -> bool:
        """Start the worker again when it has ended without being told to; say whether that was so."""
        with self._locked():
            process = self._read()
            if process is not None and process.is_alive():
                return False
            self._start()
            return True

    def leave(self, *, at_once: bool = False) -> None:
        """Stop being a user; the last one ends the worker, which hands its work over unless it has to go at once."""
        if self._token is None:
            return
        with self._locked() as file:
            state = file.read()
            left = tuple(one for one in state.holders if one.token != self._token)
            if not left:
                self._end(grace=0.5 if at_once else self._grace + 5)
            file.write(state.model_copy(update={"holders": left}))
        self._token = None
        if self._private and self.queue.endswith(self._fingerprint):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _try_join(self) -> bool:
        with self._locked() as file:
            state = file.read()
            process = self._read()
            alive = process is not None and process.is_alive()
            differs = process is not None and process.fingerprint != self._fingerprint
            lacks = process is not None and self._scripted not in (None, process.scripted)
            if alive and (differs or lacks) and not state.holders:
                self._end(grace=self._grace + 5)  # left by a command that was killed
                alive = False
            if alive and differs:
                if self._others == "avoid":
                    self._is_scripted_beside = process is not None and process.scripted is not None
                    return False
                if self._others == "refuse":
                    raise ConfigurationError(
                        f"task queue {self.queue} is served for another fencepost command with other settings "
                        f"(process {state.holders[0].pid}): wait until it has ended, or end it"
                    )
            if not alive:
                self._start()
            elif lacks:
                self._say("the worker that runs already has no scripted model: a command that asks for it starts one")
            holder = Holder(
                token=secrets.token_hex(8), pid=os.getpid(), started=processes.start_mark(os.getpid()) or ""
            )
            file.write(state.model_copy(update={"holders": (*state.holders, holder)}))
            self._token = holder.token
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[StateFile]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = StateFile(self._folder)
        with file.locked(lambda: self._say("waiting for another fencepost that starts or stops a worker")):
            yield file

    def _read(self) -> _Process | None:
        return _process_in(self._folder)

    def _start(self) -> None:
        begun = time.monotonic()
        self._say("starting a worker ...")
        self.log.unlink(missing_ok=True)
        # -P: a file named worker.py in the directory where the command runs is not meant.
        command = [sys.executable, "-P", "-m", "worker"]
        scripted = self._scripted_address()
        environ = {**self._environ_with(scripted), "FENCEPOST_TASK_QUEUE": self.queue}
        if self._private or self.queue.endswith(self._fingerprint):
            # Sessions of other commands are not to go on with settings that are this one's alone.
            environ["FENCEPOST_WORKER__RECOVER"] = "false"
        pid = processes.spawn(command, self.log, environ)
        mark = processes.start_mark(pid)
        (self._folder / "worker.json").write_text(
            _Process(pid=pid, started=mark or "", fingerprint=self._fingerprint, scripted=scripted).model_dump_json()
        )

        def settled() -> bool:
            return processes.start_mark(pid) != mark or READY in self._written()

        in_time = processes.wait_until(settled, _START_SECONDS)
        if not in_time or mark is None or processes.start_mark(pid) != mark:
            self._end(grace=0.5)
            said = processes.tail(self.log, 1).removeprefix("worker: ")
            raise UnavailableError(f"the worker did not start: {said} (log: {self.log})")
        self._say(f"the worker is ready ({time.monotonic() - begun:.1f} s)")

    def _scripted_address(self) -> str | None:
        """Give where the scripted provider is for a worker that is started now: as the one before it had it, too."""
        before = self._read()
        found = self._scripted or (before.scripted if before is not None else None)
        return found if found is not None and SCRIPTED not in self._settings.providers and _answers(found) else None

    def _environ_with(self, scripted: str | None) -> Mapping[str, str]:
        if scripted is None:
            return self._environ
        return with_provider(Choice(self._settings, self._environ), SCRIPTED, scripted).environ

    def _written(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def _end(self, *, grace: float) -> None:
        process = self._read()
        if process is not None and process.is_alive():
            processes.end(process.pid, _ending(grace))
        (self._folder / "worker.json").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker process of local mode, and who uses it."""

    queue: str
    pid: int
    holders: tuple[Holder, ...]


def shared_scripted(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """Give the scripted provider of the worker that a command with these settings would share, None without one."""
    process = _process_in(settings.home / "workers" / settings.task_queue)
    if process is None or not process.is_alive() or process.fingerprint != fingerprint(settings, environ):
        return None
    return process.scripted if process.scripted is not None and _answers(process.scripted) else None


def _answers(url: str) -> bool:
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), _ANSWER_SECONDS):
            return True
    except OSError:
        return False


def running_workers(home: Path) -> list[RunningWorker]:
    """Give the workers that run in a home, without waiting for anybody. A queue with an odd name is a digest."""
    found = []
    for folder in _folders(home):
        process = _process_in(folder)
        if process is not None and process.is_alive():
            found.append(RunningWorker(folder.name, process.pid, StateFile(folder).read().holders))
    return found


def sweep_workers(home: Path, grace: float) -> int:
    """End the workers whose users are all gone, letting each hand its work over for so long; give how many."""
    ended = 0
    for folder in _folders(home):
        with StateFile(folder).locked(lambda: None):
            process = _process_in(folder)
            if process is not None and process.is_alive() and not StateFile(folder).read().holders:
                processes.end(process.pid, _ending(grace))
                (folder / "worker.json").unlink(missing_ok=True)
                ended += 1
    return ended


def _folders(home: Path) -> list[Path]:
    return sorted(file.parent for file in (home / "workers").glob("*/worker.json"))


def _process_in(folder: Path) -> _Process | None:
    try:
        return _Process.model_validate_json((folder / "worker.json").read_bytes())
    except (OSError, ValidationError):
        return None


def _ending(grace: float) -> tuple[tuple[signal.Signals, float], ...]:
    return ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0))


@asynccontextmanager
async def joined(worker: SharedWorker, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Use the worker for the time of the block, and start it again if it ends meanwhile."""
    joining = asyncio.ensure_future(asyncio.to_thread(worker.join))
    try:
        await asyncio.shield(joining)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await joining
        await asyncio.to_thread(worker.leave, at_once=True)
        raise
    watching = asyncio.create_task(_watch(worker, say))
    at_once = True
    try:
        yield
        at_once = False
    finally:
        watching.cancel()
        await asyncio.shield(asyncio.to_thread(worker.leave, at_once=at_once))


async def _watch(worker: SharedWorker, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            if await asyncio.to_thread(worker.restart_if_gone):
                say("the worker had ended: it was started again")
        except UnavailableError as error:
            say(error.message)
