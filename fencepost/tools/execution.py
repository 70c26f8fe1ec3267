"""Bounds and cleaning of what tools give back, so that any output can be stored and shown to a model."""

from __future__ import annotations

import json
import re
from typing import Any

from fencepost.domain.clean import clean, clean_text
from fencepost.domain.tools import ContentItem, TextItem, ToolOutput

MAX_LINES = 2000
MAX_BYTES = 51_200
CAPTURE_BYTES = 1 << 20

_SURROGATES = re.compile("[\ud800-\udfff]")


def join_surrogates(text: str) -> str:
    """Give text that encodes as UTF-8: a split pair becomes its character, a lone half becomes U+FFFD."""
    if _SURROGATES.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def decode(data: bytes) -> str:
    """Decode raw bytes of a file or command as UTF-8 text that can be stored; what is no text becomes U+FFFD."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def clean_arguments(value: Any) -> Any:
    """Give a call's arguments with every surrogate joined or replaced; NUL stays, for the tool to judge."""
    if isinstance(value, str):
        return join_surrogates(value)
    if isinstance(value, dict):
        return {join_surrogates(str(key)): clean_arguments(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_arguments(item) for item in value]
    return value


class Capture:
    """Output of a command in bounded memory: the first and the last half of `limit` bytes, and the total size."""

    def __init__(self, limit: int = CAPTURE_BYTES) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; what falls between head and tail is forgotten."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._half:
            del self._tail[: len(self._tail) - self._half]

    @property
    def truncated(self) -> bool:
        """Say whether bytes were left out."""
        return self.total > len(self._head) + len(self._tail)

    def text(self) -> str:
        """Give the output as text that can be stored, with a line in the place of what was left out."""
        if not self.truncated:
            return decode(bytes(self._head + self._tail))
        left_out = self.total - len(self._head) - len(self._tail)
        notice = f"\n[... {left_out} bytes left out ...]\n"
        return decode(bytes(self._head)) + notice + decode(bytes(self._tail))


def bound_text(text: str, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> str:
    """Give the text unchanged when it is within both limits, else its head and tail around a line that says so."""
    data = text.encode()
    lines = text.splitlines(keepends=True)
    if len(lines) <= max_lines and len(data) <= max_bytes:
        return text
    notice = f"\n[... output truncated: {len(lines)} lines, {len(data)} bytes in total; the middle is left out ...]\n"
    line_room, byte_room = max(2, max_lines - 3) // 2, max(0, max_bytes - len(notice.encode())) // 2
    head = "".join(lines[:line_room]).encode()[:byte_room].decode("utf-8", "ignore")
    tail_bytes = "".join(lines[-line_room:]).encode()
    tail = tail_bytes[max(0, len(tail_bytes) - byte_room) :].decode("utf-8", "ignore")
    return head + notice + tail


def bound_output(output: ToolOutput, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> ToolOutput:
    """Bound the text that a model gets of an output (its structured object, printed, when it has no content).

    Structured and media stay as they are; an output within the limits is given back as it came.
    """
    texts = [item.text for item in output.content if isinstance(item, TextItem)]
    if output.content:
        text = "\n".join(texts)
    else:
        text = json.dumps(output.structured, indent=2, ensure_ascii=False, default=str)
    bounded = bound_text(text, max_lines, max_bytes)
    if bounded == text:
        return output
    media: list[ContentItem] = [item for item in output.content if not isinstance(item, TextItem)]
    return output.model_copy(update={"content": (TextItem(text=bounded), *media)})


def clean_output(output: ToolOutput) -> ToolOutput:
    """Clean every string of an output, file items excepted: a tool makes them clean itself."""
    items = tuple(
        item.model_copy(update={"text": clean_text(item.text)}) if isinstance(item, TextItem) else item
        for item in output.content
    )
    return output.model_copy(update={"structured": clean(output.structured), "content": items})
