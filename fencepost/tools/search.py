"""The glob and grep tools: a bounded search in a process that cancellation and time really end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fencepost.domain.clean import clean_text
from fencepost.domain.permissions import effect_of
from fencepost.domain.tools import TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools import search_process
from fencepost.tools.paths import Place, locate
from fencepost.tools.registry import Tool, ToolContext

SEARCH_SECONDS = 15.0
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

_SCRIPT = str(Path(search_process.__file__).resolve())
_KILL_AFTER = 2.0
_CAPTURE_BYTES = 8 << 20
_WILD = re.compile(r"[*?\[{]")


class GlobInput(WireModel):
    pattern: str = Field(min_length=1, max_length=4000, description="Path pattern, such as `src/**/*.py` or `*.md`.")
    path: str | None = Field(default=None, description="Directory to search in; the working directory when left out.")
    limit: int | None = Field(
        default=None, ge=1, le=MAX_LIMIT, description=f"Most results; {DEFAULT_LIMIT} by default."
    )


class GrepInput(WireModel):
    pattern: str = Field(min_length=1, max_length=4000, description="Regular expression in Python's syntax, per line.")
    path: str | None = Field(default=None, description="Directory or file to search; the working directory by default.")
    include: str | None = Field(default=None, max_length=4000, description="Only files that match this path pattern.")
    limit: int | None = Field(
        default=None, ge=1, le=MAX_LIMIT, description=f"Most matches; {DEFAULT_LIMIT} by default."
    )


class SearchOutput(WireModel):
    """`complete` says that nothing more is there to be found."""

    count: int = Field(ge=0)
    complete: bool


@dataclass(frozen=True, slots=True)
class _Found:
    """What the process printed. `end` is "all", "limit", "time", or None when it was killed before it was done."""

    results: tuple[dict[str, Any], ...]
    end: str | None
    skipped: int


def _split(given: GlobInput) -> tuple[str, str]:
    """Give (directory, pattern): the part of the pattern before its first wild card names the directory."""
    wild = _WILD.search(given.pattern)
    cut = given.pattern.rfind("/", 0, wild.start() if wild else len(given.pattern)) + 1
    if not cut:
        return given.path or ".", given.pattern
    # The slash in front keeps the rest bound to that directory: it is no pattern for any depth any more.
    return str(Path(given.path or ".", given.pattern[:cut])), "/" + given.pattern[cut:]


def _glob_place(directory: str, given: GlobInput) -> Place:
    return locate(directory, _split(given)[0])


def _grep_place(directory: str, given: GrepInput) -> Place:
    return locate(directory, given.path or ".")


def _grep_external(directory: str, given: GrepInput) -> tuple[str, ...]:
    place = _grep_place(directory, given)
    return place.external(is_directory=not place.path.is_file())


def _pattern(directory: str, given: GlobInput | GrepInput) -> tuple[str, ...]:  # noqa: ARG001 - as Tool.resources
    return (given.pattern,)


async def _search(context: ToolContext, request: dict[str, Any], seconds: float) -> _Found:
    try:
        result = await context.runner.run(
            [sys.executable, "-I", "-S", _SCRIPT, json.dumps({**request, "seconds": seconds})],
            directory="/",
            timeout=seconds + _KILL_AFTER,
            effect_key=context.invocation.effect_key,
            limit=_CAPTURE_BYTES,
        )
    except OSError as error:
        raise ToolFailure(f"Cannot search: {error.strerror}") from None
    results, end, skipped = [], None, 0
    for line in result.output.text().split("\n"):
        try:
            item = json.loads(line)
        except ValueError:
            continue  # the last line of a killed process
        if not isinstance(item, dict):
            continue
        if "error" in item:
            raise ToolFailure(f"Invalid pattern: {clean_text(' '.join(item['error'].split()))}")
        if "end" in item:
            end, skipped = item["end"], item["skipped"]
        else:
            results.append(item)
    if end is None and not result.timed_out:
        raise RuntimeError(f"the search process ended early ({result.exit_code}): {result.output.text()[:500]}")
    return _Found(tuple(results), end, skipped)


def _notices(found: _Found, limit: int, seconds: float) -> list[str]:
    notices = []
    if found.end == "limit":
        notices.append(f"[stopped at {limit} results; there are more: narrow the pattern or the path]")
    elif found.end != "all":
        notices.append(f"[stopped after {seconds:g} s; results are partial: narrow the pattern or the path]")
    if found.skipped:
        notices.append(f"[{found.skipped} files over {search_process.MAX_FILE_BYTES >> 20} MiB were not searched]")
    return notices


def _shown(place: Place, below: str) -> str:
    """Give the path of a result as a tool would take it: relative to the session's directory, absolute outside."""
    return clean_text(str(Path(place.resource, below)))


