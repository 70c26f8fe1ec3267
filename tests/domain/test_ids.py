"""Identifiers: their shape, their order, and that derived ones are always the same."""

from __future__ import annotations

import re
import time

import pytest

from fencepost.domain.ids import Prefix, derived_id, fresh_id, is_message_id, is_session_id

PREFIXES: tuple[Prefix, ...] = ("ses", "msg", "evt", "per", "que", "psv", "exe", "int", "prj")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_ids_are_a_prefix_and_26_characters(prefix: Prefix) -> None:
    """Fresh ones begin with twelve hexadecimal digits of time, derived ones are a hash throughout."""
    assert re.fullmatch(rf"{prefix}_[0-9a-f]{{12}}[0-9A-Za-z]{{14}}", fresh_id(prefix))
    assert re.fullmatch(rf"{prefix}_[0-9A-Za-z]{{26}}", derived_id(prefix, "ses_1", 2))


def _at(monkeypatch: pytest.MonkeyPatch, milliseconds: int, prefix: Prefix) -> str:
    monkeypatch.setattr(time, "time_ns", lambda: milliseconds * 1_000_000)
    return fresh_id(prefix)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_fresh_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch, prefix: Prefix) -> None:
    """Sessions newest first, everything else oldest first."""
    made = [_at(monkeypatch, 1_780_000_000_000 + step, prefix) for step in (0, 1, 2, 1_000, 86_400_000)]

    assert made == sorted(made, reverse=prefix == "ses")


def test_fresh_ids_differ() -> None:
    """Also within one millisecond."""
    assert len({fresh_id("evt") for _ in range(1_000)}) == 1_000


def test_a_derived_id_stands_for_its_parts() -> None:
    """The same ones give the same id, in any process; others, or another grouping of them, give another."""
    assert derived_id("evt", "a", 1) == derived_id("evt", "a", 1) == "evt_gSHrzWp5f82cNZcvejZzXiRpym"
    assert len({derived_id("evt", *parts) for parts in (["a", 1], ["a1"], ["a", 2], [1, "a"], ["a", 1, ""])}) == 5
    assert derived_id("evt", "a") != derived_id("msg", "a")
    assert derived_id("evt", "a\ud800") != derived_id("evt", "a\ufffd")


@pytest.mark.parametrize(
    ("text", "session", "message"),
    [
        pytest.param(fresh_id("ses"), True, False, id="fresh session"),
        pytest.param(fresh_id("msg"), False, True, id="fresh message"),
        (derived_id("msg", "anything"), False, True),
        ("ses-my-own_1", True, False),
        ("msg_" + "a" * 59, False, True),
        ("msg_" + "a" * 60, False, False),
        ("ses" + "a" * 60, True, False),
        ("ses" + "a" * 61, False, False),
        ("ses_" + "a" * 64, True, False),
        ("ses_" + "a" * 65, False, False),
        ("msg_", False, False),
        ("ses", False, False),
        ("msg_a\n", False, False),
        ("ses_a b", False, False),
        ("ses_ä", False, False),
        ("", False, False),
    ],
)
def test_what_may_name_a_session_or_a_message(text: str, session: bool, message: bool) -> None:
    """Clients may bring ids of their own, within limits."""
    assert (is_session_id(text), is_message_id(text)) == (session, message)
