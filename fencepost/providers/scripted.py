"""The scripted provider: a real HTTP server on the loopback interface that speaks OpenAI Chat, without any model.

`python -m fencepost.providers.scripted --port 0` prints where it listens and serves until it is told to stop; prompts
steer it, see `fencepost.providers.script`. Inside a test, `ScriptedProvider(...)` plays exactly the actions it is
given, and keeps the requests it got.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import h11

from fencepost.providers import demo
from fencepost.providers.script import (
    ENDS,
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
    Think,
    directed,
    pieces,
)

__all__ = [
    "Action",
    "CallTool",
    "CleanEof",
    "Cut",
    "ErrorEvent",
    "Fail",
    "Finish",
    "Gate",
    "Hang",
    "Pause",
    "Raw",
    "Reply",
    "Say",
    "ScriptedProvider",
    "Think",
    "main",
]

Reply: TypeAlias = Callable[[dict[str, Any]], Sequence[Action]]

_READ_BYTES = 256 * 1024
_HEAD = b'data: {"id":"chatcmpl-scripted","object":"chat.completion.chunk","created":0,"model":"scripted","choices":'
_DONE = b"data: [DONE]\n\n"


class ScriptedProvider:
    """Answers each request with a script of actions: `async with ScriptedProvider([[Say("hi")]]) as provider`.

    `reply` is a list of scripts, one per request in their order, or a function from the request body to a script; None
    is the built-in behaviour. When the list is used up, requests are refused with status 400, which nobody repeats.
    """

    def __init__(
        self, reply: Reply | Sequence[Sequence[Action]] | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._reply = reply
        self._scripts = list(reply) if reply is not None and not callable(reply) else []
        self._host = host
        self._port = port
        self._delay = 0.0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: Counter[tuple[str, str, int]] = Counter()
        self._changed = asyncio.Condition()
        self.requests: list[dict[str, Any]] = []
        """Every decoded request body, in the order of arrival."""
        self.headers: list[dict[str, str]] = []
        """The headers of the same requests, names in lower case."""
        self.connections = 0
        """How many connections have been opened."""
        self.abandoned = 0
        """How many answers the client has left before their end."""

    @property
    def base_url(self) -> str:
        """The address to configure, with `/v1`."""
        return f"http://{self._host}:{self._port}/v1"

    def with_delay(self, seconds: float) -> ScriptedProvider:
        """Make the built-in behaviour wait so long before each chunk."""
        self._delay = seconds
        return self

    async def __aenter__(self) -> ScriptedProvider:
        self._server = await asyncio.start_server(self._accept, self._host, self._port, backlog=1024)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def received(self, count: int) -> None:
        """Wait until so many requests have arrived."""
        await self._until(lambda: len(self.requests) >= count)

    async def left(self, count: int = 1) -> None:
        """Wait until the client has left so many answers before their end."""
        await self._until(lambda: self.abandoned >= count)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await _Connection(self, reader, writer).serve()
        except (ConnectionError, h11.RemoteProtocolError, asyncio.CancelledError):
            # The client went away, or the server is being closed: either way this connection has ended.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def script(self, body: dict[str, Any], headers: dict[str, str]) -> list[Action]:
        """Record a request and give the actions that answer it; called by its connection."""
        self.requests.append(body)
        self.headers.append(headers)
        await self._note()
        if callable(self._reply):
            actions = list(self._reply(body))
        elif self._reply is not None:
            missing = Fail(400, {"error": {"message": "the scripted provider has no script left for this request"}})
            actions = list(self._scripts.pop(0)) if self._scripts else [missing]
        else:
            actions = self._by_prompt(body)
        if not actions or not isinstance(actions[-1], (*ENDS, Fail)):
            actions.append(Finish())
        return actions

    async def abandon(self) -> None:
        """Count an answer that the client has left; called by its connection."""
        self.abandoned += 1
        await self._note()

    def _by_prompt(self, body: dict[str, Any]) -> list[Action]:
        found = directed(body.get("messages") or [])
        if found is None:
            return demo.answer(body, self._delay)
        prompt, number, actions = found
        if actions and isinstance(actions[0], Fail) and actions[0].times is not None:
            # Counted per session, which the cache key tells apart: the same prompt fails afresh in each.
            key = (str(body.get("prompt_cache_key", "")), prompt, number)
            self._failed[key] += 1
            if self._failed[key] > actions[0].times:
                return actions[1:]
        return list(actions)


class _Connection:
    """One connection: requests one after the other, each with its answer."""

    def __init__(self, provider: ScriptedProvider, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._provider = provider
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        while (request := await self._request()) is not None:
            head, content = request
            if not await self._respond(head, content):
                return
            if self._http.our_state is h11.MUST_CLOSE:
                return
            self._http.start_next_cycle()

    async def _request(self) -> tuple[h11.Request, bytes] | None:
        head: h11.Request | None = None
        content: list[bytes] = []
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                content.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return head, b"".join(content)
            else:
                return None

    async def _respond(self, head: h11.Request, content: bytes) -> bool:
        """Answer one request; False when the connection must not be used again."""
        path = head.target.decode("latin-1").partition("?")[0]
        if head.method != b"POST" or not path.endswith("/chat/completions"):
            self._whole(404, {"error": {"message": f"the scripted provider has nothing at {path}"}})
            return True
        try:
            body = json.loads(content)
        except ValueError:
            self._whole(400, {"error": {"message": "the request body is no JSON"}})
            return True
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        actions = await self._provider.script(body, headers)
        playing = asyncio.ensure_future(self._play(body, actions))
        watching = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait((playing, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not playing.done() and not watching.result():
                raise ConnectionResetError
            again = await playing
            if watching.done() and watching.exception() is None:
                # The next request is already on its way: the client has seen the end of this answer before we did.
                self._http.receive_data(watching.result())
            return again
        except ConnectionError:
            await self._provider.abandon()
            return False
        finally:
            for task in (playing, watching):
                task.cancel()
            await asyncio.gather(playing, watching, return_exceptions=True)

    def _whole(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {}), "content-length": str(len(data))}
        self._send(h11.Response(status_code=status, headers=list(sent.items())))
        self._send(h11.Data(data=data))
        self._send(h11.EndOfMessage())

    def _send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)

    async def _play(self, body: dict[str, Any], actions: Sequence[Action]) -> bool:
        if isinstance(actions[0], Fail):
            fail = actions[0]
            default = {"error": {"message": f"scripted failure {fail.status}", "type": "scripted", "code": None}}
            self._whole(fail.status, default if fail.body is None else fail.body, fail.headers)
            await self._writer.drain()
            return True
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        self._send(h11.Response(status_code=200, headers=headers))
        answer = _Answer(body, len(self._provider.requests))
        for action in actions:
            if isinstance(action, Cut):
                return False
            if isinstance(action, Pause):
                await action.gate.wait()
            elif isinstance(action, Hang):
                await asyncio.Event().wait()
            delay = getattr(action, "delay", 0)
            async for chunk in answer.chunks(action):
                if delay:
                    await asyncio.sleep(delay)
                self._send(h11.Data(data=chunk))
                await self._writer.drain()
        self._send(h11.EndOfMessage())
        await self._writer.drain()
        return True


class _Answer:
    """The chunks of one answer, and what its usage is counted from."""

    def __init__(self, body: Mapping[str, Any], number: int) -> None:
        self._body = body
        self._number = number
        self._characters = 0
        self._calls = 0

    async def chunks(self, action: Action) -> AsyncIterator[bytes]:
        """Give the body bytes that an action sends, one network chunk each."""
        match action:
            case Say():
                for piece in pieces(action.text, action.chunks):
                    yield self._delta({"content": piece})
                self._characters += len(action.text)
            case Think():
                for piece in pieces(action.text, action.chunks):
                    yield self._delta({action.field: piece})
                self._characters += len(action.text)
            case CallTool():
                for fragment in self._call(action):
                    yield self._delta({"tool_calls": [fragment]})
            case Raw():
                yield action.data
            case ErrorEvent():
                error = {"message": action.message, "type": action.type, "param": None, "code": action.code}
                yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
                yield _DONE
            case Finish():
                yield self._finish(action)
            case Cut() | CleanEof() | Hang() | Pause() | Fail():
                return

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return b"".join((_HEAD, b'[{"index":0,"delta":', json.dumps(delta).encode(), b',"finish_reason":null}]}\n\n'))

    def _call(self, action: CallTool) -> list[dict[str, Any]]:
        text = action.arguments if isinstance(action.arguments, str) else json.dumps(action.arguments)
        index = self._calls
        self._calls += 1
        self._characters += len(text)
        # Never the same twice in a conversation, also when this server is started again in the middle of it.
        call_id = action.id or f"call_{len(self._body.get('messages') or ())}_{self._number}_{index}"
        first = {"index": index, "id": call_id, "type": "function", "function": {"name": action.name, "arguments": ""}}
        rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces(text, action.split)]
        return [first, *rest]

    def _finish(self, action: Finish) -> bytes:
        reason = action.reason or ("tool_calls" if self._calls else "stop")
        end = b'[{"index":0,"delta":{},"finish_reason":' + json.dumps(reason).encode() + b"}]}\n\n"
        given = action.usage or (len(json.dumps(self._body.get("messages") or [])) // 4, -(-self._characters // 4))
        usage = {"prompt_tokens": given[0], "completion_tokens": given[1], "total_tokens": sum(given)}
        return b"".join((_HEAD, end, _HEAD, b'[],"usage":', json.dumps(usage).encode(), b"}\n\n", _DONE))


def _on_input(stopped: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        stopped.set()


async def _serve(host: str, port: int, delay: float, *, until_stdin_ends: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    if until_stdin_ends:
        loop.add_reader(sys.stdin.fileno(), _on_input, stopped)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with ScriptedProvider(host=host, port=port).with_delay(delay) as provider:
        sys.stdout.write(f"listening on {provider.base_url}\n")
        sys.stdout.flush()
        await stopped.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; print one line with the address."""
    parser = argparse.ArgumentParser(prog="python -m fencepost.providers.scripted", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--delay-ms", type=float, default=0, help="wait so long before each chunk")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end with whoever started this")
    options = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        delay = options.delay_ms / 1000
        asyncio.run(_serve(options.host, options.port, delay, until_stdin_ends=options.until_stdin_ends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
