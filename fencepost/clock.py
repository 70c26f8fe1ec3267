"""The injected clock: outside workflows and the database, nothing reads the time in any other way.

Leases are the database's business and go by its clock; times of this clock are never compared with those.
"""

from __future__ import annotations

import time


class Clock:
    """The time of this machine."""

    def now_ms(self) -> int:
        """Give the wall-clock time in integer milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Give seconds that only ever grow, for measuring how long something took."""
        return time.monotonic()


class FixedClock(Clock):
    """A clock that stands still until it is moved: for tests, and for output that must come out the same twice."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._now_ms / 1000

    def advance(self, milliseconds: int) -> None:
        """Move both times forward."""
        self._now_ms += milliseconds
