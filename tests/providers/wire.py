"""What the tests of adapters share: a request, a body cut into network chunks, and what an adapter made of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from fencepost.domain.errors import ProviderError
from fencepost.domain.models import (
    Content,
    ModelConfig,
    ModelMessage,
    ModelRef,
    ModelRequest,
    ProviderConfig,
    TextContent,
)
from fencepost.domain.stream import (
    Finish,
    ProviderErrorEvent,
    ReasoningDelta,
    StepFinish,
    StreamEvent,
    TextDelta,
    ToolCall,
    Usage,
)
from fencepost.domain.tools import ToolDefinition
from fencepost.providers.openai_chat import stream

KEY = "sk-test-0123456789abcdef"
BASE_URL = "http://provider.test/v1"
READ = ToolDefinition("read", "Read a file", {"type": "object", "properties": {"path": {"type": "string"}}})
WRITE = ToolDefinition(
    "write", "Write a file", {"properties": {"filePath": {"type": "string"}, "content": {"type": "string"}}}
)


def message(role: Any, *content: Content | str) -> ModelMessage:
    return ModelMessage(role, tuple(TextContent(part) if isinstance(part, str) else part for part in content))


def request(
    *messages: ModelMessage | str,
    base_url: str = BASE_URL,
    config: ModelConfig | None = None,
    provider: Mapping[str, Any] | None = None,
    **more: Any,
) -> ModelRequest:
    return ModelRequest(
        model=ModelRef(id="m-1", provider_id="acme"),
        provider=ProviderConfig.model_validate({"base_url": base_url, **(provider or {})}),
        config=config or ModelConfig(),
        messages=tuple(message("user", item) if isinstance(item, str) else item for item in messages or ("hi",)),
        **more,
    )


def chunk(delta: Mapping[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One chunk of an answer; without a delta its choice has none."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if delta is not None:
        choice["delta"] = delta
    return {"id": "chatcmpl-9", "object": "chat.completion.chunk", "model": "m-1", "choices": [choice], **more}


def say(text: str) -> dict[str, Any]:
    return chunk({"content": text})


def call(*fragments: Mapping[str, Any]) -> dict[str, Any]:
    return chunk({"tool_calls": list(fragments)})


def fragment(arguments: Any = None, name: Any = None, **more: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**more, "function": function}


def sse(*events: Mapping[str, Any] | str, done: bool = True) -> bytes:
    """A body of events; text is put in as it is."""
    lines = [item if isinstance(item, str) else f"data: {json.dumps(item, ensure_ascii=False)}\n\n" for item in events]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


@dataclass
class Answer:
    """What an adapter made of one answer."""

    events: list[StreamEvent] = field(default_factory=list)
    error: ProviderError | None = None
    sent: list[httpx2.Request] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))

    @property
    def calls(self) -> list[ToolCall]:
        return [event for event in self.events if isinstance(event, ToolCall)]

    @property
    def step(self) -> StepFinish | None:
        return next((event for event in self.events if isinstance(event, StepFinish)), None)

    @property
    def finish(self) -> str | None:
        return next((event.reason for event in self.events if isinstance(event, Finish)), None)

    @property
    def usage(self) -> Usage | None:
        return self.step.usage if self.step else None

    @property
    def reported(self) -> ProviderErrorEvent:
        (event,) = [event for event in self.events if isinstance(event, ProviderErrorEvent)]
        assert self.events[-1] is event
        return event


class Body(httpx2.AsyncByteStream):
    """A response body in these network chunks, which breaks at its end when `then` is given."""

    def __init__(self, chunks: Iterable[bytes], then: Exception | None = None) -> None:
        self._chunks = list(chunks)
        self._then = then
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for item in self._chunks:
            yield item
        if self._then is not None:
            raise self._then


async def collect(client: httpx2.AsyncClient, asked: ModelRequest, key: str | None = KEY) -> Answer:
    answer = Answer()
    try:
        async for event in stream(client, asked, key):
            answer.events.append(event)
    except ProviderError as error:
        answer.error = error
    return answer


async def answered(
    body: bytes | Iterable[bytes] | Exception,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    asked: ModelRequest | None = None,
    then: Exception | None = None,
    key: str | None = KEY,
) -> Answer:
    """Give what the adapter makes of a response body, in the network chunks given; `then` breaks the connection."""
    sent: list[httpx2.Request] = []

    def respond(received: httpx2.Request) -> httpx2.Response:
        sent.append(received)
        if isinstance(body, Exception):
            raise body
        chunks = [body] if isinstance(body, bytes) else body
        return httpx2.Response(status, headers=headers or {}, stream=Body(chunks, then))

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
        answer = await collect(client, asked or request(), key)
    answer.sent = sent
    return answer
