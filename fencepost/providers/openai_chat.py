"""The adapter of the OpenAI Chat Completions protocol, which most other endpoints speak too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
from pydantic_core import from_json

from fencepost.domain.clean import clean
from fencepost.domain.errors import ProviderError
from fencepost.domain.models import ModelRequest
from fencepost.domain.stream import Finish, ProviderErrorEvent, StepFinish, StepStart, StreamEvent
from fencepost.providers import failures
from fencepost.providers.chat_decoder import ChatDecoder
from fencepost.providers.chat_request import build_body, encode_body
from fencepost.providers.sse import MAX_EVENT_BYTES, ErrorData, EventReader, EventTooLargeError

__all__ = ["build_body", "stream"]

CONNECT_TIMEOUT = 30.0
AFTER_REASON = 10.0
AFTER_USAGE = 0.5
"""Seconds that the rest of a complete answer is waited for: its usage may follow its reason, then only the end."""

_MAX_ERROR_BYTES = 64 * 1024


async def stream(
    client: httpx2.AsyncClient, request: ModelRequest, api_key: str | None
) -> AsyncGenerator[StreamEvent, None]:
    """Make exactly one request and yield its answer as it arrives.

    `StepStart` comes first, `StepFinish` and `Finish` last; or a `ProviderErrorEvent` last, when the provider reports
    an error inside the stream. A tool call is yielded as soon as it is complete, while the answer goes on. Closing the
    generator, or cancelling the task in it, closes the HTTP stream. Raises ProviderError for all else that can go
    wrong; no message holds the key.
    """
    attempt = _Attempt(client, request, api_key)
    yield StepStart(0)
    try:
        async with contextlib.aclosing(await attempt.send()) as response:
            chunks = _chunks(response)
            if response.status_code != 200:
                raise await attempt.refusal(response, chunks)
            async with contextlib.aclosing(attempt.events(chunks)) as events:
                async for event in events:
                    yield event
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        raise attempt.broken(error) from error


def _chunks(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    # Decoding costs as much again as reading, and identity is what was asked for.
    encoded = response.headers.get("content-encoding", "identity") != "identity"
    return response.aiter_bytes() if encoded else response.aiter_raw()


class _Attempt:
    """One request: what is known about it when something goes wrong."""

    def __init__(self, client: httpx2.AsyncClient, request: ModelRequest, api_key: str | None) -> None:
        self._client = client
        self._request = request
        self._key = api_key
        self._provider = request.provider
        self._where = f"{request.model.provider_id} at {failures.display_url(request.provider.base_url)}"
        self._answered = False
        self._decoder = ChatDecoder()
        # The HTTP library knows one limit for all reads; a shorter one is set around a read, which costs more.
        self._read_limit = max(request.provider.first_chunk_timeout, request.provider.idle_timeout)

    async def send(self) -> httpx2.Response:
        """Send the request and give the response when its headers are there, its body still to be read.

        Raises ProviderError for a key that no header can carry.
        """
        provider = self._provider
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                # Said here, because the HTTP library would print the key in its own error.
                message = f"The API key for {self._where} holds characters that no HTTP header can carry"
                raise ProviderError(message, reason="Authentication", transient=False)
            headers["Authorization"] = f"Bearer {self._key}"
        headers.update(provider.headers)
        limit = provider.first_chunk_timeout
        request = self._client.build_request(
            "POST",
            f"{provider.base_url}/chat/completions",
            content=encode_body(build_body(self._request)),
            headers=headers,
            timeout=httpx2.Timeout(self._read_limit, connect=min(CONNECT_TIMEOUT, limit), pool=CONNECT_TIMEOUT),
        )
        async with asyncio.timeout(limit):
            return await self._client.send(request, stream=True)

    async def events(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[StreamEvent, None]:
        """Give the events of the body, up to the one that ends the answer. Raises ProviderError."""
        reader, decoder = EventReader(), self._decoder
        limit = self._provider.first_chunk_timeout
        head = b""  # what came before the first event, in case that no event ever comes
        while True:
            chunk = await self._next(chunks, limit)
            try:
                payloads = reader.finish() if chunk is None else reader.feed(chunk)
            except EventTooLargeError:
                raise self._unusable(f"sent one event of more than {MAX_EVENT_BYTES // 2**20} MiB") from None
            if payloads:
                self._answered = True
            elif chunk and not self._answered and len(head) < _MAX_ERROR_BYTES:
                head += chunk
            done = chunk is None
            for payload in payloads:
                if payload == b"[DONE]":
                    done = True
                    break
                for event in self._decoded(payload):
                    yield event
                    if type(event) is ProviderErrorEvent:
                        return
            if done:
                break
            limit = self._provider.idle_timeout
            if decoder.reason is not None:
                limit = min(limit, AFTER_USAGE if decoder.usage_is_final else AFTER_REASON)
        for event in self._end(chunk is None, head):
            yield event
        if chunk is not None:
            await _drain(chunks, min(limit, AFTER_USAGE))

    async def _next(self, chunks: AsyncGenerator[bytes, None], limit: float) -> bytes | None:
        """Give the next chunk, None at the end of the body, which for a complete answer includes any break."""
        try:
            if limit >= self._read_limit:
                return await anext(chunks, None)
            async with asyncio.timeout(limit):
                return await anext(chunks, None)
        except (httpx2.TransportError, TimeoutError):
            if self._decoder.reason is None:
                raise
            return None

    def _decoded(self, payload: bytes) -> list[StreamEvent]:
        try:
            value: Any = from_json(payload)
        except ValueError:
            value = self._json(payload)
        try:
            error = value if type(payload) is ErrorData else failures.error_in(value)
            if error is None:
                return self._decoder.feed(value)
            return [failures.classify(error, api_key=self._key).as_event()]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise self._unusable("sent a chunk of an unknown shape", payload) from None

    def _json(self, payload: bytes) -> Any:
        if type(payload) is ErrorData:
            return payload.decode("utf-8", "replace")
        try:
            # Takes a lone surrogate, half of a character that an endpoint cut in two, where the fast parser does not.
            return clean(json.loads(payload))
        except (ValueError, RecursionError):
            raise self._unusable("sent a chunk that is no JSON", payload) from None

    def _end(self, at_eof: bool, head: bytes) -> list[StreamEvent]:
        decoder = self._decoder
        if decoder.reason is None and at_eof:
            if not self._answered and head.strip() and not head.lstrip().startswith(b":"):
                return [self._no_stream(head)]
            raise ProviderError(
                f"The answer of {self._where} was cut off before its end; it may work when it is tried again",
                reason="Transport",
                transient=True,
            )
        events: list[StreamEvent] = []
        decoder.finish(events, decoder.reason or "unknown")
        reason = decoder.reason or "unknown"
        events.append(StepFinish(0, reason, decoder.usage, decoder.raw_reason))
        events.append(Finish(reason, decoder.usage))
        return events

    def _no_stream(self, head: bytes) -> StreamEvent:
        body = failures.read_body(head)
        error = failures.error_in(body) if isinstance(body, dict) else None
        if error is None:
            raise self._unusable("did not answer with a stream of events; check base_url", head)
        return failures.classify(error, api_key=self._key).as_event()

    def _unusable(self, what: str, sample: bytes = b"") -> ProviderError:
        shown = failures.redacted(str(failures.read_body(sample[:2000])), self._key)[:200] if sample else ""
        message = f"{self._where} {what}" + (f": {shown}" if shown else "")
        return ProviderError(message, reason="InvalidProviderOutput", transient=False)

    async def refusal(self, response: httpx2.Response, chunks: AsyncGenerator[bytes, None]) -> ProviderError:
        """Give the error that a status other than 200 stands for, in the provider's words where there are any."""
        body = b""
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            while len(body) < _MAX_ERROR_BYTES and (chunk := await self._next(chunks, self._provider.idle_timeout)):
                body += chunk
        status = response.status_code
        value = failures.read_body(body)
        failure = failures.classify(value, status=status, headers=response.headers, api_key=self._key)
        hint = ""
        if status in (401, 403) and self._provider.api_key_env:
            hint = f"; check the key in {self._provider.api_key_env}"
        elif status == 404:
            hint = f"; check the model {self._request.model.id!r} and base_url"
        elif 300 <= status < 400:
            hint = "; it redirects, set base_url to the address itself"
        return failure.as_error(f"{failure.message} (HTTP {status} from {self._where}{hint})")

    def broken(self, error: Exception) -> ProviderError:
        """Give the error of a connection that could not be made, or did not last."""
        provider, where = self._provider, self._where
        lasting = _lasting(error)
        if lasting is not None:
            return ProviderError(f"Cannot call {where}: {lasting}", reason="Transport", transient=False)
        if isinstance(error, httpx2.PoolTimeout):
            message = f"No connection to {where} was free in time; this worker has too many requests open"
        elif isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError | httpx2.ProxyError):
            said = failures.redacted(str(error), self._key) or "no answer in time"
            message = f"Cannot reach {where}: {said}; check that it runs and that base_url is right"
        elif isinstance(error, httpx2.TimeoutException | TimeoutError):
            name = "idle_timeout" if self._answered else "first_chunk_timeout"
            seconds = provider.idle_timeout if self._answered else provider.first_chunk_timeout
            message = f"{where} sent nothing for {seconds:g} seconds; {name} is the setting for it"
        else:
            said = failures.redacted(str(error), self._key) or type(error).__name__
            message = f"The connection to {where} was lost: {said}; it may work when it is tried again"
        return ProviderError(message, reason="Transport", transient=True)


def _lasting(error: Exception) -> str | None:
    """Give the words for a failure that no repetition mends, None for any other."""
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return "base_url is no usable address"
    if isinstance(error, httpx2.LocalProtocolError):
        return "the request has a header that HTTP does not allow"  # its own words would hold the header's value
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message})"
        cause = cause.__cause__ or cause.__context__
    return None


async def _drain(chunks: AsyncGenerator[bytes, None], limit: float) -> None:
    """Read the end of the body, so that the connection can be used again; an endpoint that goes on is left."""
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(limit):
            while await anext(chunks, None) is not None:
                pass
