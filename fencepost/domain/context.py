"""The context epoch: what a model is told of its surroundings, as a baseline, and then change by change.

The baseline is part of the system text and stays the same to the byte, so that providers can cache what follows it.
Changes are messages of their own, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from fencepost.domain.errors import (
    ContextBlockedError,
    ContextError,
    ContextSnapshotDecodeError,
    DuplicateContextKeyError,
)
from fencepost.domain.inbox import Location

Entry: TypeAlias = Mapping[str, Any]
Snapshot: TypeAlias = Mapping[str, Entry]
"""By key, what the model was told last: `value`, and as `removed` what is to be said when the source is gone."""


@dataclass(frozen=True, slots=True)
class Source:
    """One thing that the model is told of. `key` is `area/name`; `value` is a JSON value, None while it cannot be had.

    Texts are made when they are wanted: `baseline` of a value, `update` of the value told last and the present one.
    `fits` says whether a stored value is one that `update` can read.
    """

    key: str
    value: Any
    baseline: Callable[[Any], str]
    update: Callable[[Any, Any], str]
    fits: Callable[[Any], bool]
    removed: str | None = None

    def entry(self) -> Entry:
        """Give what the snapshot holds of it."""
        return {"value": self.value} if self.removed is None else {"value": self.value, "removed": self.removed}


@dataclass(frozen=True, slots=True)
class Epoch:
    """A baseline, and the snapshot of what it says."""

    baseline: str
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Update:
    """What has changed since the snapshot, as one text, and the snapshot after it."""

    text: str
    snapshot: Snapshot


def initialize(sources: Sequence[Source]) -> Epoch:
    """Give the epoch that begins with these sources.

    Raises ContextBlockedError while one of them is unavailable, DuplicateContextKeyError, and ContextError for an
    empty text.
    """
    _by_key(sources)
    blocked = [source.key for source in sources if source.value is None]
    if blocked:
        raise ContextBlockedError(f"the session's context cannot be had now: {', '.join(blocked)}", keys=blocked)
    texts = [_text(source.key, source.baseline(source.value)) for source in sources]
    return Epoch("\n\n".join(texts), {source.key: source.entry() for source in sources})


def reconcile(told: object, sources: Sequence[Source]) -> Update | Epoch | None:
    """Compare what the model was told (a stored snapshot) with the present sources.

    Gives None when nothing has changed, an Update of what has, and a new Epoch when an update cannot say it: a stored
    value that its source cannot read, or a source that is gone without a word for that. What is unavailable stays as
    it was told; a new epoch waits for it.

    Raises ContextSnapshotDecodeError when the snapshot is none, DuplicateContextKeyError, and ContextError for an
    empty text.
    """
    snapshot, present = _decoded(told), _by_key(sources)
    texts: list[str] = []
    changed = dict(snapshot)
    for source in sources:
        before = snapshot.get(source.key)
        if source.value is None or (before is not None and before["value"] == source.value):
            continue
        if before is None:
            text = source.baseline(source.value)
        elif source.fits(before["value"]):
            text = source.update(before["value"], source.value)
        else:
            return _replaced(snapshot, sources)
        texts.append(_text(source.key, text))
        changed[source.key] = source.entry()
    for key, entry in snapshot.items():
        if key not in present:
            if "removed" not in entry:
                return _replaced(snapshot, sources)
            texts.append(_text(key, entry["removed"]))
            del changed[key]
    return Update("\n\n".join(texts), changed) if texts else None


def _replaced(snapshot: Snapshot, sources: Sequence[Source]) -> Epoch | None:
    """Begin anew. What was never told does not hold it up; what was told and is unavailable now does."""
    try:
        return initialize([source for source in sources if source.value is not None or source.key in snapshot])
    except ContextBlockedError:
        return None


def _by_key(sources: Sequence[Source]) -> Mapping[str, Source]:
    found = {source.key: source for source in sources}
    if len(found) < len(sources):
        keys = [source.key for source in sources]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateContextKeyError(f"two sources of the session's context have the key {twice}")
    return found


def _text(key: str, text: str) -> str:
    if not text.strip():
        raise ContextError(f"the source {key} of the session's context has nothing to say")
    return text


def _decoded(told: object) -> Snapshot:
    """Look at the snapshot as it is stored; the values in it are their sources' affair."""
    if not isinstance(told, Mapping):
        raise ContextSnapshotDecodeError(f"it is no object but {type(told).__name__}")
    for key, entry in told.items():
        if not isinstance(entry, Mapping) or "value" not in entry:
            raise ContextSnapshotDecodeError(f"its entry {key!r} has no value")
        if not isinstance(entry.get("removed", ""), str):
            raise ContextSnapshotDecodeError(f"in its entry {key!r} the word for a removal is no text")
    return told


def session_sources(location: Location, now: int) -> tuple[Source, ...]:
    """Give what every session is told of: where it works, and the date. `now` is the database's time in milliseconds:
    the clocks of workers differ, and the date would go to and fro."""
    place = {"directory": location.directory}
    if location.workspace_id is not None:
        place["workspace"] = location.workspace_id
    date = datetime.fromtimestamp(now / 1000, UTC).date().isoformat()
    return (
        Source("session/environment", place, _environment, _moved, _is_place),
        Source("session/date", date, _date, _new_date, _is_text),
    )


def _place(value: Mapping[str, str]) -> str:
    workspace = value.get("workspace")
    return value["directory"] if workspace is None else f"{value['directory']} (workspace {workspace})"


def _environment(value: Mapping[str, str]) -> str:
    return f"Working directory: {_place(value)}"


def _moved(before: Mapping[str, str], value: Mapping[str, str]) -> str:
    return f"The working directory has changed from {_place(before)} to {_place(value)}."


def _is_place(value: object) -> bool:
    return isinstance(value, Mapping) and _is_text(value.get("directory")) and _is_text(value.get("workspace", ""))


def _date(value: str) -> str:
    return f"Today's date: {value} (UTC)"


def _new_date(_before: str, value: str) -> str:
    return f"Today's date is now {value} (UTC)."


def _is_text(value: object) -> bool:
    return isinstance(value, str)
