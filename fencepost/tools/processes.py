"""Commands as process groups that can always be ended: by their caller, by a time-out, or by the reaper.

A command starts behind a gate: its group exists, but the program begins only after the reaper has confirmed that it
protects the group. So there is no moment at which a worker's death leaves a program running.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from fencepost.domain.errors import UnavailableError
from fencepost.tools import reaper as reaper_process
from fencepost.tools.execution import CAPTURE_BYTES, Capture

CALL_NAME = "FENCEPOST_CALL"
"""Environment variable that gives a command the hash of its call's effect key."""

_SECRET_NAMES = frozenset({"FENCEPOST_DATABASE_URL", "DATABASE_URL", "PGPASSWORD", "TEMPORAL_API_KEY"})
_SCRIPT = str(Path(reaper_process.__file__).resolve())
_GATE = 'read -r _ && exec "$@" </dev/null'
_CHUNK = 1 << 16
_POLL_SECONDS = 0.03
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a command ended: its exit code (negative: the signal that ended it), and what it printed."""

    exit_code: int
    output: Capture
    timed_out: bool


class Reaper:
    """A worker's hold on its reaper process, which kills the worker's commands when the worker dies or is silent.

    `silence` is in seconds, and should be under the heartbeat time-out of activities. The beat comes from the event
    loop: a blocked loop counts as silent, as it does not heartbeat either.
    """

    def __init__(self, silence: float = 8.0, beat: float = 1.0) -> None:
        self._silence = silence
        self._beat_seconds = beat
        self._process: asyncio.subprocess.Process | None = None
        self._beats: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._groups: dict[int, str] = {}
        self._closed = True

    @property
    def pid(self) -> int | None:
        """The process id of the reaper that runs now."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and the beat. Raises OSError when no process can be started."""
        self._closed = False
        await self.ensure()
        self._beats = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Close the pipe, upon which the process kills what is still protected, and wait for its end."""
        self._closed = True
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        async with self._lock:
            if self._process is not None:
                await self._end(self._process)
                self._process = None

    async def ensure(self) -> asyncio.subprocess.Process:
        """Give the living reaper; a dead one is replaced, and the replacement told of all groups.

        Raises UnavailableError after close.
        """
        async with self._lock:
            if self._closed:
                raise UnavailableError("The reaper is closed: start it before a command is run.")
            if self._process is not None and self._process.returncode is None:
                return self._process
            if self._process is not None:
                await self._end(self._process)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", _SCRIPT, str(self._silence),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/",
            )  # fmt: skip
            for group, marker in self._groups.items():
                await self._protect(self._process, group, marker)
            return self._process

    async def register(self, process: asyncio.subprocess.Process, group: int, marker: str) -> None:
        """Have this reaper protect a group. Raises UnavailableError when it is not the living one any more: a worker
        that was silent in between must not start what it had in hand."""
        async with self._lock:
            if process is not self._process:
                raise UnavailableError("The reaper was replaced while a command was started; it was not run.")
            await self._protect(process, group, marker)
            self._groups[group] = marker

    def unregister(self, group: int) -> None:
        """Let a group go. To be called while its leader is not waited for, so that the number is still its own."""
        self._groups.pop(group, None)
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(b"-%d\n" % group)

    async def _protect(self, process: asyncio.subprocess.Process, group: int, marker: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"+{group} {marker}\n".encode())
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await process.stdout.readline()
        except (OSError, TimeoutError) as error:
            await self._end(process)
            raise UnavailableError("The reaper does not answer; the command was not run.") from error
        if answer.strip() != str(group).encode():
            await self._end(process)
            raise UnavailableError("The reaper has ended; the command was not run.")

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(OSError, UnavailableError):
                process = await self.ensure()
                assert process.stdin is not None
                process.stdin.write(b".\n")
            await asyncio.sleep(self._beat_seconds)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        with contextlib.suppress(OSError):
            await process.stdin.wait_closed()


def command_environment(environment: Mapping[str, str], secret_names: frozenset[str]) -> dict[str, str]:
    """Give the environment without what a model must not print: the named secrets, database URLs and API keys."""
    hidden = _SECRET_NAMES | secret_names
    return {
        name: value
        for name, value in environment.items()
        if name not in hidden and not name.upper().endswith("_API_KEY")
    }


@dataclass
class _Command:
    """One command from its start to its end; used by one task at a time."""

    process: subprocess.Popen[bytes]
    marker: str
    output: Capture
    fd: int
    eof: asyncio.Event = field(default_factory=asyncio.Event)

    def listen(self) -> None:
        os.set_blocking(self.fd, False)
        asyncio.get_running_loop().add_reader(self.fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.output.feed(data)
        else:
            asyncio.get_running_loop().remove_reader(self.fd)
            self.eof.set()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.fd)
        os.close(self.fd)

    def open_gate(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    async def exited(self) -> None:
        """Wait for the leader's exit without collecting it: its number stays its own until the group is ended."""
        try:
            fd = os.pidfd_open(self.process.pid)
        except (AttributeError, OSError):
            while self.process.poll() is None:  # noqa: ASYNC110 - without pidfd nobody tells
                await asyncio.sleep(_POLL_SECONDS)
            return
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(fd, event.set)
            await event.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def signal(self, number: int) -> bool:
        """Signal every process of the command; say whether any was alive."""
        return bool(
            await asyncio.to_thread(reaper_process.signal_processes, self.process.pid, self.marker, number)
        )  # fmt: skip

    async def end(self, grace: float) -> None:
        """End every process of the command: TERM, and after `grace` seconds KILL; at most two seconds more."""
        if not await self.signal(signal.SIGTERM):
            return
        loop = asyncio.get_running_loop()
        for number, seconds in ((0, grace), (signal.SIGKILL, 2.0)):
            until = loop.time() + seconds
            while await self.signal(number):
                if loop.time() >= until:
                    break
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return


