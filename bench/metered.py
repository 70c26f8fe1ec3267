"""`python -m worker`, which says what it uses when it is sent SIGUSR1."""

from __future__ import annotations

import resource
import runpy
import signal
import sys
from pathlib import Path

from bench.children import report


def memory() -> int:
    """Give the most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss would begin with the size of the process that this one was forked from.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def say_usage(*_: object) -> None:
    """Say the seconds of CPU and the peak of memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    report({"cpu": used.ru_utime + used.ru_stime, "memory": memory()})


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, say_usage)
    runpy.run_module("worker", run_name="__main__")
