"""The search itself, as a process of its own: it can be killed in the middle of a walk or of an endless expression.

Run as a script (standard library only) with one JSON argument; prints one JSON object per line: `{"path", ...}` for a
result as soon as it is found, `{"error"}` for an expression that is not valid, and last `{"end"}` with the reason why
it stopped ("all", "limit" or "time") and how many files were skipped for their size.
"""

# ruff: noqa: PTH113, PTH118, PTH123, PTH202
# Paths stay strings: pathlib would double the start-up, and cost more than the match for every file of a walk.

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

VENDOR_NAMES = frozenset(
    (".git", ".hg", ".svn", "node_modules", "bower_components", "__pycache__", ".venv", "venv", ".tox", ".nox",
     ".mypy_cache", ".pytest_cache", ".ruff_cache", ".gradle", ".terraform", ".next", ".cache")
)  # fmt: skip
SYSTEM_PATHS = frozenset(("/proc", "/sys", "/dev"))
MAX_FILE_BYTES = 20 * 1024 * 1024
LINE_CHARS = 300

_SNIFF_BYTES = 8192
_CLOCK_LINES = 500
_CLASS = re.compile(r"\[([!^]?)(\]?[^\]]*)\]")


class _OutOfTimeError(Exception):
    pass


def glob_expression(pattern: str) -> str:
    """Give the regular expression of a path pattern: `*` and `?` stay within a name, `**` crosses directories,
    `[...]` and `{a,b}` choose. A pattern without a slash matches a name at any depth; a slash in front binds it to
    the root."""
    out, at, depth = ["" if "/" in pattern else "(?:.*/)?"], 0, 0
    pattern = pattern.removeprefix("/")
    while at < len(pattern):
        char = pattern[at]
        if pattern.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 2
        elif pattern.startswith("**", at):
            out.append(".*")
            at += 1
        elif char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (chosen := _CLASS.match(pattern, at)) is not None:
            body = re.sub(r"([\\\[\]^&|~])", r"\\\1", chosen[2])
            out.append(f"[^/{body}]" if chosen[1] else f"[{body}]")
            at = chosen.end() - 1
        elif char == "{" and "}" in pattern[at:]:
            out.append("(?:")
            depth += 1
        elif char == "}" and depth:
            out.append(")")
            depth -= 1
        elif char == "," and depth:
            out.append("|")
        else:
            out.append(re.escape(char))
        at += 1
    return "".join(out) + r"\Z"


def _print(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


class Search:
    """One walk below `root` with a deadline; results are printed as they come."""

    def __init__(self, root: str, limit: int, seconds: float) -> None:
        self._root = root
        self._left = limit
        self._until = time.monotonic() + seconds
        self.skipped = 0

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise _OutOfTimeError

    def _emit(self, result: dict[str, Any]) -> bool:
        """Print a result; say whether more are wanted."""
        if self._left == 0:
            return False
        self._left -= 1
        _print(result)
        return True

    def files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield (path below the root, entry) of files, in the order of their paths within each directory. Links to
        directories are not followed; vendor and system directories are left out."""
        pending = [""]
        while pending:
            self._check_time()
            below = pending.pop()
            try:
                with os.scandir(os.path.join(self._root, below)) as listing:
                    entries = sorted(listing, key=lambda entry: entry.name)
            except OSError:
                continue
            directories = []
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if not entry.is_dir(follow_symlinks=False):
                    yield path, entry
                elif entry.name not in VENDOR_NAMES and entry.path not in SYSTEM_PATHS:
                    directories.append(path)
            pending += reversed(directories)

    def glob(self, expression: re.Pattern[str]) -> str:
        """Print the paths that match; give the reason of the end."""
        for path, _ in self.files():
            if expression.match(path) and not self._emit({"path": path}):
                return "limit"
        return "all"

    def grep(self, expression: re.Pattern[str], include: re.Pattern[str] | None) -> str:
        """Print the lines that match; give the reason of the end."""
        if os.path.isfile(self._root):
            return "all" if self._grep_file("", self._root, expression) else "limit"
        for path, entry in self.files():
            # What a link leads to may be outside, where other permissions hold.
            wanted = entry.is_file(follow_symlinks=False) and (include is None or include.match(path))
            if wanted and not self._grep_file(path, entry.path, expression):
                return "limit"
        return "all"

    def _grep_file(self, path: str, full: str, expression: re.Pattern[str]) -> bool:
        self._check_time()
        try:
            if os.path.getsize(full) > MAX_FILE_BYTES:
                self.skipped += 1
                return True
            with open(full, "rb") as handle:
                data = handle.read(_SNIFF_BYTES)
                if b"\0" in data:
                    return True
                data += handle.read()
        except OSError:
            return True
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if number % _CLOCK_LINES == 0:
                self._check_time()
            found = expression.search(line.rstrip("\r"))
            if found is not None:
                start = max(0, found.start() - LINE_CHARS // 3) if len(line) > LINE_CHARS else 0
                text = line[start : start + LINE_CHARS].rstrip("\r")
                if not self._emit({"path": path, "line": number, "text": text, "cut": len(line) > LINE_CHARS}):
                    return False
        return True


def main(request: dict[str, Any]) -> None:
    """Serve one request {mode, root, pattern, include, limit, seconds}."""
    search = Search(request["root"], request["limit"], request["seconds"])
    include = request.get("include")
    try:
        if request["mode"] == "glob":
            expression, chosen = re.compile(glob_expression(request["pattern"]), re.DOTALL), None
        else:
            expression = re.compile(request["pattern"])
            chosen = re.compile(glob_expression(include), re.DOTALL) if include else None
    except (re.error, OverflowError, RecursionError) as error:
        _print({"error": str(error) or type(error).__name__})
        return
    try:
        reason = search.glob(expression) if request["mode"] == "glob" else search.grep(expression, chosen)
    except _OutOfTimeError:
        reason = "time"
    _print({"end": reason, "skipped": search.skipped})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
