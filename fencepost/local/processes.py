"""Other processes: who is alive, who runs with which arguments, how one is started on its own and how it is ended.

A process is known by its pid together with the time of its start, so that a pid given out again is never mistaken
for the process that had it before. Works on Linux without any other program, elsewhere through `ps`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_PROC = Path("/proc")
_LINUX = sys.platform.startswith("linux")
_POLL_SECONDS = 0.02


def start_mark(pid: int) -> str | None:
    """Give a text that no other process with this pid has had or will have; None when the process is not running.

    A zombie counts as not running.
    """
    if _LINUX:
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before the bracket may hold anything
        state, started = fields[0], fields[19]
        return None if state in "ZX" else f"{boot}:{started}"
    state, _, started = _ps("-p", str(pid), "-o", "stat=,lstart=").strip().partition(" ")
    return started.strip() if state and "Z" not in state else None


def processes_with(argument: str) -> dict[int, list[str]]:
    """Give pid and arguments of this user's running processes that have exactly this argument.

    Outside Linux arguments that hold spaces are not told apart, and the argument may be part of a longer one.
    """
    return {
        pid: arguments
        for pid, arguments in _arguments_of_all()
        if (argument in arguments if _LINUX else argument in " ".join(arguments)) and start_mark(pid) is not None
    }


def arguments_of(pid: int) -> list[str]:
    """Give the arguments of a process, its program first; empty when it is not running or may not be looked at."""
    if _LINUX:
        try:
            raw = (_PROC / str(pid) / "cmdline").read_bytes()
        except OSError:
            return []
        return os.fsdecode(raw).rstrip("\0").split("\0") if raw else []
    return _ps("-p", str(pid), "-o", "command=").split()


def _arguments_of_all() -> Iterator[tuple[int, list[str]]]:
    if _LINUX:
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == os.geteuid():
                        yield int(entry.name), arguments_of(int(entry.name))
        return
    for line in _ps("-U", str(os.geteuid()), "-o", "pid=,command=").splitlines():
        pid, *arguments = line.split()
        yield int(pid), arguments


def _ps(*arguments: str) -> str:
    result = subprocess.run(["ps", "-ww", *arguments], capture_output=True, text=True, check=False)  # noqa: S607 - from PATH on purpose: its place differs between systems
    return result.stdout


def spawn(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a program in a session of its own, its output going to the end of `log`, and give its pid.

    A Ctrl-C in this terminal does not reach it, and it outlives this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.posix_spawn(
        arguments[0],
        list(arguments),
        dict(environment),
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), output, (os.POSIX_SPAWN_DUP2, 1, 2)],
        setsid=True,
    )


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds, and say whether it did so in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def end(pid: int, steps: Sequence[tuple[signal.Signals, float]]) -> bool:
    """End a process by one signal after another, waiting after each for so many seconds; say whether it is gone."""
    mark = start_mark(pid)
    if mark is None:
        return True

    def gone() -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # where this process started it, nobody else clears it away
        return start_mark(pid) != mark

    for number, seconds in steps:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if wait_until(gone, seconds):
            return True
    return False


def tail(log: Path, lines: int = 3) -> str:
    """Give the last lines of a log as one line, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "no log"
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip()) or "empty log"
