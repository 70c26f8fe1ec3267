"""What failures mean: refused requests by status and words, waiting times, and that no message holds a key."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from fencepost.providers import failures
from tests.providers.wire import KEY, Answer, answered, collect, request


async def refused(status: int, body: Any = None, headers: dict[str, str] | None = None, **more: Any) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await answered(data, status=status, headers=headers, **more)
    assert answer.error is not None
    assert answer.error.status == status
    assert "\n" not in answer.error.message
    return answer


def error(message: str = "words", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


@pytest.mark.parametrize(
    ("status", "body", "reason", "transient"),
    [
        (400, error(), "InvalidRequest", False),
        (401, error(), "Authentication", False),
        (402, error(), "QuotaExceeded", False),
        (403, error(), "Authentication", False),
        (404, error("The model `m-1` does not exist", code="model_not_found"), "InvalidRequest", False),
        (408, error(), "ProviderInternal", True),
        (409, error(), "ProviderInternal", True),
        (418, error(), "InvalidRequest", False),
        (422, {"detail": [{"loc": ["body"], "msg": "words"}]}, "InvalidRequest", False),
        (429, error(), "RateLimit", True),
        (429, error(type="insufficient_quota", code="insufficient_quota"), "QuotaExceeded", False),
        (429, error("You exceeded your current quota, please retry in 20 s"), "RateLimit", True),
        (400, error("words", code="content_filter"), "ContentPolicy", False),
        (400, error("The response was filtered due to Azure's content management policy"), "ContentPolicy", False),
        (400, error(code="x", innererror={"code": "ResponsibleAIPolicyViolation"}), "ContentPolicy", False),
        (403, error("Your credit balance is too low"), "Authentication", False),
        (400, error("Your credit balance is too low"), "QuotaExceeded", False),
        (500, error(), "ProviderInternal", True),
        (501, error(), "ProviderInternal", False),
        (502, b"<html><title>502 Bad Gateway</title></html>", "ProviderInternal", True),
        (503, {"message": "words"}, "ProviderInternal", True),
        (529, [error()], "ProviderInternal", True),
        (302, b"", "InvalidRequest", False),
    ],
)
async def test_refusals_are_sorted(status: int, body: Any, reason: str, transient: bool) -> None:
    answer = await refused(status, body)

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == (reason, transient)
    assert answer.error.classification is None
    assert len(answer.events) == 1


OVERFLOWS: list[tuple[int, Any]] = [
    (400, error("Input tokens exceed the limit.", code="context_length_exceeded")),
    (400, {"type": "error", "error": {"type": "x", "message": "prompt is too long: 213000 tokens > 200000 maximum"}}),
    (400, {"message": "This model's maximum context length is 262144 tokens. You requested 262145.", "code": 400}),
    (400, error("request exceeds the available context size", type="exceed_context_size_error", code=400)),
    (500, error("the request exceeds the available context size. try increasing the context size", code=500)),
    (400, error("This endpoint's maximum context length is 262144 tokens. However, you asked for more", code=400)),
    (400, error("The prompt is too long: 267657, model maximum context length: 262143")),
    (400, error("Input length 9000 exceeds maximum allowed token size 8192, the context window")),
    (422, error("Input is too long for requested model.")),
    (400, error("Please reduce the length of the messages or completion.")),
    (400, error("The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)")),
    (413, error("Request Entity Too Large")),
    (413, b"<html>413</html>"),
    (429, error("Too big for the window", code="context_length_exceeded")),
]

LOOK_ALIKES: list[tuple[int, Any, str]] = [
    (429, {"message": "ThrottlingException: Too many tokens, please wait before trying again."}, "RateLimit"),
    (400, {"message": "ThrottlingException: Too many tokens, please wait before trying again."}, "RateLimit"),
    (
        429,
        error(
            "Request too large for m-1 on tokens per min (TPM): Limit 30000, Requested 40000.",
            code="rate_limit_exceeded",
        ),
        "RateLimit",
    ),
    (
        400,
        error("The response was filtered", code="content_filter", innererror={"code": "ResponsibleAIPolicyViolation"}),
        "ContentPolicy",
    ),
    (
        400,
        error("max_tokens is too large: 50000. This model supports at most 16384 completion tokens"),
        "InvalidRequest",
    ),
    (400, error("Invalid 'messages[1].content': string too long. Expected at most 100 characters"), "InvalidRequest"),
    (400, error("Unknown parameter: context_window"), "InvalidRequest"),
    (404, error("No model with maximum context length found"), "InvalidRequest"),
]


@pytest.mark.parametrize(("status", "body"), OVERFLOWS)
async def test_an_overflow_of_the_context_is_recognised(status: int, body: Any) -> None:
    answer = await refused(status, body)

    assert answer.error is not None
    assert answer.error.classification == "context-overflow"
    assert (answer.error.reason, answer.error.transient) == ("InvalidRequest", False)


@pytest.mark.parametrize(("status", "body", "reason"), LOOK_ALIKES)
async def test_what_only_looks_like_an_overflow(status: int, body: Any, reason: str) -> None:
    answer = await refused(status, body)

    assert answer.error is not None
    assert answer.error.classification is None
    assert answer.error.reason == reason


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "x", "retry-after": "2"}, 2),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:30 GMT"}, 10),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 99 Oct 2015 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_waiting_times(headers: dict[str, str], seconds: float | None) -> None:
    assert failures.retry_after(headers, now=1_700_000_000) == seconds


def test_waiting_until_a_date_is_rounded_up() -> None:
    date = format_datetime(datetime.fromtimestamp(1_700_000_010, UTC), usegmt=True)

    assert failures.retry_after({"retry-after": date}, now=1_700_000_007.9) == 3


async def test_the_waiting_time_comes_with_the_error() -> None:
    answer = await refused(429, error("Rate limit reached", code="rate_limit_exceeded"), {"Retry-After": "7"})

    assert answer.error is not None
    assert answer.error.retry_after == 7


@pytest.mark.parametrize(
    ("status", "advice", "transient"), [(503, "false", False), (422, "true", True), (503, "?", True)]
)
async def test_a_provider_may_say_itself_whether_to_retry(status: int, advice: str, transient: bool) -> None:
    answer = await refused(status, error(), {"x-should-retry": advice})

    assert answer.error is not None
    assert answer.error.transient is transient


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (error("Rate limit\nreached"), "Rate limit reached"),
        ({"error": "plain words"}, "plain words"),
        ({"error": {"code": "some_code"}}, "some_code"),
        ({"detail": "plain words"}, "plain words"),
        ({"errors": ["plain words"]}, "plain words"),
        (
            error("Provider returned error", metadata={"raw": "upstream words"}),
            "Provider returned error: upstream words",
        ),
        (b"plain words", "plain words"),
        (b"<html><head><title>Bad\n Gateway</title></head></html>", "Bad Gateway"),
        (b"", "no reason given"),
        ({}, "no reason given"),
        ([], "no reason given"),
    ],
)
async def test_the_message_begins_with_the_provider_s_words(body: Any, words: str) -> None:
    answer = await refused(500, body)

    assert answer.error is not None
    assert answer.error.message == f"{words} (HTTP 500 from acme at http://provider.test/v1)"


async def test_a_long_body_is_cut() -> None:
    answer = await refused(500, b"x" * 300_000)

    assert answer.error is not None
    assert len(answer.error.message) < 800


async def test_a_refused_key_names_the_variable() -> None:
    answer = await refused(401, error("Incorrect key"), asked=request(provider={"api_key_env": "ACME_KEY"}))

    assert answer.error is not None
    assert "ACME_KEY" in answer.error.message


async def test_an_unknown_model_is_named() -> None:
    answer = await refused(404, b"Not Found")

    assert answer.error is not None
    assert "'m-1'" in answer.error.message


@pytest.mark.parametrize(
    "body",
    [
        error(f"Incorrect API key provided: {KEY}."),
        {"error": f"bad header Authorization: Bearer {KEY}"},
        f"what is {KEY}".encode(),
        error("Incorrect API key provided: sk-proj-AbCdEf0123456789AbCdEf."),
    ],
)
@pytest.mark.parametrize("status", [200, 401, 500])
async def test_no_message_holds_a_key(body: Any, status: int) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    answer = await answered(data, status=status)

    said = answer.error.message if answer.error else answer.reported.message
    assert KEY not in said
    assert "sk-" not in said
    assert "[redacted]" in said


async def test_an_error_in_the_stream_does_not_show_the_key() -> None:
    shapeless = "correct horse"
    body = b"data: " + json.dumps(error(f"key {shapeless} is over its limit")).encode() + b"\n\n"

    answer = await answered(body, key=shapeless)

    assert answer.reported.message == "key [redacted] is over its limit"


@pytest.mark.parametrize("key", ["sk-line\nbreak", "sk-ümlaut"])
async def test_a_key_that_no_header_can_carry_is_not_shown(key: str) -> None:
    async with httpx2.AsyncClient() as client:
        answer = await collect(client, request(), key)

    assert answer.error is not None
    assert answer.error.reason == "Authentication"
    assert key not in repr(answer.error)


@pytest.mark.parametrize(
    ("broken", "said", "transient"),
    [
        (httpx2.ConnectError("Connection refused"), "Cannot reach acme at http://provider.test/v1: Connection", True),
        (httpx2.ConnectError(""), "Cannot reach", True),
        (httpx2.ConnectTimeout(""), "no answer in time", True),
        (httpx2.PoolTimeout(""), "too many requests open", True),
        (httpx2.ReadTimeout(""), "first_chunk_timeout", True),
        (httpx2.ReadError(""), "ReadError", True),
        (httpx2.RemoteProtocolError("peer closed\nconnection"), "peer closed connection", True),
        (httpx2.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'"), "header that HTTP does not allow", False),
        (httpx2.UnsupportedProtocol("ftp"), "base_url", False),
    ],
)
async def test_connections_that_fail(broken: Exception, said: str, transient: bool) -> None:
    answer = await answered(broken)

    assert answer.error is not None
    assert (answer.error.reason, answer.error.transient) == ("Transport", transient)
    assert said in answer.error.message
    assert "\n" not in answer.error.message
    assert KEY not in answer.error.message


async def test_passwords_in_the_address_are_not_shown() -> None:
    answer = await answered(httpx2.ReadError(""), asked=request(base_url="http://me:hunter2@provider.test/v1"))

    assert answer.error is not None
    assert "http://provider.test/v1" in answer.error.message
    assert "hunter2" not in answer.error.message
