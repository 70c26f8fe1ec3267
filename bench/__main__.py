"""`make bench`: start everything on this machine, measure, print a table and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench import fence, history, latency, memory, recovery, streaming, turns
from bench.figures import Figure, table
from bench.house import House, open_house, say
from fencepost.process import leave
from fencepost.telemetry import configure_logging

Measurement = Callable[[House], Awaitable[list[Figure]]]
SUBJECTS = ("turns", "fence", "history", "streaming", "latency", "memory")
ASKED_FOR = ("recovery",)
"""Measured only when they are named: they take minutes, most of which are time-outs."""


def chosen(options: argparse.Namespace) -> dict[str, Measurement]:
    """Give the measurements that the options ask for, by their subjects."""
    every: dict[str, Measurement] = {
        "turns": lambda house: turns.measure(house, turns=options.turns, sessions=options.sessions),
        "fence": fence.measure,
        "history": history.measure,
        "streaming": streaming.measure,
        "latency": lambda house: latency.measure(house, sessions=options.sessions),
        "memory": lambda house: memory.measure(house, sessions=options.streams),
        "recovery": lambda house: recovery.measure(house, times=options.times),
    }
    return {subject: measure for subject, measure in every.items() if subject in (options.only or SUBJECTS)}


async def run(measurements: dict[str, Measurement], home: Path) -> tuple[list[Figure], list[str]]:
    """Start the servers, measure, stop the servers. Gives the figures, and the subjects that could not be measured."""
    figures: list[Figure] = []
    failed = []
    async with open_house(home) as house:
        for subject, measure in measurements.items():
            began = time.monotonic()
            try:
                figures += await measure(house)
            except Exception as error:
                failed.append(subject)
                say(f"{subject}: not measured: {type(error).__name__}: {error}")
            say(f"{subject}: {time.monotonic() - began:.0f} s")
    return figures, failed


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure fencepost on this machine, against its bounds: ratios and counts within one run. "
        "Exits with 0 also when a bound is missed, with 1 when something could not be measured.",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=SUBJECTS + ASKED_FOR,
        metavar="SUBJECT",
        help=f"of {', '.join(SUBJECTS)}, and {', '.join(ASKED_FOR)}, which takes minutes and is measured only when it "
        "is named; repeatable",
    )
    parser.add_argument("--turns", type=int, default=40, help="turns of the one session (%(default)s)")
    parser.add_argument("--sessions", type=int, default=50, help="sessions at once (%(default)s)")
    parser.add_argument("--streams", type=int, default=200, help="sessions that stream at once (%(default)s)")
    parser.add_argument("--times", type=int, default=5, help="times that recovery repeats each thing (%(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmarks. Gives the exit code."""
    options = parsed()
    configure_logging("error", "json")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: with all its processes
    home = Path(tempfile.mkdtemp(prefix="fencepost-bench-", dir="/tmp"))
    home.chmod(0o711)
    try:
        figures, failed = asyncio.run(run(chosen(options), home))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(table(figures))
    print(json.dumps({"figures": [one.as_json() for one in figures], "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    leave(main())
