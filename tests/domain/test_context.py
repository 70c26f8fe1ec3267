"""The context epoch: a baseline that stays, and what is said when something changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fencepost.domain.context import Epoch, Source, Update, initialize, reconcile, session_sources
from fencepost.domain.errors import (
    ContextBlockedError,
    ContextError,
    ContextSnapshotDecodeError,
    DuplicateContextKeyError,
)
from fencepost.domain.inbox import Location

DAY = 24 * 3_600 * 1_000
NOON = 20_000 * DAY + DAY // 2


def source(name: str, value: Any, removed: str | None = None) -> Source:
    return Source(
        key=f"test/{name}",
        value=value,
        baseline=lambda value: f"{name} is {value}",
        update=lambda before, value: f"{name} was {before}, is {value}",
        fits=lambda stored: isinstance(stored, int),
        removed=removed,
    )


def entry(value: Any, **more: str) -> dict[str, Any]:
    return {"value": value, **more}


def test_an_epoch_begins_with_all_texts_in_the_order_of_the_sources() -> None:
    epoch = initialize([source("b", 2), source("a", 1, removed="no a any more")])

    assert epoch.baseline == "b is 2\n\na is 1"
    assert epoch.snapshot == {"test/b": {"value": 2}, "test/a": {"value": 1, "removed": "no a any more"}}


def test_no_epoch_begins_while_a_source_is_unavailable() -> None:
    with pytest.raises(ContextBlockedError, match="test/b, test/c") as blocked:
        initialize([source("a", 1), source("b", None), source("c", None)])
    assert blocked.value.keys == ("test/b", "test/c")


def test_what_is_unchanged_is_not_said_again() -> None:
    sources = [source("a", 1), source("b", 2, removed="gone")]

    assert reconcile(initialize(sources).snapshot, sources) is None


def test_changes_are_one_text_and_the_snapshot_goes_along() -> None:
    """A value that changed, a source that is new, and one that is gone."""
    told = {"test/a": entry(1), "test/same": entry(7), "test/gone": entry(3, removed="gone is no more")}
    sources = [source("a", 2), source("same", 7), source("new", 4)]

    assert reconcile(told, sources) == Update(
        "a was 1, is 2\n\nnew is 4\n\ngone is no more",
        {"test/a": {"value": 2}, "test/same": {"value": 7}, "test/new": {"value": 4}},
    )
    assert told["test/a"] == {"value": 1}


def test_what_is_unavailable_keeps_what_was_told() -> None:
    """Nothing is said of it, whether it was told before or never, and the others are not held up."""
    told = {"test/a": entry(1), "test/b": entry(2)}

    assert reconcile(told, [source("a", None), source("b", 2), source("c", None)]) is None
    assert reconcile(told, [source("a", None), source("b", 3)]) == Update(
        "b was 2, is 3", {"test/a": {"value": 1}, "test/b": {"value": 3}}
    )


@pytest.mark.parametrize(
    "told", [{"test/a": entry("one"), "test/b": entry(2)}, {"test/b": entry(2), "test/gone": entry(3)}]
)
def test_what_no_update_can_say_begins_a_new_epoch(told: dict[str, Any]) -> None:
    """A stored value that its source cannot read, and a source that went without a word. What was told before and is
    unavailable holds it up; what was never told does not."""
    sources = [source("a", 1), source("b", 2), source("c", None)]

    assert reconcile(told, sources) == Epoch("a is 1\n\nb is 2", {"test/a": {"value": 1}, "test/b": {"value": 2}})
    assert reconcile(told, [source("a", 1), source("b", None)]) is None


@pytest.mark.parametrize(
    "told",
    [None, "text", 7, ["test/a"], {"test/a": 1}, {"test/a": {}}, {"test/a": {"value": 1, "removed": 2}}],
    ids=repr,
)
def test_a_snapshot_that_is_none_is_an_error(told: object) -> None:
    with pytest.raises(ContextSnapshotDecodeError):
        reconcile(told, [source("a", 1)])


def test_two_sources_of_one_key_are_an_error() -> None:
    twice = [source("a", 1), source("b", 1), source("a", 2)]

    with pytest.raises(DuplicateContextKeyError, match="test/a"):
        initialize(twice)
    with pytest.raises(DuplicateContextKeyError, match="test/a"):
        reconcile({}, twice)


def test_an_empty_text_is_an_error() -> None:
    mute = replace(source("a", 1), baseline=lambda _: " \n", update=lambda _before, _value: "")

    with pytest.raises(ContextError, match="nothing to say"):
        initialize([mute])
    told: list[dict[str, Any]] = [{}, {"test/a": entry(2)}, {"test/b": entry(2, removed="")}]
    for snapshot, sources in zip(told, ([mute], [mute], []), strict=True):
        with pytest.raises(ContextError, match="nothing to say"):
            reconcile(snapshot, sources)


def test_a_session_is_told_its_directory_and_the_date() -> None:
    """By UTC, at every hour of the day the same."""
    here = session_sources(Location(directory="/work"), NOON)
    told = initialize(here)

    assert told.baseline == "Working directory: /work\n\nToday's date: 2024-10-04 (UTC)"
    for now in (20_000 * DAY, 20_001 * DAY - 1):
        assert reconcile(told.snapshot, session_sources(Location(directory="/work"), now)) is None


def test_a_new_day_and_a_move_are_told_once() -> None:
    told = initialize(session_sources(Location(directory="/work"), NOON)).snapshot
    for location, now, text in (
        (Location(directory="/work"), NOON + DAY, "Today's date is now 2024-10-05 (UTC)."),
        (
            Location(directory="/work", workspace_id="w1"),
            NOON + DAY,
            "The working directory has changed from /work to /work (workspace w1).",
        ),
        (
            Location(directory="/there"),
            NOON + 2 * DAY,
            (
                "The working directory has changed from /work (workspace w1) to /there.\n\n"
                "Today's date is now 2024-10-06 (UTC)."
            ),
        ),
    ):
        sources = session_sources(location, now)
        update = reconcile(told, sources)
        assert isinstance(update, Update)
        assert update.text == text
        told = update.snapshot
        assert reconcile(told, sources) is None


@pytest.mark.parametrize("stored", [7, {}, {"directory": 7}, {"directory": "/work", "workspace": 7}])
def test_a_place_that_cannot_be_read_begins_a_new_epoch(stored: object) -> None:
    sources = session_sources(Location(directory="/work"), NOON)

    assert reconcile({"session/environment": {"value": stored}}, sources) == initialize(sources)
