"""From a session's messages to what a model is sent."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic_core import to_json

from fencepost.domain import messages as m
from fencepost.domain.inbox import FileAttachment
from fencepost.domain.models import (
    MediaContent,
    ModelMessage,
    ModelRef,
    ReasoningContent,
    TextContent,
    ToolCallContent,
    ToolResultContent,
)
from fencepost.domain.projection import INTERRUPTED
from fencepost.domain.tools import FileItem, TextItem
from fencepost.domain.transcript import read_model_messages, to_model_messages

MODEL = ModelRef(id="test-model", provider_id="scripted")
OTHER = ModelRef(id="other-model", provider_id="scripted")
AT = m.Created(created=1)
ERROR = m.MessageError(message="broke")
KINDS = {kind.model_fields["type"].default for kind in get_args(get_args(m.Message)[0])}


def _answer(*content: m.Part, model: ModelRef = MODEL, **fields: Any) -> m.AssistantMessage:
    time = m.Completed(created=1, completed=2)
    return m.AssistantMessage(id="msg_a", agent="build", model=model, content=content, time=time, **fields)


def _tool(call_id: str, state: m.ToolState, provider: m.ToolProvider | None = None) -> m.ToolPart:
    return m.ToolPart(id=call_id, name="bash", provider=provider, time=m.ToolTime(created=1), state=state)


@pytest.mark.conformance("MSG-02")
def test_every_kind_of_message_has_its_translation() -> None:
    """In order; switches of agent and model say nothing to the model."""
    history: list[m.Message] = [
        m.AgentSwitched(id="msg_1", agent="plan", time=AT),
        m.ModelSwitched(id="msg_2", model=OTHER, time=AT),
        m.UserMessage(
            id="msg_3",
            text="look",
            files=(FileAttachment(uri="data:image/png;base64,AA==", mime="image/png", name="a.png"),),
            time=AT,
        ),
        m.SyntheticMessage(id="msg_4", session_id="ses_1", text="go on", time=AT),
        m.SystemMessage(id="msg_5", text="the date changed", time=AT),
        m.ShellMessage(id="msg_6", call_id="c", command="date", output="monday\n", time=m.Completed(created=1)),
        m.CompactionMessage(id="msg_7", reason="auto", summary="we met", recent="user: bye", time=AT),
        _answer(m.TextPart(id="t", text="hello")),
    ]
    made = to_model_messages(history, MODEL)

    assert {message.type for message in history} == KINDS
    assert [message.role for message in made] == ["user", "user", "system", "user", "user", "assistant"]
    user, synthetic, system, shell, compaction, answer = made
    assert user.content == (
        TextContent("look"),
        MediaContent("data:image/png;base64,AA==", "image/png", "a.png"),
    )
    assert synthetic.content == (TextContent("go on"),)
    assert system.content == (TextContent("the date changed"),)
    assert shell.content == (TextContent("Shell command: date\n\nmonday\n"),)
    [checkpoint] = compaction.content
    assert isinstance(checkpoint, TextContent)
    assert checkpoint.text.index("we met") < checkpoint.text.index("user: bye")
    assert answer.content == (TextContent("hello"),)


@pytest.mark.conformance("MSG-01")
@pytest.mark.parametrize(
    "answer",
    [
        _answer(),
        _answer(m.TextPart(id="t", text="")),
        _answer(m.ReasoningPart(id="r", text="")),
        _answer(m.ReasoningPart(id="r", text=""), model=OTHER),
        _answer(error=ERROR, finish="error"),
    ],
)
def test_an_empty_answer_is_not_sent(answer: m.AssistantMessage) -> None:
    """Providers refuse them; what stands around them is sent."""
    before = m.UserMessage(id="msg_1", text="hello", time=AT)
    after = m.UserMessage(id="msg_2", text="anybody?", time=AT)

    assert to_model_messages([before, answer, after], MODEL) == (
        ModelMessage("user", (TextContent("hello"),)),
        ModelMessage("user", (TextContent("anybody?"),)),
    )


STATES: list[tuple[m.ToolState, Any, dict[str, Any]]] = [
    (m.PendingTool(input='{"a": 1}'), {"a": 1}, {"type": "error", "value": {"error": ERROR}}),
    (m.PendingTool(input='{"a": '), {}, {"type": "error", "value": {"error": ERROR}}),
    (m.PendingTool(input=""), {}, {"type": "error", "value": {"error": ERROR}}),
    (m.PendingTool(input="[1]"), {"value": [1]}, {"type": "error", "value": {"error": ERROR}}),
    (m.PendingTool(input='{"a": NaN}'), {}, {"type": "error", "value": {"error": ERROR}}),
    (m.PendingTool(input='{"a": "\\ud800"}'), {"a": "\ufffd"}, {"type": "error", "value": {"error": ERROR}}),
    (m.RunningTool(input={"a": 1}, structured={}), {"a": 1}, {"type": "error", "value": {"error": ERROR}}),
    (
        m.CompletedTool(input={"a": 1}, structured={"n": 1}),
        {"a": 1},
        {"type": "json", "value": {"n": 1}},
    ),
    (
        m.CompletedTool(input={}, structured={"n": 1}, content=(TextItem(text="out"),)),
        {},
        {"type": "text", "value": "out"},
    ),
    (
        m.CompletedTool(
            input={}, structured={}, content=(TextItem(text="out"), FileItem(uri="data:,", mime="text/plain"))
        ),
        {},
        {
            "type": "content",
            "value": [{"type": "text", "text": "out"}, {"type": "file", "uri": "data:,", "mime": "text/plain"}],
        },
    ),
    (
        m.FailedTool(input={"a": 1}, structured={"n": 1}, content=(TextItem(text="half"),), error=ERROR),
        {"a": 1},
        {
            "type": "error",
            "value": {
                "error": {"type": "unknown", "message": "broke"},
                "content": [{"type": "text", "text": "half"}],
                "structured": {"n": 1},
            },
        },
    ),
]


@pytest.mark.parametrize(("state", "given", "result"), STATES)
def test_every_call_gets_exactly_one_result(state: m.ToolState, given: Any, result: dict[str, Any]) -> None:
    """Whatever happened to it: one that was never settled was interrupted, and arguments are always an object."""
    if result["value"] == {"error": ERROR}:
        result = {"type": "error", "value": {"error": {"type": "unknown", "message": INTERRUPTED}}}

    assert to_model_messages([_answer(_tool("call_1", state))], MODEL) == (
        ModelMessage("assistant", (ToolCallContent("call_1", "bash", given),)),
        ModelMessage("tool", (ToolResultContent("call_1", "bash", result),)),
    )


def test_results_follow_their_answer_in_the_order_of_the_calls() -> None:
    """And come before anything else that was said."""
    done = m.CompletedTool(input={}, structured={})
    history: list[m.Message] = [
        _answer(m.TextPart(id="t", text="two things"), _tool("call_1", done), _tool("call_2", done)),
        m.UserMessage(id="msg_2", text="wait", time=AT),
        _answer(_tool("call_1", done)),
    ]
    made = to_model_messages(history, MODEL)

    assert [message.role for message in made] == ["assistant", "tool", "tool", "user", "assistant", "tool"]
    results = [c.id for message in made for c in message.content if isinstance(c, ToolResultContent)]
    assert results == ["call_1", "call_2", "call_1"]


META = {"scripted": {"signature": "s"}}
HOSTED = m.ToolProvider(executed=True, metadata=META, result_metadata={"scripted": {"id": 1}})


def test_a_hosted_call_stands_inside_its_answer_with_its_own_result() -> None:
    """Call and result each keep what the provider said of them."""
    state = m.CompletedTool(input={}, structured={}, result={"type": "json", "value": [1]})

    assert to_model_messages([_answer(_tool("call_1", state, HOSTED))], MODEL) == (
        ModelMessage(
            "assistant",
            (
                ToolCallContent("call_1", "bash", {}, True, META),
                ToolResultContent("call_1", "bash", {"type": "json", "value": [1]}, True, {"scripted": {"id": 1}}),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("model", "fields", "kept"),
    [(MODEL, {}, True), (OTHER, {}, False), (MODEL, {"error": ERROR, "finish": "error"}, False)],
    ids=["same model", "other model", "failed answer"],
)
def test_what_only_the_provider_understands_goes_back_to_it_alone(
    model: ModelRef, fields: dict[str, Any], kept: bool
) -> None:
    """Not to another model, nor from an answer that failed."""
    state = m.CompletedTool(input={}, structured={}, result={"type": "json", "value": 1})
    answer = _answer(
        m.ReasoningPart(id="r", text="hm", provider_metadata=META),
        _tool("call_1", state, HOSTED),
        model=model,
        **fields,
    )
    [made] = to_model_messages([answer], MODEL)
    thought, call, result = made.content

    if model == MODEL:
        assert thought == ReasoningContent("hm", META if kept else None)
    else:
        assert thought == TextContent("hm")
    assert isinstance(call, ToolCallContent)
    assert isinstance(result, ToolResultContent)
    assert (call.provider_metadata is not None, result.provider_metadata is not None) == (kept, kept)


def test_another_variant_of_a_model_is_the_same_model() -> None:
    """It reads what the model wrote."""
    variant = MODEL.model_copy(update={"variant": "slow"})
    [made] = to_model_messages(
        [_answer(m.ReasoningPart(id="r", text="hm", provider_metadata=META), model=variant)], MODEL
    )

    assert made.content == (ReasoningContent("hm", META),)


def test_a_failed_answer_keeps_what_it_said() -> None:
    """Its text, and its calls with their results."""
    failed = m.FailedTool(input={}, structured={}, error=ERROR)
    answer = _answer(m.TextPart(id="t", text="half an ans"), _tool("c", failed), error=ERROR, finish="error")
    made = to_model_messages([answer], MODEL)

    assert [message.role for message in made] == ["assistant", "tool"]
    assert made[0].content[0] == TextContent("half an ans")


def _row(message: m.Message) -> tuple[str, str]:
    return message.id, to_json({**message.to_wire(), "type": message.type}).decode()


@pytest.mark.parametrize("length", [10, 100_000], ids=["short", "long"])
def test_a_message_is_read_as_it_is_now_and_for_the_model_that_is_asked(length: int) -> None:
    """What was read before is of use only while neither has changed."""
    thought = m.ReasoningPart(id="r", text="h" * length, provider_metadata=META)
    before, after = _answer(thought), _answer(thought, m.TextPart(id="t", text="then"))
    other = ModelRef(id="other", provider_id="elsewhere")

    for message, model in [(before, MODEL), (before, other), (after, MODEL), (after, other), (before, MODEL)]:
        assert read_model_messages([_row(message)], model) == to_model_messages([message], model)
    assert read_model_messages([_row(before)], MODEL) != read_model_messages([_row(before)], other)
