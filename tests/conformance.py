"""Which promised behaviours the suite has shown: counted by milestone from the marks of tests that passed.

A test claims behaviours with `@pytest.mark.conformance("RUN-01", ...)`; the list is `tests/house/conformance.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).parent / "house" / "conformance.json"
MARK = "conformance"


def behaviours() -> dict[str, int]:
    """Give every behaviour's id with the milestone that delivers it."""
    entries: list[dict[str, Any]] = json.loads(LIST.read_text(encoding="utf-8"))
    return {entry["id"]: entry["milestone"] for entry in entries}


class ConformanceReport:
    """Collects the ids of passed tests, and of failed ones so that a claim counts only when all its tests pass."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        # Properties travel with the report when tests run in several processes.
        report.user_properties += [(MARK, str(one)) for mark in item.iter_markers(MARK) for one in mark.args]
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in how a test went, in whichever process it ran."""
        ids = {str(value) for name, value in report.user_properties if name == MARK}
        if report.failed:
            self._failed |= ids
        elif report.when == "call" and report.passed:
            self._passed |= ids

    def lines(self) -> list[str]:
        """Give the totals, one milestone a part, and the ids whose tests failed."""
        known = behaviours()
        shown = (self._passed - self._failed) & known.keys()
        parts = []
        for milestone in sorted(set(known.values())):
            all_of_it = {one for one, number in known.items() if number == milestone}
            parts.append(f"M{milestone} {len(shown & all_of_it)} of {len(all_of_it)}")
        lines = [f"conformance: {', '.join(parts)}"]
        if self._failed:
            lines.append(f"conformance, failed: {', '.join(sorted(self._failed))}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the totals under the results."""
        for line in self.lines():
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Register the report for this run."""
    config.pluginmanager.register(ConformanceReport(), "fencepost-conformance")
