"""Checks and cleaning of what tools take and give back, so that any output can be stored."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from fencepost.domain.clean import clean, clean_text
from fencepost.domain.tools import TextItem, ToolFailure, ToolOutput
from fencepost.telemetry import get_logger

CAPTURE_BYTES = 1 << 20

_SURROGATES = re.compile("[\ud800-\udfff]")

_log = get_logger(__name__)


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


def invalid(what: str, error: ValidationError) -> ToolFailure:
    """Give the failure that names, in one line, every field that does not fit and why."""
    parts = []
    for one in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(step) for step in one["loc"])
        parts.append(f"{where}: {one['msg']}" if where else one["msg"])
    return ToolFailure(f"Invalid tool {what}: " + clean_text(" ".join("; ".join(parts).split())))


def encode_output(output: object, declared: type[BaseModel] | None) -> ToolOutput:
    """Give a tool's output with its structured object as JSON, of the declared type if there is one, and clean text.

    File items pass as they are: a tool makes them clean itself. An object that JSON cannot hold is left out when there
    is content beside it. Raises ToolFailure for one without content, and for what has not the declared type.
    """
    if not isinstance(output, ToolOutput):
        raise ToolFailure(f"Invalid tool output: should be a ToolOutput, and is of type {type(output).__name__}")
    structured = output.structured
    if declared is not None:
        try:
            structured = declared.model_validate(structured).model_dump(by_alias=True, exclude_unset=True)
        except ValidationError as error:
            raise invalid("output", error) from None
    try:
        structured = clean(to_jsonable_python(clean(structured)))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if not output.content:
            raise ToolFailure(f"Invalid tool output: structured: cannot be written as JSON: {reason}") from None
        _log.warning("structured tool output left out", reason=reason)
        structured = {}
    items = tuple(
        item.model_copy(update={"text": clean_text(item.text)}) if isinstance(item, TextItem) else item
        for item in output.content
    )
    return output.model_copy(update={"structured": structured, "content": items})
