"""What checks find, and how it is shown: lines for people, at any width, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fencepost.cli import terminal
from fencepost.cli.entry import FAILED, OK, UNREACHABLE

Status: TypeAlias = Literal["ok", "warning", "wrong"]

_COLOURS: Final = {"ok": "32", "warning": "33", "wrong": "31"}
_STATUS_WIDTH: Final = len("warning")
_NARROW: Final = 72
_NARROWEST: Final = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `mend` says what to do about it; `unreachable` that a service is not there."""

    name: str
    status: Status
    detail: str
    mend: str | None = None
    unreachable: bool = False


def ok(name: str, detail: str) -> list[Check]:
    """Give a finding of something that is as it should be."""
    return [Check(name, "ok", terminal.one_line(detail))]


def warning(name: str, detail: str, mend: str) -> list[Check]:
    """Give a finding of something that works, though not as it might."""
    return [Check(name, "warning", terminal.one_line(detail), terminal.one_line(mend))]


def wrong(name: str, detail: str, mend: str, *, unreachable: bool = False) -> list[Check]:
    """Give a finding of something that keeps sessions from working."""
    return [Check(name, "wrong", terminal.one_line(detail), terminal.one_line(mend), unreachable)]


def exit_code(checks: Sequence[Check]) -> int:
    """Give the exit code for what was found."""
    if any(check.unreachable for check in checks):
        return UNREACHABLE
    return FAILED if any(check.status == "wrong" for check in checks) else OK


def as_json(checks: Sequence[Check]) -> str:
    """Give one JSON object in one line."""
    found = [{"name": c.name, "status": c.status, "detail": c.detail, "mend": c.mend} for c in checks]
    return json.dumps({"checks": found}, ensure_ascii=False)


def show(checks: Sequence[Check]) -> None:
    """Write a table for people: status, name and detail, and what to do on the next line."""
    width, names = line_width(), max(len(check.name) for check in checks)
    narrow = width is not None and width < _NARROW
    for check in checks:
        status = _coloured(check.status)
        gap = " " * (_STATUS_WIDTH - len(check.status))
        if narrow:
            terminal.out(f"{status}{gap}  {check.name}")
            lines, indent = _wrapped(check.detail, width, 2), "  "
        else:
            indent = " " * (_STATUS_WIDTH + names + 4)
            lines = _wrapped(check.detail, width, len(indent))
            lines[0] = f"{status}{gap}  {check.name:<{names}}  {lines[0].lstrip()}"
        for line in lines:
            terminal.out(line)
        if check.mend is not None:
            for line in _wrapped(f"-> {check.mend}", width, len(indent)):
                terminal.out(line)
    counts = {status: sum(check.status == status for check in checks) for status in ("wrong", "warning")}
    words = f"{counts['wrong']} wrong, {counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    terminal.out("everything is as it should be" if not any(counts.values()) else words)


def line_width() -> int | None:
    """Give the columns of the terminal, None where lines go to a file or a program and are not to be broken."""
    if sys.stdout.isatty():
        return max(shutil.get_terminal_size().columns, _NARROWEST)
    given = os.environ.get("COLUMNS", "")
    return max(int(given), _NARROWEST) if given.isdecimal() and int(given) else None


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    if width is None:
        return [" " * indent + text]
    margin = " " * indent
    return textwrap.wrap(
        text, max(width, indent + 20), initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    ) or [margin]


def _coloured(status: Status) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return status
    return f"\x1b[{_COLOURS[status]}m{status}\x1b[0m"
