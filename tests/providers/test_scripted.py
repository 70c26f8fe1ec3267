"""The scripted provider: the language of its prompts, what it does without one, and the program."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator

import httpx2
import pytest

from fencepost.domain.models import ModelMessage, ToolCallContent, ToolResultContent
from fencepost.providers.http import make_client
from fencepost.providers.script import CallTool, Cut, Fail, Finish, Hang, Raw, Say, Think, parse, pieces
from fencepost.providers.scripted import ScriptedProvider
from tests.providers.wire import READ, WRITE, Answer, collect, message, request


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with make_client() as made:
        yield made


@pytest.fixture
async def provider() -> AsyncIterator[ScriptedProvider]:
    async with ScriptedProvider() as made:
        yield made


def called(answer: Answer, result: str) -> list[ModelMessage]:
    """The messages that an answer with one call leaves in the conversation."""
    (made,) = answer.calls
    return [
        message("assistant", answer.text, ToolCallContent(made.id, made.name, made.input)),
        message("tool", ToolResultContent(made.id, made.name, {"type": "text", "value": result})),
    ]


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("say: hello", [[Say("hello")]]),
        ('say: "two\\nlines"', [[Say("two\nlines")]]),
        ("chunks: 4\ndelay_ms: 5\nsay: x\nthink: y", [[Say("x", 4, 0.005), Think("y", 4, 0.005)]]),
        ("words: 2", [[Say("word0 word1")]]),
        ('tool: read {"path": "a"}\n\nthen:\nsay: done', [[CallTool("read", {"path": "a"})], [Say("done")]]),
        ("tool: now", [[CallTool("now")]]),
        ("usage: 5 6\nsay: x\nfinish: length", [[Say("x"), Finish("length", (5, 6))]]),
        ("usage: 5 6\nsay: x", [[Say("x"), Finish(None, (5, 6))]]),
        ('fail: 429 2 {"Retry-After": "1"}', [[Fail(429, headers={"Retry-After": "1"}, times=2)]]),
        ("fail: 500", [[Fail(500)]]),
        ("say: x\ncut", [[Say("x"), Cut()]]),
        ("hang", [[Hang()]]),
        ("raw: {}", [[Raw(b"data: {}\n\n")]]),
    ],
)
def test_directives(prompt: str, answers: list[list[object]]) -> None:
    assert parse(prompt) == answers


@pytest.mark.parametrize(
    "prompt",
    ["", "hello", "say: x\nand more", "words: many", "fail: often", "tool: read {oops", "usage: 1", "cut it", "say"],
)
def test_prompts_that_are_no_directives(prompt: str) -> None:
    assert parse(prompt) is None


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, [" a", " bb", " c "]), (1, [" a bb c "]), (3, [" a ", "bb ", "c "]), (100, list(" a bb c "))],
)
def test_pieces_are_the_text(count: int | None, expected: list[str]) -> None:
    assert pieces(" a bb c ", count) == expected


async def test_a_prompt_steers_several_answers(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    prompt = 'say: I look.\ntool: read {"path": "a"}\nthen:\nsay: Done.\nusage: 3 4'

    first = await collect(client, request(prompt, base_url=provider.base_url))
    second = await collect(client, request(prompt, *called(first, "text"), base_url=provider.base_url))
    third = await collect(
        client,
        request(prompt, *called(first, "text"), message("assistant", "Done."), "more", base_url=provider.base_url),
    )

    assert (first.text, first.calls[0].input) == ("I look.", {"path": "a"})
    assert second.text == "Done."
    assert second.usage is not None
    assert (second.usage.input_tokens, second.usage.output_tokens) == (3, 4)
    assert third.text == "You said: more"


async def test_a_prompt_governs_through_a_continuation(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    prompt = "say: half\ncut\nthen:\nsay: the rest"

    first = await collect(client, request(prompt, base_url=provider.base_url))
    second = await collect(client, request(prompt, message("assistant", "half"), "go on", base_url=provider.base_url))

    assert first.error is not None
    assert (second.text, second.finish) == ("the rest", "stop")


async def test_failures_are_counted_per_session(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    prompt = 'fail: 429 2 {"Retry-After": "1"}\nsay: at last'
    asked = {key: request(prompt, base_url=provider.base_url, cache_key=key) for key in ("ses_1", "ses_2")}

    answers = [await collect(client, asked["ses_1"]) for _ in range(3)]
    other = await collect(client, asked["ses_2"])

    assert [answer.error.retry_after if answer.error else answer.text for answer in answers] == [1, 1, "at last"]
    assert other.error is not None


async def test_the_demonstration(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    prompt = "Read notes.md and write a summary to short.md, please."
    history: list[ModelMessage | str] = [prompt]

    async def ask() -> Answer:
        return await collect(client, request(*history, base_url=provider.base_url, tools=(READ, WRITE)))

    first = await ask()
    history += called(first, "line one\n\nline two")
    second = await ask()
    history += called(second, "written")
    third = await ask()

    assert first.text == "I will read notes.md first."
    assert first.calls[0].input == {"path": "notes.md"}
    assert second.calls[0].name == "write"
    assert second.calls[0].input["filePath"] == "short.md"
    assert "line one" in second.calls[0].input["content"]
    assert (third.calls, third.finish) == ([], "stop")
    assert "short.md" in third.text


async def test_other_prompts_are_echoed(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    one = await collect(client, request("How are you?", base_url=provider.base_url, tools=(READ,)))
    two = await collect(client, request("Read a.md", base_url=provider.base_url))
    three = await collect(client, request("Read the readme", base_url=provider.base_url, tools=(READ,)))

    assert one.text == "You said: How are you?"
    assert two.text == "You said: Read a.md"
    assert three.calls[0].input == {"path": "README.md"}


async def test_ids_of_calls_never_come_back(client: httpx2.AsyncClient, provider: ScriptedProvider) -> None:
    asked = request("tool: now\ntool: now", base_url=provider.base_url)

    ids = [made.id for _ in range(2) for made in (await collect(client, asked)).calls]

    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [("GET", "/models", b"", 404), ("POST", "/chat/completions", b"{oops", 400)],
)
async def test_other_requests_are_refused(
    client: httpx2.AsyncClient, provider: ScriptedProvider, method: str, path: str, content: bytes, status: int
) -> None:
    response = await client.request(method, provider.base_url + path, content=content)

    assert response.status_code == status
    assert "message" in response.json()["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_program_serves_until_it_is_told_to_stop(client: httpx2.AsyncClient, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fencepost.providers.scripted",
        "--port",
        "0",
        "--delay-ms",
        "1",
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        prefix, _, address = line.strip().rpartition(" ")
        assert prefix == "listening on"
        answer = await collect(client, request("hello", base_url=address))
        hanging = asyncio.create_task(collect(client, request("say: x\nhang", base_url=address)))
        held = await client.post(f"{address}/chat/completions", content=json.dumps({"messages": []}))
        process.send_signal(number)

        assert await process.wait() == 0
        assert (await hanging).error is not None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    assert held.status_code == 200
    assert answer.text == "You said: hello"
