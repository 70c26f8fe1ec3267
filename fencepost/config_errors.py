"""One line for a wrong setting: where it stands, its key, and what is allowed there."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_OTHER_VARIABLES = ("CONFIG", "TEST_DATABASE_URL")
_QUIET = frozenset({"database_url", "headers", "options"})
"""Keys whose values may hold a secret and are not repeated in a message."""

_LONGEST_ECHO = 60
_PLAINLY = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type", "finite_number"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("string_type",), "must be text"),
}
"""What pydantic says of a value of another kind, in words for people."""


def misspelt_variable(settings: type[BaseModel], environ: Mapping[str, str], prefix: str) -> str | None:
    """Say which variable looks like one of ours with a typing mistake, None when none does.

    Other names with our prefix pass: they may belong to someone's own scripts.
    """
    known = {prefix + name.upper() for name in (*settings.model_fields, *_OTHER_VARIABLES)}
    for name in sorted(environ):
        first = name.upper().split("__")[0]
        if first.startswith(prefix) and first not in known:
            close = difflib.get_close_matches(first, known, n=1, cutoff=0.9)
            if close:
                return f"environment variable {name}: there is no such setting; did you mean {close[0]}?"
    return None


def explain(
    error: ValidationError,
    settings: type[BaseModel],
    file: Path | None,
    from_environment: Mapping[str, Any],
    prefix: str,
) -> str:
    """Give one line for the first thing that is wrong, and say how many more there are."""
    details = error.errors(include_url=False)
    first = details[0]
    path = first["loc"]
    if _holds(from_environment, path):
        where = f"environment variable {prefix}{'__'.join(str(part).upper() for part in path)}"
    else:
        where = f"{file}: {_key(path)}" if file is not None else _key(path)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{where}: {_problem(first, settings)}{more}".replace("\n", " ")


def _key(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "settings"


def _holds(values: Any, path: Sequence[str | int]) -> bool:
    """Say whether the value that the path leads to, or the whole that should have held it, came from these values."""
    for part in path:
        if not isinstance(values, Mapping):
            return True
        if part not in values:
            return False
        values = values[part]
    return bool(path)


def _problem(detail: ErrorDetails, settings: type[BaseModel]) -> str:
    path = detail["loc"]
    if detail["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(settings, path[:-1]))
        close = difflib.get_close_matches(str(path[-1]), allowed, n=1) or _elsewhere(settings, str(path[-1]))
        hint = f"did you mean {close[0]}? " if close else ""
        return f"there is no such key; {hint}allowed: {', '.join(allowed)}"
    if detail["type"] == "missing":
        return "is missing"
    message = _PLAINLY.get(detail["type"]) or detail["msg"].removeprefix("Value error, ").replace(
        "Input should be", "must be"
    )
    value = detail["input"]
    plain = isinstance(value, str | int | float | bool) and len(repr(value)) <= _LONGEST_ECHO
    if plain and _QUIET.isdisjoint(map(str, path)) and detail["type"] != "value_error":
        message += f", not {value!r}"
    return message


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Give the names of the keys that are allowed where the path leads, none when that is no table of ours."""
    annotation: Any = model
    for part in path:
        annotation = _inner(annotation, part)
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _elsewhere(settings: type[BaseModel], key: str) -> list[str]:
    """Give the key of a table that is closest to this one, which stands where no such key is known."""
    tables = {name: _without_none(field.annotation) for name, field in settings.model_fields.items()}
    known = {
        key: f"{name}.{key}"
        for name, table in tables.items()
        if isinstance(table, type) and issubclass(table, BaseModel)
        for key in table.model_fields
    }
    return [known[close] for close in difflib.get_close_matches(key, known, n=1, cutoff=0.8)]


def _inner(annotation: Any, part: str | int) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return _without_none(field.annotation) if field is not None else None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return _without_none(arguments[1])
    return _without_none(arguments[0]) if origin is tuple else None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        return others[0] if len(others) == 1 else None
    return annotation
