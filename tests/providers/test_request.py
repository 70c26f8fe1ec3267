"""The request body: what it says, and that every conversation makes one that endpoints accept."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from fencepost.domain.models import (
    MediaContent,
    ModelConfig,
    ModelMessage,
    ReasoningContent,
    ToolCallContent,
    ToolResultContent,
)
from fencepost.domain.tools import FileItem, TextItem, ToolDefinition
from fencepost.providers.chat_request import build_body, encode_body
from tests.providers.wire import KEY, READ, answered, chunk, message, request, say, sse

PNG = "data:image/png;base64,iVBORw0KGgo="
FIELD = {"openai": {"reasoning_field": "reasoning_content"}}


def result(call: str, value: Any = "ok", kind: str = "text", name: str = "read") -> ModelMessage:
    return message("tool", ToolResultContent(call, name, {"type": kind, "value": value}))


def messages(*items: ModelMessage | str, **more: Any) -> list[dict[str, Any]]:
    body: list[dict[str, Any]] = build_body(request(*items, **more))["messages"]
    return body


def outline(*items: ModelMessage | str) -> list[str]:
    """One word per message of the body, such as `result:t1=ok`."""
    lines = []
    for item in messages(*items):
        if item["role"] == "tool":
            lines.append(f"result:{item['tool_call_id']}={item['content']}")
        elif "tool_calls" in item:
            lines.append("calls:" + ",".join(call["id"] for call in item["tool_calls"]))
        else:
            lines.append(f"{item['role']}:{item['content']}")
    return lines


def calls(*ids: str, text: str = "") -> ModelMessage:
    return message(
        "assistant", *([text] if text else []), *(ToolCallContent(call, "read", {"path": "a"}) for call in ids)
    )


def test_the_body_of_a_plain_request() -> None:
    asked = request(
        "hello",
        system=("Be brief.", "", "Today is Monday."),
        tools=(READ, ToolDefinition("now", "Tell the time")),
        config=ModelConfig(output=20, temperature=0),
        cache_key="ses_1",
    )

    assert build_body(asked) == {
        "model": "m-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 20,
        "temperature": 0,
        "prompt_cache_key": "ses_1",
        "messages": [
            {"role": "system", "content": "Be brief.\n\nToday is Monday."},
            {"role": "user", "content": "hello"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "read", "description": "Read a file", "parameters": READ.parameters},
            },
            {
                "type": "function",
                "function": {
                    "name": "now",
                    "description": "Tell the time",
                    "parameters": {"type": "object", "properties": {}},
                },
            },
        ],
    }


def test_options_come_last_and_null_takes_out() -> None:
    asked = request(
        config=ModelConfig(output=20, options={"top_p": 0.5, "seed": 1, "stream_options": None, "stream": False}),
        options={"seed": 2, "max_completion_tokens": 9},
    )

    body = build_body(asked)

    assert body == {
        "model": "m-1",
        "messages": [{"role": "user", "content": "hi"}],
        "top_p": 0.5,
        "seed": 2,
        "max_completion_tokens": 9,
        "stream": True,
    }


def test_openai_itself_gets_the_new_name_of_the_output_limit() -> None:
    body = build_body(request(base_url="https://api.openai.com/v1", config=ModelConfig(output=20)))

    assert body["max_completion_tokens"] == 20
    assert "max_tokens" not in body


@pytest.mark.parametrize(("tools", "choice"), [((READ,), "none"), ((), None)])
def test_tool_choice_needs_tools(tools: Any, choice: str | None) -> None:
    assert build_body(request(tools=tools, tool_choice="none")).get("tool_choice") == choice


@pytest.mark.conformance("MDL-02")
async def test_the_key_travels_in_the_header_only() -> None:
    config = ModelConfig(options={"apiKey": KEY, "api_key": KEY})

    answer = await answered(sse(say("x"), chunk({}, "stop")), asked=request(config=config, options={"apiKey": KEY}))

    (sent,) = answer.sent
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    assert KEY.encode() not in sent.content
    assert b"apiKey" not in sent.content


async def test_configured_headers_are_sent_and_win() -> None:
    provider = {"headers": {"X-Team": "blue", "Authorization": "Token other"}}

    answer = await answered(sse(say("x"), chunk({}, "stop")), asked=request(provider=provider))

    assert answer.sent[0].headers["x-team"] == "blue"
    assert answer.sent[0].headers["authorization"] == "Token other"
    assert answer.sent[0].url == "http://provider.test/v1/chat/completions"


# The conversation


def test_each_call_has_one_result_right_after_it() -> None:
    history: list[ModelMessage | str] = [
        "go",
        calls("t1", "t2", "t3"),
        result("t1", "a"),
        "stop, do X",
        result("t3", "late"),
        result("t1", "dup"),
    ]

    assert outline(*history) == [
        "user:go",
        "calls:t1,t2,t3",
        "result:t1=a",
        "result:t2=Tool execution interrupted",
        "result:t3=late",
        "user:stop, do X",
    ]


def test_results_of_no_call_are_left_out() -> None:
    assert outline(result("t0"), "go", result("t9"), "on") == ["user:go", "user:on"]


def test_an_id_that_comes_back_in_a_later_message_is_another_call() -> None:
    history: list[ModelMessage | str] = ["go", calls("t1"), result("t1", "one"), calls("t1"), result("t1", "two")]

    assert outline(*history) == ["user:go", "calls:t1", "result:t1=one", "calls:t1", "result:t1=two"]


def test_one_id_twice_in_one_message_is_one_call() -> None:
    assert outline(calls("t1", "t1"), result("t1", "one"), result("t1", "two")) == ["calls:t1", "result:t1=one"]


def test_assistant_messages_without_content_are_left_out() -> None:
    empty = message("assistant", ReasoningContent("hm", FIELD))

    assert outline("a", message("assistant"), message("assistant", ""), empty, "b") == ["user:a", "user:b"]


def test_text_and_calls_share_a_message() -> None:
    (assistant, _) = messages(calls("t1", text="I look."))

    assert assistant == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}],
    }


def test_arguments_go_back_as_the_text_of_an_object() -> None:
    made = message("assistant", ToolCallContent("t1", "read", '{"path": "cut'))

    arguments = messages(made)[0]["tool_calls"][0]["function"]["arguments"]

    assert json.loads(arguments) == {"invalid_arguments": '{"path": "cut'}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_in_the_field_it_came_in(name: str) -> None:
    metadata = {"openai": {"reasoning_field": name}}
    parts = (ReasoningContent("need ", metadata), ReasoningContent("ls", metadata), ToolCallContent("t1", "ls", {}))

    assistant = messages(message("assistant", *parts))[0]

    assert assistant[name] == "need ls"
    assert assistant["tool_calls"][0]["id"] == "t1"


@pytest.mark.parametrize("metadata", [None, {}, {"openai": {"reasoning_field": "role"}}, {"other": {"signature": "x"}}])
def test_reasoning_of_unknown_origin_is_left_out(metadata: Any) -> None:
    (assistant,) = messages(message("assistant", ReasoningContent("hm", metadata), "text"))

    assert assistant == {"role": "assistant", "content": "text"}


async def test_reasoning_makes_the_round_trip() -> None:
    answer = await answered(sse(chunk({"reasoning_content": "need ls"}), chunk({}, "stop")))
    metadata = answer.events[-3].provider_metadata  # type: ignore[union-attr]

    (assistant,) = messages(message("assistant", ReasoningContent(answer.reasoning, metadata), "text"))

    assert assistant["reasoning_content"] == "need ls"


def test_what_another_provider_ran_is_text() -> None:
    parts = (
        "Found:",
        ToolCallContent("h1", "web_search", {"q": "x"}, provider_executed=True),
        ToolResultContent("h1", "web_search", {"type": "text", "value": "a page"}, provider_executed=True),
    )

    assert messages(message("assistant", *parts)) == [{"role": "assistant", "content": "Found:\n\n[web_search] a page"}]


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        ("text", "plain", "plain"),
        ("json", {"é": [1]}, '{"é": [1]}'),
        ("error", "no such file", "no such file"),
        (
            "error",
            {"error": {"type": "unknown", "message": "exit 1"}, "content": [{"type": "text", "text": "out"}]},
            "exit 1\nout",
        ),
        ("content", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ("content", [TextItem(text="a")], "a"),
        ("content", [FileItem(uri="data:text/plain,hi%20you", mime="text/plain", name="x.txt")], "x.txt:\nhi you"),
        ("content", [], ""),
    ],
)
def test_results_are_text(kind: str, value: Any, content: str) -> None:
    assert messages(calls("t1"), result("t1", value, kind))[1] == {
        "role": "tool",
        "tool_call_id": "t1",
        "content": content,
    }


def test_images_of_results_follow_after_all_results() -> None:
    image = [{"type": "text", "text": "a chart"}, {"type": "file", "uri": PNG, "mime": "image/png", "name": "c.png"}]

    sent = messages(calls("t1", "t2"), result("t1", image, "content"), result("t2", "b"), "next")

    assert [item["role"] for item in sent] == ["assistant", "tool", "tool", "user", "user"]
    assert sent[1]["content"] == "a chart\n[c.png: in the message that follows]"
    assert sent[3]["content"] == [
        {"type": "text", "text": "File of the tool call t1:"},
        {"type": "image_url", "image_url": {"url": PNG}},
    ]


def test_images_and_files_of_users() -> None:
    text = "data:text/plain;base64," + base64.b64encode("grün".encode()).decode()
    pdf = "data:application/pdf;base64,JVBERg=="
    files = (
        MediaContent(PNG, "image/png"),
        MediaContent(text, "text/plain", "a.txt"),
        MediaContent(pdf, "application/pdf", "b.pdf"),
        MediaContent("data:video/mp4;base64,AAAA", "video/mp4", "c.mp4"),
        MediaContent("data:text/plain;base64,***", "text/plain", "d.txt"),
    )

    (sent,) = messages(message("user", "look", *files))

    assert sent["content"][:4] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "text", "text": "a.txt:\ngrün"},
        {"type": "file", "file": {"filename": "b.pdf", "file_data": pdf}},
    ]
    assert "c.mp4 (video/mp4)" in sent["content"][4]["text"]
    assert "base64" not in sent["content"][4]["text"]


def test_messages_of_text_only_stay_strings() -> None:
    assert outline(message("user", "a", "b"), message("system", "now"), message("system")) == [
        "user:a\n\nb",
        "system:now",
    ]


# Encoding


def test_text_that_is_no_unicode_is_replaced() -> None:
    body = encode_body(
        build_body(request("a\ud800b", message("assistant", ToolCallContent("t", "x", {"k\udfff": "\ud83d"}))))
    )

    sent = json.loads(body)["messages"]
    assert sent[0]["content"] == "a\ufffdb"
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"k\ufffd": "\ufffd"}


def test_nul_and_numbers_that_json_lacks_do_not_raise() -> None:
    body = encode_body(build_body(request("a\x00b", options={"x": float("nan"), "y": float("inf")})))

    assert json.loads(body)["x"] is None
    assert json.loads(body)["messages"][0]["content"] == "a\x00b"
