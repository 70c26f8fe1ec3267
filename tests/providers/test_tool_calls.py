"""Tool calls come out whole and once, however an endpoint cuts them into fragments."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.domain.stream import StepStart, TextEnd, ToolCall, ToolInputDelta, ToolInputEnd, ToolInputStart
from tests.providers.wire import answered, call, chunk, fragment, say, sse

OSLO = ("call_a", "city", {"q": "Oslo"})

SHAPES: dict[str, tuple[list[dict[str, Any]], list[tuple[str | None, str, Any]]]] = {
    "as OpenAI sends them": (
        [
            call(fragment("", "city", index=0, id="call_a", type="function")),
            call(fragment('{"q":', index=0)),
            call(fragment('"Oslo"}', index=0)),
        ],
        [OSLO],
    ),
    "no index, one call": ([call(fragment('{"q":"O', "city", id="call_a")), call(fragment('slo"}'))], [OSLO]),
    "index null": (
        [call(fragment('{"q":"O', "city", id="call_a", index=None)), call(fragment('slo"}', index=None))],
        [OSLO],
    ),
    "no index, two calls": (
        [
            call(fragment("", "city", id="call_a")),
            call(fragment('{"q":"Oslo"}')),
            call(fragment("", "clock", id="call_b")),
            call(fragment('{"z":')),
            call(fragment("1}")),
        ],
        [OSLO, ("call_b", "clock", {"z": 1})],
    ),
    "one index for three calls": (
        [call(fragment(f'{{"q":{n}}}', "look", index=0, id=f"call_{n}")) for n in range(3)],
        [(f"call_{n}", "look", {"q": n}) for n in range(3)],
    ),
    "empty id and name later on": (
        [
            call(fragment("", "city", index=0, id="call_a")),
            call(fragment('{"q":"O', "", index=0, id="")),
            call({"index": 0, "id": "", "function": {"name": None, "arguments": 'slo"}'}}),
        ],
        [OSLO],
    ),
    "name and id sent again": (
        [
            call(fragment('{"q":', "city", index=0, id="call_a")),
            call(fragment('"Oslo"', "city", index=0, id="call_a")),
            call(fragment("}", "city", index=0, id="call_a")),
        ],
        [OSLO],
    ),
    "name sent again, never an id": (
        [call(fragment('{"q":"O', "city", index=0)), call(fragment('slo"}', "city", index=0))],
        [(None, "city", {"q": "Oslo"})],
    ),
    "the same tool twice, never an id": (
        [call(fragment('{"q":1}', "city", index=0)), call(fragment('{"q":2}', "city", index=0))],
        [(None, "city", {"q": 1}), (None, "city", {"q": 2})],
    ),
    "arguments as an object": (
        [call(fragment({"place": "Bø", "deep": {"n": [1, 2]}}, "temp", index=0, id="call_a"))],
        [("call_a", "temp", {"place": "Bø", "deep": {"n": [1, 2]}})],
    ),
    "arguments empty": ([call(fragment("", "shot", index=0, id="call_a"))], [("call_a", "shot", {})]),
    "arguments blank": ([call(fragment(" \n", "shot", index=0, id="call_a"))], [("call_a", "shot", {})]),
    "arguments left out": ([call(fragment(None, "shot", index=0, id="call_a"))], [("call_a", "shot", {})]),
    "announced first, arguments later": (
        [
            call(fragment("", "city", index=0, id="call_a"), fragment("", "clock", index=1, id="call_b")),
            call(fragment('{"q":"O', index=0)),
            call(fragment('{"z":', index=1)),
            call(fragment('slo"}', index=0)),
            call(fragment("1}", index=1)),
        ],
        [OSLO, ("call_b", "clock", {"z": 1})],
    ),
    "one id for two calls": (
        [call(fragment('{"q":"Oslo"}', "city", index=0, id="call_a")), call(fragment("{}", "b", index=1, id="call_a"))],
        [OSLO, (None, "b", {})],
    ),
    "the id comes after the name": (
        [call(fragment("", "city", index=0)), call(fragment('{"q":"Oslo"}', index=0, id="call_a"))],
        [(None, "city", {"q": "Oslo"})],
    ),
    "the name comes after arguments": (
        [call(fragment('{"q":', index=0, id="call_a")), call(fragment('"Oslo"}', "city", index=0))],
        [OSLO],
    ),
    "a fragment outside a list": ([chunk({"tool_calls": fragment('{"q":"Oslo"}', "city", id="call_a")})], [OSLO]),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_calls_come_out_whole(shape: str) -> None:
    chunks, expected = SHAPES[shape]

    answer = await answered(sse(*chunks, chunk({}, "tool_calls")))

    assert answer.error is None
    assert [(made.name, made.input, made.input_error) for made in answer.calls] == [
        (name, value, None) for _, name, value in expected
    ]
    ids = [made.id for made in answer.calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert [made for made, (given, _, _) in zip(ids, expected, strict=True) if given is not None] == [
        given for given, _, _ in expected if given is not None
    ]
    assert answer.finish == "tool-calls"


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_parts_of_a_call_agree_with_it(shape: str) -> None:
    chunks, _ = SHAPES[shape]

    answer = await answered(sse(*chunks, chunk({}, "tool_calls")))

    for made in answer.calls:
        parts = [event for event in answer.events if getattr(event, "id", None) == made.id]
        assert isinstance(parts[0], ToolInputStart)
        assert isinstance(parts[-2], ToolInputEnd)
        assert parts[-1] is made
        assert all(isinstance(part, ToolInputDelta) for part in parts[1:-2])
        assert {part.name for part in parts if not isinstance(part, StepStart)} == {made.name}  # type: ignore[union-attr]


async def test_a_call_is_announced_when_the_next_one_begins() -> None:
    chunks = [
        say("Let me look."),
        call(fragment('{"q":1}', "look", index=0, id="call_a")),
        call(fragment('{"q":', "look", index=1, id="call_b")),
    ]

    answer = await answered(sse(*chunks, done=False))  # and then nothing: the answer is cut

    assert answer.error is not None
    assert [made.id for made in answer.calls] == ["call_a"]
    assert isinstance(answer.events[-3], ToolCall)
    assert answer.events[-2:] == [ToolInputStart("call_b", "look"), ToolInputDelta("call_b", "look", '{"q":')]
    assert TextEnd("text-0") in answer.events


async def test_a_call_is_announced_when_text_follows() -> None:
    chunks = [call(fragment('{"q":1}', "look", index=0, id="call_a")), say("meanwhile")]

    answer = await answered(sse(*chunks, done=False))

    assert [made.id for made in answer.calls] == ["call_a"]


@pytest.mark.parametrize(
    "arguments",
    ['{"path":"x.py","content":"def f(', '{"a":1}}', "[1]", '"{}"', "null", '{"a":NaN}', "nonsense"],
)
async def test_unusable_arguments_are_kept_and_never_repaired(arguments: str) -> None:
    chunks = [call(fragment(arguments, "write", index=0, id="call_a")), chunk({}, "tool_calls")]

    answer = await answered(sse(*chunks))

    (made,) = answer.calls
    assert made.input == arguments
    assert made.input_error
    assert answer.finish == "tool-calls"


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_empty_arguments_of_a_cut_answer_are_not_an_empty_object(reason: str) -> None:
    answer = await answered(sse(call(fragment("", "write", index=0, id="call_a")), chunk({}, reason)))

    (made,) = answer.calls
    assert made.input_error is not None
    assert answer.finish == reason.replace("_", "-")


@pytest.mark.parametrize("reason", ["stop", "end_of_turn"])
async def test_calls_count_more_than_the_label(reason: str) -> None:
    answer = await answered(sse(say("So."), call(fragment("{}", "ls", index=0, id="call_a")), chunk({}, reason)))

    assert answer.finish == "tool-calls"
    assert answer.step is not None
    assert answer.step.raw_reason == reason


async def test_markup_of_calls_in_text_stays_text() -> None:
    markup = '<tool_call>\n{"name":"rm","arguments":{}}\n</tool_call>'

    answer = await answered(sse(say(markup), chunk({}, "stop")))

    assert answer.text == markup
    assert answer.calls == []
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    "chunks",
    [
        [call(fragment("{}", index=0, id="call_a"))],
        [
            call(fragment('{"q":1}', "look", index=0, id="call_a")),
            call(fragment("{}", "look", index=1, id="call_b")),
            call(fragment('{"q":2}', index=0)),
        ],
    ],
    ids=["without a name", "more arguments after the end"],
)
async def test_calls_that_cannot_be_understood_fail_the_answer(chunks: list[dict[str, Any]]) -> None:
    answer = await answered(sse(*chunks, chunk({}, "tool_calls")))

    assert answer.error is not None
    assert answer.error.reason == "InvalidProviderOutput"
    assert not answer.error.transient


async def test_a_large_call_in_many_fragments() -> None:
    content = "x" * 200_000
    pieces = [f'{{"c":"{content}"}}'[start : start + 10] for start in range(0, 200_010, 10)]
    chunks = [call(fragment("", "write", index=0, id="call_a")), *(call(fragment(piece, index=0)) for piece in pieces)]

    answer = await answered(sse(*chunks, chunk({}, "tool_calls")))

    assert answer.calls[0].input == {"c": content}
