"""The stream vocabulary: what a provider adapter yields while one model request is answered.

Slotted dataclasses, not pydantic: one of these is made for every streamed chunk, and that cost is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "tool-calls", "content-filter", "error", "unknown"]
ProviderMetadata: TypeAlias = dict[str, dict[str, Any]]


@dataclass(slots=True)
class Usage:
    """Token counts of one request as the provider reported them; None where it said nothing.

    `input_tokens` includes cached ones and `output_tokens` includes reasoning.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    non_cached_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_write_input_tokens: int | None = None
    reasoning_tokens: int | None = None
    total_tokens: int | None = None


@dataclass(slots=True)
class StepStart:
    index: int = 0


@dataclass(slots=True)
class TextStart:
    id: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class TextDelta:
    id: str
    text: str


@dataclass(slots=True)
class TextEnd:
    id: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class ReasoningStart:
    id: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class ReasoningDelta:
    id: str
    text: str


@dataclass(slots=True)
class ReasoningEnd:
    id: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class ToolInputStart:
    id: str
    name: str


@dataclass(slots=True)
class ToolInputDelta:
    id: str
    name: str
    text: str


@dataclass(slots=True)
class ToolInputEnd:
    id: str
    name: str


@dataclass(slots=True)
class ToolCall:
    """A complete call. `input` is the parsed JSON value; when the text was no valid JSON, `input` is that raw text
    and `input_error` says why, and the call must be settled as failed without being executed."""

    id: str
    name: str
    input: Any
    input_error: str | None = None
    provider_executed: bool = False
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class ToolResult:
    """The result of a call that the provider itself executed: `result` is {type: json|text|error|content, value}."""

    id: str
    name: str
    result: dict[str, Any]
    provider_executed: bool = True
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class ToolError:
    id: str
    name: str
    message: str
    provider_metadata: ProviderMetadata | None = None


@dataclass(slots=True)
class StepFinish:
    index: int
    reason: FinishReason
    usage: Usage | None = None
    raw_reason: str | None = None


@dataclass(slots=True)
class Finish:
    reason: FinishReason
    usage: Usage | None = None


@dataclass(slots=True)
class ProviderErrorEvent:
    """The provider reported an error inside an HTTP 200 stream; nothing after it counts."""

    message: str
    classification: Literal["context-overflow"] | None = None
    retryable: bool = False
    status: int | None = None


StreamEvent: TypeAlias = (
    StepStart
    | TextStart
    | TextDelta
    | TextEnd
    | ReasoningStart
    | ReasoningDelta
    | ReasoningEnd
    | ToolInputStart
    | ToolInputDelta
    | ToolInputEnd
    | ToolCall
    | ToolResult
    | ToolError
    | StepFinish
    | Finish
    | ProviderErrorEvent
)
