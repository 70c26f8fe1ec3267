"""What a provider's failure means: may it pass by itself, when, and is it the context that is too long.

Providers of the OpenAI family agree on little here, so the order of the tests matters: a code before words, a throttle
before an overflow ("too many tokens, please wait" is no overflow, and compacting the session would not help).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic_core import from_json

from fencepost.clock import Clock
from fencepost.domain.errors import ProviderError, ProviderReason
from fencepost.domain.stream import ProviderErrorEvent

MAX_WORDS = 600
"""Characters of a provider's own words that a message keeps."""

_SEARCHED = 4000  # characters: the patterns below would take seconds on a body that is made for it

_FILTER_CODES = frozenset(
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "content_filtered", "safety"}
)
_QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "insufficient_balance"})
_THROTTLE_CODES = frozenset(
    {"rate_limit_exceeded", "rate_limit_error", "rate_limited", "throttlingexception", "too_many_requests", "tokens"}
)
_OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "exceed_context_size_error",
        "model_context_window_exceeded",
        "max_context_length_exceeded",
    }
)
_SERVER_CODES = frozenset(
    {"server_error", "api_error", "internal_error", "internal_server_error", "overloaded_error", "overloaded"}
)
_KEY_CODES = frozenset({"authentication_error", "invalid_api_key", "permission_error"})
_REQUEST_CODES = frozenset({"invalid_request_error", "badrequesterror", "not_found_error", "model_not_found"})

_THROTTLE_WORDS = re.compile(
    r"throttl|rate.?limit|too many requests|too many tokens, please wait|(?:tokens|requests) per (?:min|day|hour|sec)",
    re.I,
)
_QUOTA_WORDS = re.compile(r"insufficient (?:quota|credits?|balance|funds)|credit balance is too low", re.I)
_FILTER_WORDS = re.compile(r"content (?:management|filtering|usage) polic|flagged (?:by|for) moderation", re.I)
_OVERFLOW_WORDS = re.compile(
    r"prompt (?:is )?too long"
    r"|maximum (?:context|prompt) length"
    r"|maximum model length"
    r"|exceeds? (?:the |this |its |your )?(?:model'?s? )?(?:available |maximum |allowed )*context"
    r"|context (?:length|window|size)\b.{0,40}\b(?:exceed|too (?:long|small|large)|limit of)"
    r"|(?:exceed|larger|greater|longer)\w*\b.{0,60}\bcontext (?:length|window|size)"
    r"|input (?:is )?too long"
    r"|input (?:token|length)\w*\b.{0,60}\bexceed"
    r"|reduce the length of (?:the|your) (?:messages|prompt|input)"
    r"|too large for model with \d+ maximum context",
    re.I,
)
_KEY_SHAPES = re.compile(r"\b(?:sk|pk|gsk|xai|key)[-_][A-Za-z0-9_\-]{16,}|(?<=Bearer )\S+", re.I)


@dataclass(frozen=True, slots=True)
class Failure:
    """A provider's error, understood. `message` is one line in the provider's words; `retry_after` is in seconds."""

    message: str
    reason: ProviderReason
    transient: bool
    status: int | None = None
    retry_after: float | None = None
    classification: Literal["context-overflow"] | None = None

    def as_error(self, message: str | None = None) -> ProviderError:
        """Give the exception that says this, with `message` in place of the provider's bare words."""
        return ProviderError(
            message or self.message,
            reason=self.reason,
            transient=self.transient,
            status=self.status,
            retry_after=self.retry_after,
            classification=self.classification,
        )

    def as_event(self) -> ProviderErrorEvent:
        """Give the event of an error that came inside a stream."""
        return ProviderErrorEvent(
            self.message, classification=self.classification, retryable=self.transient, status=self.status
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """What an error body says: its message, and every code or type in it, in lower case."""

    message: str
    codes: tuple[str, ...] = ()
    status: int | None = None


def redacted(text: str, api_key: str | None = None) -> str:
    """Give the text on one line of bounded length, without the key and without anything that has a key's shape."""
    if api_key:
        text = text.replace(api_key, "[redacted]")
    text = " ".join(_KEY_SHAPES.sub("[redacted]", text[:_SEARCHED]).split())
    return text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 1] + "…"


