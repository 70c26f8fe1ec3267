"""The write and edit tools: whole files replaced at once, and one exact span spliced with every other byte kept."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from fencepost.domain.tools import TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools.paths import Place, locate
from fencepost.tools.registry import Tool, ToolContext

EDIT_BYTES = 32 * 1024 * 1024

Result = TypeVar("Result")


class WriteInput(WireModel):
    path: str = Field(min_length=1, description="File, relative to the working directory or absolute.")
    content: str = Field(description="The whole new content.")


class EditInput(WireModel):
    path: str = Field(min_length=1, description="File, relative to the working directory or absolute.")
    old_string: str = Field(min_length=1, description="The exact text to replace; it must be there exactly once.")
    new_string: str = Field(description="The text to put in its place.")
    replace_all: bool | None = Field(default=None, description="Replace every occurrence instead of the only one.")


class WriteOutput(WireModel):
    path: str
    existed: bool
    size: int = Field(ge=0, alias="bytes")


class EditOutput(WireModel):
    path: str
    replacements: int = Field(ge=1)


def replace_file(path: Path, data: bytes) -> None:
    """Put data in the place of a file at once, or make it, with its parents: a reader sees the old or the new bytes,
    never a part. Mode and, where the process may, owner are kept. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        old = path.stat()
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a regular file")
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only")
    temporary = path.parent / f".fencepost-{secrets.token_hex(6)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            if old is not None:
                with contextlib.suppress(OSError):
                    os.fchown(fd, old.st_uid, old.st_gid)
                os.fchmod(fd, stat.S_IMODE(old.st_mode))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@dataclass(frozen=True, slots=True)
class _Normal:
    """File bytes with every CRLF as LF, and the way back to their positions in the file."""

    data: bytes
    returns: tuple[int, ...]
    """Positions in `data` of the line ends that are CRLF in the file."""

    @staticmethod
    def of(raw: bytes) -> _Normal:
        returns = tuple(match.start() - index for index, match in enumerate(re.finditer(b"\r\n", raw)))
        return _Normal(raw.replace(b"\r\n", b"\n"), returns)

    def raw(self, position: int) -> int:
        return position + bisect.bisect_left(self.returns, position)

    def line_end(self, start: int, end: int) -> bytes:
        """Give the line end that is used in a span, else the nearest after it, else before it, else LF."""
        at = self.data.find(b"\n", start, end)
        at = at if at >= 0 else self.data.find(b"\n", end)
        at = at if at >= 0 else self.data.rfind(b"\n", 0, start)
        index = bisect.bisect_left(self.returns, at)
        return b"\r\n" if at >= 0 and index < len(self.returns) and self.returns[index] == at else b"\n"


def _occurrences(data: bytes, wanted: bytes, *, overlapping: bool) -> list[int]:
    found, at = [], data.find(wanted)
    while at >= 0:
        found.append(at)
        at = data.find(wanted, at + (1 if overlapping else len(wanted)))
    return found