class ShellRunner:
    """Runs commands under a reaper. `secret_env` are the names of the configured keys; graces are in seconds:
    `kill_grace` between TERM and KILL, `cancel_grace` the same on cancellation, `drain_grace` for output that comes
    after the command's exit."""

    def __init__(
        self,
        reaper: Reaper,
        *,
        secret_env: frozenset[str] = frozenset(),
        environment: Mapping[str, str] | None = None,
        kill_grace: float = 3.0,
        cancel_grace: float = 0.3,
        drain_grace: float = 0.2,
    ) -> None:
        self._reaper = reaper
        self._environment = MappingProxyType(
            command_environment(os.environ if environment is None else environment, secret_env)
        )
        self._kill_grace = kill_grace
        self._cancel_grace = cancel_grace
        self._drain_grace = drain_grace

    async def start(self) -> None:
        """Start the reaper."""
        await self._reaper.start()

    async def close(self) -> None:
        """Close the reaper, which kills what still runs."""
        await self._reaper.close()

    async def run(
        self, argv: Sequence[str], *, directory: str, timeout: float, effect_key: str, limit: int = CAPTURE_BYTES
    ) -> ProcessResult:
        """Run a program (absolute path first) to its exit or for `timeout` seconds; nothing of it is left after that.

        Standard input is empty, standard output and error are captured together in `limit` bytes. Cancellation ends
        the command's processes before it is passed on. Raises OSError when the program cannot be started, and
        UnavailableError, with nothing run, when the reaper cannot protect it.
        """
        stop = asyncio.Event()
        task = asyncio.create_task(self._supervise(argv, directory, timeout, effect_key, limit, stop))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
                stop.set()
            except Exception:
                break
        if cancelled is not None:
            task.exception()
            raise cancelled
        return task.result()

    def _spawn(
        self, argv: Sequence[str], directory: str, effect_key: str, limit: int
    ) -> _Command:  # fmt: skip
        marker = secrets.token_hex(8)
        environment = {
            **self._environment,
            CALL_NAME: hashlib.sha256(effect_key.encode("utf-8", "replace")).hexdigest()[:32],
            reaper_process.MARKER_NAME: marker,
            "PWD": directory,
        }
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _GATE, "sh", *argv],
                cwd=directory, env=environment, start_new_session=True,
                stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return _Command(process, marker, Capture(limit), reading)

    async def _supervise(
        self, argv: Sequence[str], directory: str, timeout: float, effect_key: str, limit: int, stop: asyncio.Event
    ) -> ProcessResult:
        reaper = await self._reaper.ensure()
        command = await asyncio.to_thread(self._spawn, argv, directory, effect_key, limit)
        exited = asyncio.create_task(command.exited())
        stopped = asyncio.create_task(stop.wait())
        try:
            command.listen()
            await self._reaper.register(reaper, command.process.pid, command.marker)
            if not stop.is_set():
                command.open_gate()
            await asyncio.wait({exited, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            timed_out = not exited.done() and not stop.is_set()
            if exited.done():
                await self._drain(command)
            await command.end(self._cancel_grace if stop.is_set() else self._kill_grace)
            await self._drain(command)
        finally:
            stopped.cancel()
            exited.cancel()
            exit_code = await self._collect(command)
        return ProcessResult(exit_code, command.output, timed_out)

    async def _drain(self, command: _Command) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_grace):
                await command.eof.wait()

    async def _collect(self, command: _Command) -> int:
        """Leave nothing of the command, whatever happened before: no process, no descriptor, no entry."""
        if command.process.stdin is not None and not command.process.stdin.closed:
            with contextlib.suppress(OSError):
                command.process.stdin.close()
        await command.signal(signal.SIGKILL)
        self._reaper.unregister(command.process.pid)
        command.close()
        try:
            return await asyncio.to_thread(command.process.wait, 2.0)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel (a dead network disk): killed as soon as it leaves; nobody waits for that.
            return -signal.SIGKILL