def display_url(url: str) -> str:
    """Give the URL without user, password and query, which may be secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Give the seconds that a response asks to wait: 0 when that time is past, None when it names none.

    `retry-after-ms` goes before `retry-after`, which is a number of seconds or an HTTP date; `now` is a Unix time.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        moment = parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return None
    # Rounded up: a retry one moment too early is refused again.
    return float(max(0, math.ceil(moment - (Clock().now_ms() / 1000 if now is None else now))))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else -1.0
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def read_body(body: bytes) -> Any:
    """Give the JSON value of an error body, or its text; of an HTML page the title."""
    try:
        return from_json(body)
    except ValueError:
        text = body.decode("utf-8", "replace").strip()
    if text.startswith("<"):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.I | re.S)
        return title.group(1).strip() if title else "an HTML page"
    return text


def error_in(payload: Mapping[str, Any]) -> Any:
    """Give the error that an event carries, None for an ordinary one."""
    error = payload.get("error")
    if error is None and payload.get("type") == "error":
        return payload
    return error or None


def classify(
    error: Any, *, status: int | None = None, headers: Mapping[str, str] | None = None, api_key: str | None = None
) -> Failure:
    """Understand an error value of any shape; `status` is the HTTP status, None for an error inside a stream."""
    words = _words(error)
    headers = headers or {}
    failure = _understood(words, status or words.status)
    advice = headers.get("x-should-retry", "").strip().lower()
    if advice in ("true", "false") and failure.classification is None:
        failure = replace(failure, transient=advice == "true")
    return replace(failure, message=redacted(words.message, api_key), retry_after=retry_after(headers))


def _understood(words: _Words, status: int | None) -> Failure:
    def made(reason: ProviderReason, transient: bool, overflow: bool = False) -> Failure:
        return Failure(words.message, reason, transient, status, None, "context-overflow" if overflow else None)

    codes, text = set(words.codes), words.message[:_SEARCHED]
    if codes & _FILTER_CODES:
        return made("ContentPolicy", False)
    if codes & _OVERFLOW_CODES:
        return made("InvalidRequest", False, overflow=True)
    if codes & _QUOTA_CODES or status == 402:
        return made("QuotaExceeded", False)
    if status in (401, 403) or codes & _KEY_CODES:
        return made("Authentication", False)
    if _QUOTA_WORDS.search(text):
        return made("QuotaExceeded", False)
    if status == 429 or codes & _THROTTLE_CODES or _THROTTLE_WORDS.search(text):
        return made("RateLimit", True)
    if _FILTER_WORDS.search(text):
        return made("ContentPolicy", False)
    if status == 413 or (status != 404 and _OVERFLOW_WORDS.search(text)):
        return made("InvalidRequest", False, overflow=True)
    return made(*_by_status(status, codes))


def _by_status(status: int | None, codes: set[str]) -> tuple[ProviderReason, bool]:
    if status is None or status < 300:
        if codes & _REQUEST_CODES:
            return "InvalidRequest", False
        # An error inside a stream that names no cause: the request itself had been accepted, so it may work again.
        return ("ProviderInternal" if codes & _SERVER_CODES else "UnknownProvider"), True
    if status in (408, 409, 425) or (status >= 500 and status not in (501, 505)):
        return "ProviderInternal", True
    return ("ProviderInternal" if status >= 500 else "InvalidRequest"), False


def _words(error: Any) -> _Words:
    if isinstance(error, list) and error:
        error = error[0]
    if not isinstance(error, dict):
        return _Words(str(error) if error else "no reason given")
    inner = error.get("error")
    if isinstance(inner, dict | str) and inner:
        return _words(inner)
    codes: list[str] = []
    status: int | None = None
    nested = error.get("innererror")
    for value in (error.get("code"), error.get("type"), nested.get("code") if isinstance(nested, dict) else None):
        number = _status(value)
        if number is not None:
            status = status or number
        elif isinstance(value, str):
            codes.append(value.lower())
    return _Words(_message(error) or (codes[0] if codes else "no reason given"), tuple(codes), status)


def _message(error: Mapping[str, Any]) -> str:
    message = error.get("message") or error.get("msg") or error.get("detail") or error.get("errors") or ""
    if isinstance(message, list) and message:
        message = message[0]
    if isinstance(message, dict):
        message = _message(message)
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    # A router's own message is often only "Provider returned error"; the words that help are those it passes on.
    return f"{message}: {raw}" if isinstance(raw, str) and raw else str(message)


def _status(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if type(value) is int and 400 <= value < 600 else None