def _line_of(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _similar(data: bytes, wanted: bytes) -> list[int]:
    """Give the line numbers where text begins that differs from the wanted text in white space only."""
    words = wanted.split()
    if not words:
        return []
    pattern = rb"\s+".join(re.escape(word) for word in words)
    return [_line_of(data, match.start()) for match in re.finditer(rb"(?<!\S)" + pattern + rb"(?!\S)", data)]


def _where(lines: list[int]) -> str:
    return ", ".join(str(line) for line in lines[:5]) + (", ..." if len(lines) > 5 else "")


def _find(normal: _Normal, old: bytes, resource: str, *, replace_all: bool) -> list[int]:
    found = _occurrences(normal.data, old, overlapping=not replace_all)
    if not found:
        similar = _similar(normal.data, old)
        hint = (
            f" Similar text, with other white space, begins at line {_where(similar)}: copy it exactly." if similar
            else " Read the file and copy the text exactly."
        )  # fmt: skip
        raise ToolFailure(f"oldString was not found exactly in {resource}; the file is unchanged.{hint}")
    if len(found) > 1 and not replace_all:
        lines = _where([_line_of(normal.data, at) for at in found])
        raise ToolFailure(
            f"oldString is ambiguous in {resource}: {len(found)} matches, at lines {lines}; the file is unchanged. "
            "Give more of the text around it, or replaceAll to replace every one."
        )
    return found


def _common(left: bytes, right: bytes) -> int:
    """Give how many bytes both begin with."""
    shorter = min(len(left), len(right))
    return next((at for at in range(shorter) if left[at] != right[at]), shorter)


def splice(raw: bytes, old: str, new: str, resource: str, *, replace_all: bool) -> tuple[bytes, int]:
    """Give the file's bytes with `old` replaced by `new`, and how often it was.

    Line ends match whether they are LF or CRLF, and new ones are written as the replaced text has them. Bytes outside
    the difference of old and new are kept. Raises ToolFailure when `old` is not there, or there more than once (also
    overlapping) without replace_all.
    """
    wanted, given = (text.replace("\r\n", "\n").encode() for text in (old, new))
    if wanted == given:
        raise ToolFailure("oldString and newString are the same: nothing to change.")
    normal = _Normal.of(raw)
    found = _find(normal, wanted, resource, replace_all=replace_all)
    before = _common(wanted, given)
    after = _common(wanted[before:][::-1], given[before:][::-1])
    middle = given[before : len(given) - after]
    pieces, done = [], 0
    for at in found:
        start, end = normal.raw(at + before), normal.raw(at + len(wanted) - after)
        line_end = normal.line_end(at, at + len(wanted))
        pieces += [raw[done:start], middle.replace(b"\n", line_end)]
        done = end
    return b"".join([*pieces, raw[done:]]), len(found)


class _Files:
    """File changes one at a time per path: two calls of one step may edit the same file."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: weakref.WeakValueDictionary[Path, threading.Lock] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def holding(self, place: Place) -> Iterator[None]:
        """Hold the path, and turn what the file system refuses into a ToolFailure."""
        with self._guard:
            lock = self._locks.setdefault(place.path, threading.Lock())
        try:
            with lock:
                yield
        except FileNotFoundError:
            raise ToolFailure(f"File not found: {place.resource}") from None
        except OSError as error:
            raise ToolFailure(f"Cannot change {place.resource}: {error.strerror}") from None

    def write(self, directory: str, given: WriteInput) -> ToolOutput:
        place = locate(directory, given.path)
        data = given.content.encode()
        with self.holding(place):
            existed = place.path.exists()
            replace_file(place.path, data)
        text = f"{'Replaced' if existed else 'Created'} {place.resource} ({len(data)} bytes)."
        return _output(place, text, {"existed": existed, "bytes": len(data)})

    def edit(self, directory: str, given: EditInput) -> ToolOutput:
        place = locate(directory, given.path)
        with self.holding(place):
            if place.path.exists() and not place.path.is_file():
                raise ToolFailure(f"Not a file: {place.resource}")
            with place.path.open("rb") as handle:
                raw = handle.read(EDIT_BYTES + 1)
            if len(raw) > EDIT_BYTES:
                raise ToolFailure(f"Larger than {EDIT_BYTES >> 20} MiB, too large to edit: {place.resource}")
            replace_all = bool(given.replace_all)
            data, count = splice(raw, given.old_string, given.new_string, place.resource, replace_all=replace_all)
            replace_file(place.path, data)
        return _output(place, f"Edited {place.resource}: {count} replaced.", {"replacements": count})


def _output(place: Place, text: str, structured: dict[str, int]) -> ToolOutput:
    return ToolOutput(structured={"path": place.resource, **structured}, content=(TextItem(text=text),))


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work to its end: a cancellation is passed on only when the file is in its old or its new state."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=1.0)
        raise


def editing_tools() -> tuple[Tool[WriteInput], Tool[EditInput]]:
    """Give write and edit, which share their locks."""
    files = _Files()

    async def write(context: ToolContext, given: WriteInput) -> ToolOutput:
        return await _in_thread(lambda: files.write(context.invocation.directory, given))

    async def edit(context: ToolContext, given: EditInput) -> ToolOutput:
        return await _in_thread(lambda: files.edit(context.invocation.directory, given))

    def resources(directory: str, given: WriteInput | EditInput) -> tuple[str, ...]:
        return (locate(directory, given.path).resource,)

    def external(directory: str, given: WriteInput | EditInput) -> tuple[str, ...]:
        return locate(directory, given.path).external()

    return (
        Tool(
            name="write",
            description="Write a file: make it, with its parent directories, or replace its whole content.",
            input_model=WriteInput, action="edit", run=write, resources=resources, external=external,
            output_model=WriteOutput,
        ),
        Tool(
            name="edit",
            description=(
                "Replace one exact piece of text in a file. It must be there exactly once (else give more of the text "
                "around it), or replaceAll be true. Line ends match in either style, and the file keeps its own."
            ),
            input_model=EditInput, action="edit", run=edit, resources=resources, external=external,
            output_model=EditOutput,
        ),
    )  # fmt: skip
