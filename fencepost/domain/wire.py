"""Base of every model that is stored or sent: frozen, with the wire's spelling of names."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fencepost.domain.clean import clean
from fencepost.domain.errors import InvalidInputError

Given = TypeVar("Given", bound=BaseModel)


def wire_name(name: str) -> str:
    """Give a field's name on the wire: `assistant_message_id` is `assistantMessageID`, `old_string` is `oldString`."""
    head, *rest = name.split("_")
    return head + "".join("ID" if part == "id" else part.capitalize() for part in rest)


class WireModel(BaseModel):
    """A frozen value with camelCase names on the wire; unknown keys are kept out, absent optionals are not written."""

    model_config = ConfigDict(
        frozen=True, alias_generator=wire_name, populate_by_name=True, serialize_by_alias=True, extra="ignore"
    )

    def to_wire(self) -> dict[str, Any]:
        """Give the JSON object as stored: wire names, without keys whose value is None."""
        try:
            return self.model_dump(mode="json", by_alias=True, exclude_none=True)
        except UnicodeEncodeError:
            # Pydantic refuses a lone surrogate in free-form values and in keys; nothing could store it either.
            cleaned: dict[str, Any] = clean(self.model_dump(by_alias=True, exclude_none=True))
            return cleaned


def read_json(kind: type[Given], data: bytes) -> Given:
    """Read what a client sent. Raises InvalidInputError in one line that names the field and what is wrong with it."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def misunderstood(what: str, error: ValidationError) -> InvalidInputError:
    """Give the error for a value that a program passed: one line that names the field."""
    first = error.errors(include_url=False)[0]
    return InvalidInputError(f"{what}: {first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}")
