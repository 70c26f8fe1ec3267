"""One answer as a stream of events: text, reasoning, usage, how it ends, and what is made of a body that is odd."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from fencepost.domain.stream import (
    Finish,
    ReasoningDelta,
    ReasoningEnd,
    ReasoningStart,
    StepFinish,
    StepStart,
    TextDelta,
    TextEnd,
    TextStart,
    ToolCall,
    ToolInputDelta,
    ToolInputEnd,
    ToolInputStart,
    Usage,
)
from fencepost.providers import sse as reader
from tests.providers.wire import answered, call, chunk, fragment, say, sse

FIELD: dict[str, Any] = {"openai": {"reasoning_field": "reasoning_content"}}
STOP = chunk({}, "stop")


def usage(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **more}


async def test_text_then_usage() -> None:
    body = sse(
        chunk({"role": "assistant", "content": ""}), say("Hel"), say("lo"), STOP, {"choices": [], "usage": usage(11, 7)}
    )

    answer = await answered(body)

    counts = Usage(input_tokens=11, output_tokens=7, non_cached_input_tokens=11, total_tokens=18)
    assert answer.events == [
        StepStart(0),
        TextStart("text-0"),
        TextDelta("text-0", "Hel"),
        TextDelta("text-0", "lo"),
        TextEnd("text-0"),
        StepFinish(0, "stop", counts, "stop"),
        Finish("stop", counts),
    ]


async def test_blocks_end_where_another_begins() -> None:
    think = chunk({"reasoning_content": "hm"})
    tool = call(fragment("{}", "ls", index=0, id="call_a"))

    answer = await answered(sse(think, say("a"), think, tool, say("b"), STOP))

    assert answer.events[1:-2] == [
        ReasoningStart("reasoning-0", FIELD),
        ReasoningDelta("reasoning-0", "hm"),
        ReasoningEnd("reasoning-0", FIELD),
        TextStart("text-0"),
        TextDelta("text-0", "a"),
        TextEnd("text-0"),
        ReasoningStart("reasoning-1", FIELD),
        ReasoningDelta("reasoning-1", "hm"),
        ReasoningEnd("reasoning-1", FIELD),
        ToolInputStart("call_a", "ls"),
        ToolInputDelta("call_a", "ls", "{}"),
        ToolInputEnd("call_a", "ls"),
        ToolCall("call_a", "ls", {}),
        TextStart("text-1"),
        TextDelta("text-1", "b"),
        TextEnd("text-1"),
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_text"])
async def test_reasoning_remembers_its_field(name: str) -> None:
    answer = await answered(sse(chunk({"content": None, name: "need "}), chunk({name: "ls"}), STOP))

    assert answer.reasoning == "need ls"
    assert answer.events[1] == ReasoningStart("reasoning-0", {"openai": {"reasoning_field": name}})


async def test_reasoning_that_is_sent_in_two_fields_is_taken_once() -> None:
    answer = await answered(sse(chunk({"reasoning": "once", "reasoning_content": "once"}), STOP))

    assert answer.reasoning == "once"


async def test_text_as_parts_and_refusals_are_text() -> None:
    answer = await answered(
        sse(chunk({"content": [{"type": "text", "text": "a"}, {"type": "x"}]}), chunk({"refusal": "No."}), STOP)
    )

    assert answer.text == "aNo."


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("content_filter", "content-filter"),
        ("error", "error"),
        ("something_new", "unknown"),
        ("tool_calls", "unknown"),
    ],
)
async def test_finish_reasons(raw: str, reason: str) -> None:
    answer = await answered(sse(say("x"), chunk({}, raw)))

    assert answer.finish == reason
    assert answer.step is not None
    assert answer.step.raw_reason == raw


async def test_a_filtered_answer_without_anything_else() -> None:
    answer = await answered(sse(chunk({"role": "assistant", "content": ""}), chunk({}, "content_filter")))

    assert answer.error is None
    assert answer.finish == "content-filter"


async def test_chunks_that_only_hold_filter_results() -> None:
    results = {"hate": {"filtered": False, "severity": "safe"}}
    before = {"choices": [], "prompt_filter_results": [{"content_filter_results": results}], "usage": None}
    after = chunk(None, None, usage=None)
    after["choices"][0]["content_filter_results"] = results

    answer = await answered(sse(before, chunk({"role": "assistant", "content": ""}), say("Blue"), STOP, after))

    assert answer.text == "Blue"
    assert answer.finish == "stop"


async def test_usage_that_is_reported_along_the_way_is_not_added_up() -> None:
    chunks = [chunk({"content": text}, usage=usage(100, n)) for n, text in enumerate("abc", 1)]

    answer = await answered(sse(*chunks, chunk({}, "stop", usage=usage(100, 4))))

    assert answer.text == "abc"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (100, 4)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (
            usage(
                10,
                9,
                prompt_tokens_details={"cached_tokens": 6, "cache_write_tokens": 1},
                completion_tokens_details={"reasoning_tokens": 5},
            ),
            Usage(10, 9, 3, 6, 1, 5, 19),
        ),
        (usage(10, 9, prompt_cache_hit_tokens=4), Usage(10, 9, 6, 4, None, None, 19)),
        ({"prompt_tokens": "many", "completion_tokens": -1, "total_tokens": True}, Usage()),
        ({"prompt_tokens": 2, "prompt_tokens_details": None, "completion_tokens_details": None}, Usage(2, None, 2)),
    ],
    ids=["details", "other name of the cache", "rubbish", "details null"],
)
async def test_usage_fields(reported: dict[str, Any], expected: Usage) -> None:
    answer = await answered(sse(say("x"), STOP, {"choices": [], "usage": reported}))

    assert answer.usage == expected


@pytest.mark.parametrize(
    "chunks", [[say("The answer is ")], [say("I "), call(fragment("{", "write", index=0, id="call_a"))]]
)
async def test_an_end_without_a_finish_is_a_cut(chunks: list[dict[str, Any]]) -> None:
    answer = await answered(sse(*chunks, done=False))

    assert answer.error is not None
    assert answer.error.reason == "Transport"
    assert answer.error.transient
    assert "cut off" in answer.error.message
    assert answer.calls == []
    assert answer.finish is None


async def test_a_broken_connection_is_a_cut() -> None:
    answer = await answered(sse(say("par"), done=False), then=httpx2.ReadError("reset by peer"))

    assert answer.text == "par"
    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", True)
    assert "http://provider.test/v1" in answer.error.message


async def test_a_break_after_the_finish_takes_nothing_away() -> None:
    answer = await answered(sse(say("all"), STOP, done=False), then=httpx2.ReadError("reset by peer"))

    assert answer.error is None
    assert (answer.text, answer.finish) == ("all", "stop")


async def test_the_end_of_the_body_ends_a_finished_answer() -> None:
    answer = await answered(sse(say("all"), STOP, {"choices": [], "usage": usage(1, 1)}, done=False))

    assert answer.finish == "stop"
    assert answer.usage is not None


async def test_the_marker_ends_an_answer_without_a_finish_reason() -> None:
    answer = await answered(sse(say("all")))

    assert (answer.error, answer.text, answer.finish) == (None, "all", "unknown")


async def test_the_first_finish_reason_counts_and_later_text_is_kept() -> None:
    answer = await answered(sse(say("a"), chunk({}, "length"), say("b"), STOP))

    assert (answer.text, answer.finish) == ("ab", "length")
    assert TextEnd("text-1") in answer.events


async def test_nothing_after_the_marker_counts() -> None:
    answer = await answered([sse(say("a"), STOP), sse(say("b"))])

    assert answer.text == "a"


# The body's bytes


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
async def test_line_ends_marks_and_cuts_do_not_matter(end: str, size: int) -> None:
    several_lines = "".join(f"data: {line}\n" for line in json.dumps(say("Ж日"), indent=1).splitlines()) + "\n"
    body = b"\xef\xbb\xbf" + sse(several_lines, say("😀 two"), STOP).replace(b"\n", end.encode())

    answer = await answered([body[start : start + size] for start in range(0, len(body), size)])

    assert answer.text == "Ж日😀 two"
    assert answer.finish == "stop"


@pytest.mark.parametrize(
    "noise",
    [
        ": PROCESSING\n\n",
        ": a\n: b\n",
        "data: : keepalive\n\n",
        "data:\n\n",
        "event: ping\nid: 3\nretry: 10\n\n",
        "\n\n\n",
    ],
)
async def test_noise_between_events_is_skipped(noise: str) -> None:
    answer = await answered(sse(noise, say("y"), noise, say("es"), noise, STOP, noise))

    assert (answer.error, answer.text, answer.finish) == (None, "yes", "stop")


async def test_no_space_after_the_colon() -> None:
    body = sse(say(" lead"), say("ing"), STOP).replace(b"data: ", b"data:")

    answer = await answered(body)

    assert (answer.text, answer.finish) == (" leading", "stop")


async def test_an_event_of_several_lines_and_one_without_its_blank_line() -> None:
    pretty = "".join(f"data: {line}\n" for line in json.dumps(say("a"), indent=1).splitlines()) + "\n"
    last = f"data: {json.dumps(STOP)}"

    answer = await answered(sse(pretty, last, done=False))

    assert (answer.text, answer.finish) == ("a", "stop")


async def test_a_large_event_is_read() -> None:
    content = "x" * 1_200_000
    body = sse(call(fragment(json.dumps({"c": content}), "write", index=0, id="call_a")), chunk({}, "tool_calls"))

    answer = await answered([body[start : start + 65536] for start in range(0, len(body), 65536)])

    assert answer.calls[0].input == {"c": content}


@pytest.mark.parametrize("line", [b"x" * 65536, b"data: " + b"x" * 65530 + b"\n"], ids=["one line", "many lines"])
async def test_an_event_without_end_is_refused(line: bytes) -> None:
    count = reader.MAX_EVENT_BYTES // len(line) + 2

    answer = await answered([b"data: ", *([line] * count)])

    assert answer.error is not None
    assert answer.error.reason == "InvalidProviderOutput"
    assert "8 MiB" in answer.error.message


async def test_half_a_character_does_not_end_the_stream() -> None:
    answer = await answered(sse('data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n', say("!"), STOP))

    assert answer.text == "\ufffd!"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<!doctype html><html><head><title>Sign in</title></head></html>", "Sign in"),
        (b"certainly not a stream", "certainly not a stream"),
        (json.dumps({"choices": [{"message": {"content": "whole"}}]}).encode(), "stream of events"),
        (b"data: {oops\n\n", "no JSON"),
        (b'data: "text"\n\n', "unknown shape"),
        (b'data: {"choices":[7]}\n\n', "unknown shape"),
        (b'data: {"choices":[{"delta":[1]}]}\n\n', "unknown shape"),
    ],
)
async def test_rubbish_is_invalid_output(body: bytes, shown: str) -> None:
    answer = await answered(body)

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("InvalidProviderOutput", False)
    assert shown in answer.error.message
    assert "\n" not in answer.error.message


@pytest.mark.parametrize("body", [b"", b": hello\n\n"])
async def test_an_empty_body_is_a_cut(body: bytes) -> None:
    answer = await answered(body)

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", True)


# Errors inside the stream


async def test_an_error_after_text() -> None:
    error = {"error": {"message": "engine queue is full", "type": "server_error", "param": None, "code": 503}}

    answer = await answered(sse(say("par"), error, say("never")))

    assert answer.text == "par"
    assert answer.reported.message == "engine queue is full"
    assert (answer.reported.retryable, answer.reported.status) == (True, 503)
    assert answer.finish is None


@pytest.mark.parametrize(
    ("event", "message", "retryable", "classification"),
    [
        ({"error": {"message": "internal failure", "type": None, "code": None}}, "internal failure", True, None),
        ({"error": "plain words"}, "plain words", True, None),
        ({"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, "slow down", True, None),
        ({"error": {"message": "Bad key", "type": "authentication_error"}}, "Bad key", False, None),
        ({"error": {"message": "no", "code": "400"}}, "no", False, None),
        (
            {"type": "error", "code": "context_length_exceeded", "message": "Your input exceeds the context window."},
            "Your input exceeds the context window.",
            False,
            "context-overflow",
        ),
        ('event: error\ndata: {"message": "upstream is gone"}\n\n', "upstream is gone", True, None),
        ("event: error\ndata: plain words\n\n", "plain words", True, None),
    ],
)
async def test_errors_of_every_shape(event: Any, message: str, retryable: bool, classification: str | None) -> None:
    answer = await answered(sse(event))

    assert answer.error is None
    assert answer.reported.message == message
    assert answer.reported.retryable is retryable
    assert answer.reported.classification == classification
    assert len(answer.events) == 2


async def test_an_error_object_in_place_of_a_stream() -> None:
    answer = await answered(json.dumps({"error": {"message": "overloaded", "code": 529}}).encode())

    assert (answer.reported.message, answer.reported.retryable) == ("overloaded", True)
