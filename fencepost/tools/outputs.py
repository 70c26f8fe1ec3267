"""Managed output: what is too long for a model goes whole into a private file, and the model gets its head and tail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fencepost.clock import Clock
from fencepost.domain.ids import fresh_id
from fencepost.domain.tools import ContentItem, StorageError, TextItem, ToolOutput
from fencepost.telemetry import get_logger

MAX_LINES: Final = 2000
MAX_BYTES: Final = 51_200
SWEEP_SECONDS: Final = 3600.0

_NAME = re.compile(r"tool_[0-9A-Za-z]+\Z")
_PART = re.compile(r"\.tool_[0-9A-Za-z]+\.part\Z")
_NOTICE_LINES = 3
_CANCEL_SECONDS = 1.0
_DAY_SECONDS = 86_400

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OutputStore:
    """The directory of managed files, which is made when it is first needed, and the limits of what a model gets."""

    directory: Path
    max_lines: int = MAX_LINES
    max_bytes: int = MAX_BYTES

    def holds(self, path: Path) -> bool:
        """Say whether a resolved path is that of a managed file, there or not (any more). Blocks on the file system."""
        managed = path.parent == Path(os.path.realpath(self.directory)) and _NAME.match(path.name) is not None
        return managed and not path.is_dir()

    async def bound(self, output: ToolOutput) -> ToolOutput:
        """Give the output unchanged when its text keeps the limits; else with an excerpt that names the managed file.

        The text is that of the content, or the printed structured object when there is no content. Structured and
        media stay as they are. Raises StorageError when the file cannot be written; a cancellation leaves no file.
        """
        text = _text_of(output)
        if _count_lines(text) <= self.max_lines and len(text.encode()) <= self.max_bytes:
            return output
        path = self.directory / fresh_id("tool")
        await self._keep(path, text)
        media: list[ContentItem] = [item for item in output.content if not isinstance(item, TextItem)]
        cut = excerpt(text, str(path), self.max_lines, self.max_bytes)
        return output.model_copy(
            update={"content": (TextItem(text=cut), *media), "output_paths": (*output.output_paths, str(path))}
        )

    async def _keep(self, path: Path, text: str) -> None:
        abandoned = threading.Event()
        writing = asyncio.ensure_future(asyncio.to_thread(_write, path, text.encode(), abandoned))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.wait({writing}, timeout=_CANCEL_SECONDS)
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # it interests nobody now
            _discard(path)
            raise
        except OSError as error:
            size = _size(text)
            reason = error.strerror or type(error).__name__
            _log.warning("tool output not kept", directory=str(self.directory), size=size, reason=reason)
            raise StorageError(
                f"StorageError: the tool ran, but its output ({size}) is too large to show and could not be kept in "
                f"{self.directory}: {reason}. What it did is done; to see a result, let it give less."
            ) from None


def _text_of(output: ToolOutput) -> str:
    if output.content:
        return "\n".join(item.text for item in output.content if isinstance(item, TextItem))
    return json.dumps(output.structured, indent=2, ensure_ascii=False)


def _count_lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and text != "")


def _size(text: str) -> str:
    lines = _count_lines(text)
    return f"{lines} {'line' if lines == 1 else 'lines'}, {len(text.encode())} bytes"


def excerpt(text: str, path: str, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> str:
    """Give head and tail of a text that is over a limit, around a line that names the file with all of it.

    The whole keeps both limits, unless they leave no room for that line.
    """
    lines = text.split("\n")
    notice = (
        f"\n[... output truncated: {_size(text)} in total; the middle is left out. "
        f"All of it is in the file {path}: read it in pages, or grep it ...]\n"
    )
    line_room = max(0, max_lines - _NOTICE_LINES) // 2
    byte_room = max(0, max_bytes - len(notice.encode())) // 2
    # A limit that is exceeded is more than twice the room under it: head and tail never overlap.
    head = "\n".join(lines[:line_room]).encode()[:byte_room].decode("utf-8", "ignore")
    last = "\n".join(lines[max(0, len(lines) - line_room) :]).encode()
    tail = last[max(0, len(last) - byte_room) :].decode("utf-8", "ignore")
    return head + notice + tail


def _write(path: Path, data: bytes, abandoned: threading.Event) -> None:
    """Make the file at once, readable by its owner alone; nothing is left of one that fails or is abandoned."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(fd)  # some file systems find out only now that they are full
        if abandoned.is_set():
            part.unlink()
        else:
            part.replace(path)
    except BaseException:
        _discard(part)
        raise


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _managed_files(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if (_NAME.match(entry.name) or _PART.match(entry.name)) and entry.is_file(follow_symlinks=False):
                yield entry


def _sweep(directory: Path, before: float) -> int:
    removed = 0
    for entry in _managed_files(directory):
        # Another worker may sweep the same directory, and one file that resists must not keep the others.
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime < before:
                Path(entry.path).unlink()
                removed += 1
    return removed


async def sweep(directory: Path, days: float, clock: Clock) -> int:
    """Remove the managed files that were written more than `days` ago, and say how many; all else stays.

    Raises OSError when the directory is there and cannot be listed.
    """
    try:
        return await asyncio.to_thread(_sweep, directory, clock.now_ms() / 1000 - days * _DAY_SECONDS)
    except FileNotFoundError:
        return 0


async def keep_swept(directory: Path, days: float, clock: Clock, seconds: float = SWEEP_SECONDS) -> None:
    """Sweep now and then every so many seconds, until cancelled; a sweep that fails is logged, and tried again."""
    while True:
        try:
            removed = await sweep(directory, days, clock)
        except OSError as error:
            _log.warning("tool output not swept", directory=str(directory), reason=error.strerror)
        else:
            if removed:
                _log.info("tool output swept", directory=str(directory), removed=removed)
        await asyncio.sleep(seconds)
