"""The adapter over a real connection: when it lets go, how long it waits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from fencepost.domain.errors import ProviderError
from fencepost.domain.stream import StreamEvent, TextDelta, ToolCall, ToolInputDelta
from fencepost.providers.http import make_client
from fencepost.providers.openai_chat import stream
from fencepost.providers.scripted import (
    Action,
    CallTool,
    CleanEof,
    Cut,
    ErrorEvent,
    Fail,
    Finish,
    Gate,
    Hang,
    Pause,
    Raw,
    Say,
    ScriptedProvider,
    Think,
)
from tests.providers.wire import KEY, Answer, Body, chunk, collect, request, say, sse


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with make_client() as made:
        yield made


async def asked(client: httpx2.AsyncClient, *actions: Action, **limits: float) -> Answer:
    async with ScriptedProvider([actions]) as provider:
        return await collect(client, request(base_url=provider.base_url, provider=limits))


async def test_one_request_is_made(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider([[Fail(503)], [Say("again")]]) as provider:
        answer = await collect(client, request(base_url=provider.base_url))

        assert answer.error is not None
        assert len(provider.requests) == 1


async def test_without_a_key_there_is_no_authorization(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider([[Say("a")], [Say("b")]]) as provider:
        await collect(client, request(base_url=provider.base_url), None)
        await collect(client, request(base_url=provider.base_url), KEY)

    assert "authorization" not in provider.headers[0]
    assert provider.headers[1]["authorization"] == f"Bearer {KEY}"


async def test_a_connection_is_used_again(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider([[Say("a")], [Fail(429)], [Say("b"), ErrorEvent("x")], [Say("c")]]) as provider:
        for _ in range(3):
            await collect(client, request(base_url=provider.base_url))

        assert provider.connections == 1


async def test_events_come_while_the_answer_goes_on(client: httpx2.AsyncClient) -> None:
    gate = Gate()
    calls = CallTool("ls", {"n": 1}, id="call_a"), CallTool("ls", {"n": 2}, id="call_b")
    script: list[Action] = [Say("first"), *calls, Pause(gate), Say("last")]
    async with ScriptedProvider([script]) as provider:
        events = stream(client, request(base_url=provider.base_url), None)
        seen = [await anext(events)]
        while not (isinstance(seen[-1], ToolInputDelta) and seen[-1].id == "call_b"):
            seen.append(await anext(events))
        await gate.reached()

        assert TextDelta("text-0", "first") in seen
        assert ToolCall("call_a", "ls", {"n": 1}) in seen

        gate.release()
        rest = [event async for event in events]

    assert TextDelta("text-1", "last") in rest


async def test_closing_the_generator_closes_the_connection(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider([[Say("a"), Hang()]]) as provider:
        events = stream(client, request(base_url=provider.base_url), None)
        async for event in events:
            if isinstance(event, TextDelta):
                break
        await events.aclose()

        await provider.left()


@pytest.mark.parametrize("script", [[Hang()], [Say("a"), Hang()]], ids=["before the first event", "after it"])
async def test_cancelling_closes_the_connection(client: httpx2.AsyncClient, script: list[Action]) -> None:
    async with ScriptedProvider([script]) as provider:
        task = asyncio.create_task(collect(client, request(base_url=provider.base_url)))
        await provider.received(1)
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await provider.left()


@pytest.mark.parametrize("last", [sse(say("b"), done=False), b"data: {oops\n\n"], ids=["by closing", "by an error"])
async def test_the_body_is_closed_when_the_generator_is(last: bytes) -> None:
    body = Body([sse(say("a"), done=False), last])
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, stream=body))
    async with httpx2.AsyncClient(transport=transport) as client:
        events = stream(client, request(), None)
        seen = [await anext(events) for _ in range(3)]
        open_before = not body.closed

        with contextlib.suppress(ProviderError):
            await anext(events)
            await events.aclose()

        assert open_before
        assert body.closed
    assert seen[-1] == TextDelta("text-0", "a")


@pytest.mark.parametrize(
    ("script", "name"),
    [([Hang()], "first_chunk_timeout"), ([Say("a"), Hang()], "idle_timeout")],
)
@pytest.mark.parametrize("longer", [0.05, 30.0])
async def test_silence_is_bounded(client: httpx2.AsyncClient, script: list[Action], name: str, longer: float) -> None:
    other = {"first_chunk_timeout", "idle_timeout"} - {name}
    answer = await asked(client, *script, **{name: 0.05, other.pop(): max(longer, 5.0)})

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", True)
    assert f"sent nothing for 0.05 seconds; {name}" in answer.error.message


async def test_a_provider_that_never_answers(client: httpx2.AsyncClient) -> None:
    release = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        asking = request(base_url=f"http://127.0.0.1:{port}", provider={"first_chunk_timeout": 0.05})
        answer = await collect(client, asking)
        release.set()

    assert answer.error is not None
    assert "first_chunk_timeout" in answer.error.message


@pytest.mark.parametrize("after", [[], [Raw(b"data: [DONE]\n\n")], [Raw(b": on and on\n\n")]])
async def test_a_provider_that_hangs_after_its_answer(client: httpx2.AsyncClient, after: list[Action]) -> None:
    script = Raw(sse(say("all"), chunk({}, "stop"), done=False)), *after, Hang()

    answer = await asked(client, *script, idle_timeout=0.05)

    assert (answer.error, answer.text, answer.finish) == (None, "all", "stop")


@pytest.mark.parametrize(("end", "said"), [(Cut(), "was lost"), (CleanEof(), "cut off")])
@pytest.mark.parametrize("start", [[], [Say("half an")], [Think("hm")], [CallTool("ls", "{", split=1)]])
async def test_an_answer_that_is_cut(client: httpx2.AsyncClient, start: list[Action], end: Action, said: str) -> None:
    answer = await asked(client, *start, end)

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", True)
    assert said in answer.error.message
    assert answer.calls == []


async def test_nobody_listens(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider() as provider:
        pass

    answer = await collect(client, request(base_url=provider.base_url))

    assert answer.error is not None
    assert answer.error.transient
    assert answer.error.message.startswith(f"Cannot reach acme at {provider.base_url}")


async def test_a_name_that_does_not_exist(client: httpx2.AsyncClient) -> None:
    answer = await collect(client, request(base_url="http://nowhere.invalid/v1"))

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", True)
    assert "http://nowhere.invalid/v1" in answer.error.message


async def test_another_path_of_the_address(client: httpx2.AsyncClient) -> None:
    async with ScriptedProvider([[Fail(301, headers={"location": "/elsewhere"})]]) as provider:
        answer = await collect(client, request(base_url=provider.base_url))
        missed = await collect(client, request(base_url=provider.base_url))

    assert answer.error is not None
    assert "redirects" in answer.error.message
    assert missed.error is not None
    assert "no script left" in missed.error.message


async def test_a_body_that_is_compressed_anyway() -> None:
    body = gzip.compress(sse(say("small"), chunk({}, "stop")))

    def respond(received: httpx2.Request) -> httpx2.Response:
        assert received.headers["accept-encoding"] == "identity"
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, content=body)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
        answer = await collect(client, request())

    assert answer.text == "small"


async def test_many_answers_at_once(client: httpx2.AsyncClient) -> None:
    gate = Gate()

    def reply(body: dict[str, Any]) -> list[Action]:
        return [Say(body["messages"][0]["content"], 3), Pause(gate), Finish(usage=(1, 2))]

    async with ScriptedProvider(reply) as provider:
        asking = [collect(client, request(f"prompt {n}", base_url=provider.base_url)) for n in range(50)]
        tasks = [asyncio.create_task(one) for one in asking]
        await provider.received(50)
        gate.release()
        answers = await asyncio.gather(*tasks)

    assert [answer.text for answer in answers] == [f"prompt {n}" for n in range(50)]


def kinds(events: list[StreamEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


async def test_the_order_of_one_whole_answer(client: httpx2.AsyncClient) -> None:
    answer = await asked(client, Think("a b"), Say("c d", 1), CallTool("ls", {"a": 1}, split=2), Finish(usage=(7, 3)))

    assert kinds(answer.events) == [
        "StepStart",
        *("ReasoningStart", "ReasoningDelta", "ReasoningDelta", "ReasoningEnd"),
        *("TextStart", "TextDelta", "TextEnd"),
        *("ToolInputStart", "ToolInputDelta", "ToolInputDelta", "ToolInputEnd", "ToolCall"),
        *("StepFinish", "Finish"),
    ]
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 3)