def _output(lines: list[str], notices: list[str], found: _Found, nothing: str) -> ToolOutput:
    text = "\n".join([*(lines or [nothing]), *notices])
    return ToolOutput(structured={"count": len(lines), "complete": found.end == "all"}, content=(TextItem(text=text),))


async def _glob(context: ToolContext, given: GlobInput, seconds: float) -> ToolOutput:
    place = await asyncio.to_thread(_glob_place, context.invocation.directory, given)
    limit = given.limit or DEFAULT_LIMIT
    request = {"mode": "glob", "root": str(place.path), "pattern": _split(given)[1], "limit": limit}
    found = await _search(context, request, seconds)
    lines = [_shown(place, item["path"]) for item in found.results]
    return _output(lines, _notices(found, limit, seconds), found, "No files found")


async def _grep(context: ToolContext, given: GrepInput, seconds: float) -> ToolOutput:
    place = await asyncio.to_thread(_grep_place, context.invocation.directory, given)
    if not await asyncio.to_thread(place.path.exists):
        raise ToolFailure(f"File not found: {place.resource}")
    limit = given.limit or DEFAULT_LIMIT
    request = {
        "mode": "grep",
        "root": str(place.path),
        "pattern": given.pattern,
        "include": given.include,
        "limit": limit,
    }
    found = await _search(context, request, seconds)
    lines, hidden = [], set()
    for item in found.results:
        path = _shown(place, item["path"])
        if effect_of(context.rules, "read", path) == "allow":
            cut = " [... line cut]" if item["cut"] else ""
            lines.append(f"{path}:{item['line']}: {clean_text(item['text'])}{cut}")
        else:
            hidden.add(path)
    notices = _notices(found, limit, seconds)
    if hidden:
        notices.append(f"[matches in {len(hidden)} files are not shown: reading these is not allowed]")
    return _output(lines, notices, found, "No matches found")


def search_tools(seconds: float = SEARCH_SECONDS) -> tuple[Tool[GlobInput], Tool[GrepInput]]:
    """Give glob and grep, whose searches end after `seconds` with what they have found."""

    async def run_glob(context: ToolContext, given: GlobInput) -> ToolOutput:
        return await _glob(context, given, seconds)

    async def run_grep(context: ToolContext, given: GrepInput) -> ToolOutput:
        return await _grep(context, given, seconds)

    glob = Tool(
        name="glob",
        description=(
            "Find files by path pattern: `*` within a name, `**` across directories, `{a,b}` and `[...]` to choose. A "
            "pattern without a slash matches names at any depth. Results are in the order of their paths. Dependency, "
            "cache and version control directories are left out, unless the path or pattern begins inside one."
        ),
        input_model=GlobInput,
        action="glob",
        run=run_glob,
        resources=_pattern,
        external=lambda directory, given: _glob_place(directory, given).external(is_directory=True),
        idempotent=True,
        output_model=SearchOutput,
    )
    grep = Tool(
        name="grep",
        description=(
            "Search the text of files for lines that match a regular expression; gives path, line number and line, in "
            "the order of paths. Binary and very large files, links, and dependency, cache and version control "
            "directories are left out."
        ),
        input_model=GrepInput,
        action="grep",
        run=run_grep,
        resources=_pattern,
        external=_grep_external,
        opens=lambda directory, given: _grep_place(directory, given).path,
        idempotent=True,
        output_model=SearchOutput,
    )
    return glob, grep
