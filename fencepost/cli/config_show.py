"""`fencepost config show`: every setting, its value, and where that comes from. Secrets are withheld."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fencepost import presets
from fencepost.cli import terminal
from fencepost.cli.entry import OK, Signals
from fencepost.cli.findings import line_width
from fencepost.config import PREFIX, Sources, read_sources, temporal_connect_options

Kind: TypeAlias = Literal["default", "file", "option", "environment"]

WITHHELD: Final = "***"
_SECRET_TABLES: Final = frozenset({"headers", "options"})
"""Tables whose values may hold a secret, whatever their keys are called."""

_SECRET_NAME: Final = re.compile(r"pass|secret|token|key|auth|sig", re.IGNORECASE)
_LONGEST_VALUE: Final = 100
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+\Z")
_TEMPORAL: Final = (
    ("address", "target_host", "TEMPORAL_ADDRESS", "localhost:7233"),
    ("namespace", "namespace", "TEMPORAL_NAMESPACE", "default"),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One setting. `where` is the file or the variable that its value comes from."""

    key: str
    value: Any
    source: Kind
    where: str | None = None

    def origin(self) -> str:
        """Say where the value comes from."""
        if self.source == "option":
            return f"--config {self.where}"
        return self.where or "default"


async def show(config: Path | None, as_json: bool, signals: Signals) -> int:
    """Show the settings as they are in force here. Raises ConfigurationError for a wrong one."""
    del signals
    environ = dict(os.environ)
    sources = read_sources(config, environ)
    shown = [*settings_of(sources, environ, is_option=config is not None), *_temporal(environ)]
    file = str(sources.file) if sources.file is not None else None
    if as_json:
        rows = [{"key": one.key, "value": one.value, "source": one.source, "where": one.where} for one in shown]
        terminal.out(json.dumps({"file": file, "settings": rows}, ensure_ascii=False))
        return OK
    width = line_width()
    for one in shown:
        value = json.dumps(one.value, ensure_ascii=False) if one.value is not None else "not set"
        if len(value) > _LONGEST_VALUE:
            value = f"{value[:_LONGEST_VALUE]}..."
        line, origin = f"{one.key} = {terminal.one_line(value)}", terminal.one_line(one.origin())
        if width is not None and len(line) + len(origin) + 4 > width:
            terminal.out(line)
            terminal.out(f"    # {origin}")
        else:
            terminal.out(f"{line}  # {origin}")
    return OK


def settings_of(sources: Sources, environ: Mapping[str, str], *, is_option: bool) -> Iterator[Shown]:
    """Give every setting in the order of its definition. `is_option` says that the file was named by --config.

    Raises ConfigurationError for a wrong one.
    """
    values = sources.settings().model_dump(mode="json")
    built_in = len(presets.PERMISSIONS)
    for path, value in _leaves((), values):
        kind, where = _source(path, sources, environ, is_option)
        if path[0] == "permissions":
            for number, rule in enumerate(value):
                own = (kind, where) if number >= built_in else ("default", None)
                yield Shown(f"permissions[{number}]", rule, *own)
        else:
            yield Shown(_key(path), _without_secrets(path, value), kind, where)


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    else:
        yield path, value


def _source(
    path: tuple[str, ...], sources: Sources, environ: Mapping[str, str], is_option: bool
) -> tuple[Kind, str | None]:
    if _given(path, sources.from_environment):
        return "environment", _variable(path, environ)
    if _given(path, sources.from_file):
        return "option" if is_option else "file", str(sources.file)
    return "default", None


def _given(path: tuple[str, ...], values: Any) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _variable(path: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Give the variable that holds this key: its own, or one that holds a whole table as JSON."""
    by_name = {name.upper(): name for name, value in environ.items() if value}
    for length in range(len(path), 0, -1):
        name = f"{PREFIX}{'__'.join(path[:length])}".upper()
        if name in by_name:
            return by_name[name]
    return f"{PREFIX}{path[0].upper()}"


def _key(path: tuple[str, ...]) -> str:
    return ".".join(part if _BARE.match(part) else json.dumps(part) for part in path)


def _without_secrets(path: tuple[str, ...], value: Any) -> Any:
    if not _SECRET_TABLES.isdisjoint(path[:-1]):
        return WITHHELD
    return url_without_secrets(value) if isinstance(value, str) and "://" in value else value


def url_without_secrets(url: str) -> str:
    """Give an address without its password and without what looks like one among its parameters."""
    parts = urlsplit(url)
    account, at, host = parts.netloc.rpartition("@")
    user, colon, _ = account.partition(":")
    netloc = f"{user}:{WITHHELD}@{host}" if colon else f"{account}{at}{host}"
    query = [
        (name, WITHHELD if _SECRET_NAME.search(name) else text)
        for name, text in parse_qsl(parts.query, keep_blank_values=True)
    ]
    path = urlunsplit(("", "", parts.path, urlencode(query, safe="/:,*"), parts.fragment))
    return f"{parts.scheme}://{netloc}{path}"


def _temporal(environ: Mapping[str, str]) -> Iterator[Shown]:
    """Give where Temporal is, which its own variables and file say."""
    options: Mapping[str, Any] = temporal_connect_options(environ)
    for key, option, variable, default in _TEMPORAL:
        value = options.get(option)
        if environ.get(variable):
            yield Shown(f"temporal.{key}", value, "environment", variable)
        elif value is not None and value != default:
            yield Shown(f"temporal.{key}", value, "file", environ.get("TEMPORAL_CONFIG_FILE", "Temporal's own file"))
        else:
            yield Shown(f"temporal.{key}", value or default, "default")
