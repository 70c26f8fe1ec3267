"""What the benchmarks say: a figure keeps to its bound or not, the table shows both, the options choose."""

from __future__ import annotations

import json

import pytest

from bench.__main__ import SUBJECTS, chosen, parsed
from bench.figures import Figure, number, table
from bench.provider import Reply, Stamp, stamp_of, text_after
from fencepost.providers.script import CleanEof, Finish, Pause, Raw, Say


@pytest.mark.parametrize(
    ("value", "at_least", "met"),
    [(1.6, False, True), (1.61, False, False), (1.6, True, True), (1.59, True, False)],
    ids=["at-the-most", "above", "at-the-least", "below"],
)
def test_a_bound_is_met_up_to_its_value(value: float, at_least: bool, met: bool) -> None:
    """A value at its bound keeps to it, whichever way the bound goes."""
    figure = Figure("turns", "a turn", value, 1.6, at_least=at_least)

    assert figure.met is met
    assert json.loads(json.dumps(figure.as_json()))["met"] is met


@pytest.mark.parametrize(
    ("value", "written"), [(16, "16"), (16.0, "16"), (1.5678, "1.57"), (5999.4, "5,999"), (0.001, "0.00")]
)
def test_numbers_have_as_many_digits_as_are_read(value: float, written: str) -> None:
    """Counts are whole, ratios have two digits, large values none."""
    assert number(value) == written


def test_the_table_shows_value_bound_and_verdict() -> None:
    """One line for each figure under its subject, and a count at the end."""
    figures = [
        Figure("turns", "ratio", 1.2, 1.6, detail={"floor ms": 20.5}),
        Figure("turns", "rate", 0.5, 0.6, at_least=True),
        Figure("memory", "peak", 351, 350, "MB"),
    ]

    lines = [" ".join(line.split()) for line in table(figures).splitlines()]

    assert lines == [
        "value bound met",
        "turns",
        "ratio 1.20 <= 1.60 yes floor ms 20.50",
        "rate 0.50 >= 0.60 NO",
        "memory",
        "peak [MB] 351 <= 350 NO",
        "1 of 3 bounds met",
    ]


def test_options_choose_measurements() -> None:
    """All of them by default, in one order; otherwise those that are named."""
    assert tuple(chosen(parsed([]))) == SUBJECTS
    assert tuple(chosen(parsed(["--only", "memory", "--only", "turns"]))) == ("turns", "memory")


def test_the_provider_streams_what_a_prompt_asks_for() -> None:
    """A stamp first, when it is asked for, then so many chunks; no stream of a gate begins before all have come."""
    reply = Reply()
    wanted = {"chunks": 3, "delay": 0.5, "stamp": True, "gate": "one", "of": 2}
    body = {"messages": [{"role": "user", "content": json.dumps(wanted)}]}

    gate, stamp, words, end = reply(body)

    assert isinstance(gate, Pause)
    assert isinstance(stamp, Stamp)
    assert (words, end) == (Say("word " * 3, 3, 0.5), Finish())
    assert not gate.gate.is_set()  # type: ignore[union-attr]
    reply(body)
    assert gate.gate.is_set()  # type: ignore[union-attr]


def test_the_provider_gives_the_bodies_that_it_had() -> None:
    """The last ones in their order, for sending them again."""
    reply = Reply()
    bodies = [{"messages": [{"role": "user", "content": f"say: {number}"}]} for number in range(3)]
    for body in bodies:
        reply(body)

    given, end = reply({"bodies": 2})

    assert isinstance(given, Raw)
    assert json.loads(given.data) == bodies[1:]
    assert end == CleanEof()


def test_a_stamp_is_the_time_of_sending() -> None:
    """It is made when the bytes are, and a reader finds it at the beginning of the text."""
    stamp = Stamp()
    first, second = (
        json.loads(data.removeprefix(b"data: "))["choices"][0]["delta"]["content"] for data in (stamp.data, stamp.data)
    )

    begun, later = stamp_of(first), stamp_of(second + "word @1.0@ word")
    assert begun is not None
    assert later is not None
    assert begun <= later
    assert text_after(first + "word @1.0@ word") == "word @1.0@ word"
    assert stamp_of("word " + first) is None
