"""Reading what clients send. Payloads are decoded here, by hand: a typed handler drops a malformed signal silently, and
an argument too few or too many would fail the workflow task for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RawValue

with workflow.unsafe.imports_passed_through():
    from fencepost.domain.errors import InvalidInputError
    from fencepost.domain.wire import WireModel, read_json

Given = TypeVar("Given", bound=WireModel)


def read(kind: type[Given], args: Sequence[object], *, optional: bool = False) -> Given:
    """Decode exactly one argument. With `optional`, no argument or null means the default value.

    Raises InvalidInputError in one line that names the field.
    """
    if len(args) > 1:
        raise InvalidInputError(f"takes one JSON object, not {len(args)} arguments")
    if not args or _is_null(args[0]):
        if not optional:
            raise InvalidInputError("needs one JSON object as its argument")
        return kind()
    raw = args[0]
    assert isinstance(raw, RawValue), "handlers declare no types, so that payloads arrive undecoded"
    if raw.payload.metadata.get("encoding") not in (b"json/plain", b"json/protobuf"):
        raise InvalidInputError("the argument must be a JSON object (encoding json/plain)")
    return read_json(kind, raw.payload.data)


def _is_null(raw: object) -> bool:
    return isinstance(raw, RawValue) and (
        raw.payload.metadata.get("encoding") == b"binary/null" or raw.payload.data.strip() == b"null"
    )
