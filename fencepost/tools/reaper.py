"""The reaper: a small process beside a worker that kills the worker's commands when the worker dies or falls silent.

It runs as a script of its own (standard library only, quick to start) and reads lines from its standard input:
`+<group> <marker>` protects a process group (answered with `<group>` once it is), `-<group>` lets it go, `.` is a beat.
When the input ends, or no beat came for the configured silence, it kills every protected group and exits.
"""

# ruff: noqa: PTH110, PTH123, PTH208
# Paths stay strings: this starts with every worker, and looks at every process of the machine.

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

MARKER_NAME = "FENCEPOST_PROCESS"
"""Environment variable by which a process is known as part of one command, also when it has left the group."""

_ROUNDS = 20
_ROUND_SECONDS = 0.05


def _stat(pid: str) -> tuple[str, int, int, int] | None:
    """Give (state, parent, group, session) of a process, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3])
    except (OSError, IndexError, ValueError):
        return None


def _carries(pid: str, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            return marker in handle.read().split(b"\0")
    except OSError:
        return False


def find_processes(group: int, marker: str) -> list[int]:
    """Give the living processes of a command: its group, its session, bearers of its marker, and their descendants.

    Without a /proc file system only the group can be seen: the answer is then [group] or [].
    """
    if not os.path.exists("/proc/self/stat"):
        try:
            os.killpg(group, 0)
        except OSError:
            return []
        return [group]
    wanted = f"{MARKER_NAME}={marker}".encode()
    children: dict[int, list[int]] = {}
    pending: list[int] = []
    for name in os.listdir("/proc"):
        found = _stat(name) if name.isdigit() else None
        if found is None or found[0] in "ZX":
            continue
        pid = int(name)
        children.setdefault(found[1], []).append(pid)
        if group in (found[2], found[3]) or _carries(name, wanted):
            pending.append(pid)
    members: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in members and pid != os.getpid():
            members.add(pid)
            pending += children.get(pid, [])
    return sorted(members)


def signal_processes(group: int, marker: str, number: int) -> list[int]:
    """Send a signal to a command's group at once, then to those of its processes that left it; give who was alive."""
    members = find_processes(group, marker)
    if members:
        with contextlib.suppress(OSError):
            os.killpg(group, number)
    for pid in members:
        # Those inside the group get it twice, which is harmless for the two signals in use.
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    return members


def kill_all(groups: dict[int, str]) -> None:
    """Kill every group and its strays; again while new ones appear, for at most a second."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    left = dict(groups)
    for _ in range(_ROUNDS):
        left = {group: marker for group, marker in left.items() if signal_processes(group, marker, signal.SIGKILL)}
        if not left:
            return
        time.sleep(_ROUND_SECONDS)


def _apply(line: bytes, groups: dict[int, str]) -> None:
    if line[:1] == b"+":
        group, _, marker = line[1:].partition(b" ")
        groups[int(group)] = marker.decode()
        os.write(1, group + b"\n")
    elif line[:1] == b"-":
        groups.pop(int(line[1:]), None)


def watch(silence: float) -> None:
    """Serve standard input until it ends or is silent for `silence` seconds, then kill what is still protected."""
    groups: dict[int, str] = {}
    pending = b""
    try:
        # What waits in the pipe is read before the silence is judged: a reaper that was slow itself kills nobody.
        while select.select([0], [], [], silence)[0]:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _apply(line, groups)
    except BrokenPipeError:
        pass
    kill_all(groups)


def main() -> None:
    """Run the process. Signals for the whole service or terminal do not end it: the pipe's end does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(float(sys.argv[1]))


if __name__ == "__main__":
    main()
