"""The read tool: a page of a text file or directory, or an image."""

from __future__ import annotations

import asyncio
import base64
import difflib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import Field

from fencepost.domain.clean import clean_text
from fencepost.domain.tools import FileItem, TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools.execution import decode
from fencepost.tools.outputs import OutputStore
from fencepost.tools.paths import Place, locate
from fencepost.tools.registry import Tool, ToolContext

PAGE_LINES = 2000
PAGE_BYTES = 50 * 1024
LINE_CHARS = 2000
IMAGE_BYTES = 20 * 1024 * 1024

_SNIFF_BYTES = 8192
_LINE_BYTES = LINE_CHARS * 4 + 2
_TEXT_CONTROLS = frozenset(b"\t\n\v\f\r\b\x1b")
_BINARY_STARTS = (b"PK\x03\x04", b"%PDF-", b"\x7fELF", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf")
_MAX_CONTROL_SHARE = 0.1


class ReadInput(WireModel):
    path: str = Field(min_length=1, description="File or directory, relative to the working directory or absolute.")
    offset: int | None = Field(default=None, ge=1, description="First line (or entry) to read; 1 is the first.")
    limit: int | None = Field(default=None, ge=1, le=PAGE_LINES, description="How many lines (or entries) to read.")


class ReadOutput(WireModel):
    """A page has `offset`, `lines` (or entries) and, when more follows, `next`; an image has `mime` and its `size`."""

    type: Literal["file", "directory", "image"]
    path: str
    offset: int | None = None
    lines: int | None = None
    next: int | None = None
    mime: str | None = None
    size: int | None = Field(default=None, alias="bytes")


@dataclass(frozen=True, slots=True)
class _Page:
    """Consecutive lines of something longer. `next` is the offset of the first line that is not in it, if any."""

    lines: tuple[str, ...]
    next: int | None
    passed: int


def image_mime(data: bytes) -> str | None:
    """Give the media type of an image that models can see, by its first bytes; None for anything else."""
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def is_binary(data: bytes) -> bool:
    """Say by its first bytes whether a file is not text: a NUL, a known binary format, or many control characters."""
    if b"\0" in data or data.startswith(_BINARY_STARTS):
        return True
    controls = sum(1 for byte in data if byte < 32 and byte not in _TEXT_CONTROLS)
    return controls > len(data) * _MAX_CONTROL_SHARE


def _lines(handle: BinaryIO) -> Iterator[str]:
    """Yield the lines without their ends, each within LINE_CHARS and never held as a whole."""
    while piece := handle.readline(_LINE_BYTES):
        size, rest = len(piece), piece
        while not rest.endswith(b"\n") and (rest := handle.readline(1 << 16)):
            size += len(rest)
        text = decode(piece).rstrip("\r\n")
        if len(text) > LINE_CHARS or size > len(piece):
            text = f"{text[:LINE_CHARS]} [... line truncated: {size} bytes in total]"
        yield text


def _page(lines: Iterable[str], offset: int, limit: int, room: int) -> _Page:
    kept: list[str] = []
    size, number = 0, 0
    for number, line in enumerate(lines, 1):
        if number < offset:
            continue
        size += len(line.encode()) + 1
        if len(kept) == limit or (kept and size > room):
            return _Page(tuple(kept), number, number)
        kept.append(line)
    return _Page(tuple(kept), None, number)


def _page_output(kind: str, place: Place, page: _Page, offset: int) -> ToolOutput:
    unit = "lines" if kind == "file" else "entries"
    if not page.lines and offset > max(1, page.passed):
        raise ToolFailure(f"Offset {offset} is past the end of {place.resource}: it has {page.passed} {unit}.")
    text = "\n".join(page.lines) or f"(The {kind} is empty.)"
    if page.next is not None:
        text += f"\n[{unit} {offset} to {page.next - 1} of more; go on with offset={page.next}]"
    structured = {"type": kind, "path": place.resource, "offset": offset, "lines": len(page.lines)}
    if page.next is not None:
        structured["next"] = page.next
    return ToolOutput(structured=structured, content=(TextItem(text=text),))


def _missing(place: Place) -> ToolFailure:
    try:
        names = [one.name for one in place.path.parent.iterdir()]
    except OSError:
        names = []
    close = [clean_text(one) for one in difflib.get_close_matches(place.path.name, names, n=3, cutoff=0.6)]
    hint = f" Did you mean {', '.join(close)} in the same directory?" if close else ""
    return ToolFailure(f"File not found: {place.resource}.{hint}")


def _image(place: Place, mime: str, handle: BinaryIO) -> ToolOutput:
    data = handle.read(IMAGE_BYTES + 1)
    if len(data) > IMAGE_BYTES:
        raise ToolFailure(f"Image is larger than {IMAGE_BYTES >> 20} MiB: {place.resource}")
    uri = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return ToolOutput(
        structured={"type": "image", "path": place.resource, "mime": mime, "bytes": len(data)},
        content=(
            TextItem(text="Image read successfully"),
            FileItem(uri=uri, mime=mime, name=clean_text(place.path.name)),
        ),
    )


def _entries(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(clean_text(entry.name) + ("/" if entry.is_dir() else "") for entry in entries)


def read_path(directory: str, given: ReadInput, outputs: OutputStore) -> ToolOutput:
    """Read as the tool does; blocks on the file system. Raises ToolFailure.

    A managed file is always text, whatever it looks like, and its neighbours are nobody's business.
    """
    place = locate(directory, given.path)
    managed = outputs.holds(place.path)
    offset, limit = given.offset or 1, min(given.limit or PAGE_LINES, outputs.max_lines)
    room = min(PAGE_BYTES, outputs.max_bytes)
    try:
        mode = place.path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _page_output("directory", place, _page(_entries(place.path), offset, limit, room), offset)
        if not stat.S_ISREG(mode):
            raise ToolFailure(f"Not a file or directory: {place.resource}")
        with place.path.open("rb") as handle:
            start = handle.read(_SNIFF_BYTES)
            handle.seek(0)
            mime = None if managed else image_mime(start)
            if mime is not None:
                return _image(place, mime, handle)
            if not managed and is_binary(start):
                raise ToolFailure(f"Cannot read binary file: {place.resource}")
            handle.seek(3 if start.startswith(b"\xef\xbb\xbf") else 0)
            return _page_output("file", place, _page(_lines(handle), offset, limit, room), offset)
    except (FileNotFoundError, NotADirectoryError):
        if managed:
            raise ToolFailure(f"File not found: {place.resource}. Kept output is removed after some days.") from None
        raise _missing(place) from None
    except OSError as error:
        raise ToolFailure(f"Cannot read {place.resource}: {error.strerror}") from None


async def _run(context: ToolContext, given: ReadInput) -> ToolOutput:
    return await asyncio.to_thread(read_path, context.invocation.directory, given, context.outputs)


READ = Tool(
    name="read",
    description=(
        "Read a text file, an image (jpeg, png, gif, webp) or a directory. Text comes in pages of at most "
        f"{PAGE_LINES} lines and {PAGE_BYTES >> 10} KiB; lines are cut after {LINE_CHARS} characters; the last line "
        "of a page says how to go on."
    ),
    input_model=ReadInput,
    action="read",
    run=_run,
    resources=lambda directory, given: (locate(directory, given.path).resource,),
    external=lambda directory, given: locate(directory, given.path).external(),
    opens=lambda directory, given: locate(directory, given.path).path,
    idempotent=True,
    bounds_itself=True,
    output_model=ReadOutput,
)
