"""The durable events of a session and their versions. The stored type is the type, a dot and the version.

`MANIFEST` is the one list of them; an event that is not in it cannot be stored or replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import ValidationError

from fencepost.domain.errors import InvalidDurableEventError
from fencepost.domain.inbox import Delivery, Location, Prompt
from fencepost.domain.messages import JsonObject, MessageError, Tokens
from fencepost.domain.models import ModelRef
from fencepost.domain.tools import ContentItem
from fencepost.domain.wire import WireModel

InterruptReason: TypeAlias = Literal["user", "shutdown", "lost", "cancelled", "terminated", "reset", "moved"]


class DurableEvent(WireModel):
    """Base of all durable events; `timestamp` is in milliseconds since the epoch."""

    type: ClassVar[str]
    version: ClassVar[int] = 1

    timestamp: int
    session_id: str

    @classmethod
    def stored_type(cls) -> str:
        """Give the name under which the log stores this event, such as `session.next.step.ended.2`."""
        return f"{cls.type}.{cls.version}"


class SessionCreated(DurableEvent):
    """`info` holds the fields of the session's row."""

    type = "session.created"
    info: JsonObject


class AgentSwitchedEvent(DurableEvent):
    type = "session.next.agent.switched"
    message_id: str
    agent: str


class ModelSwitchedEvent(DurableEvent):
    type = "session.next.model.switched"
    message_id: str
    model: ModelRef


class Moved(DurableEvent):
    type = "session.next.moved"
    location: Location
    subdirectory: str | None = None


class PromptAdmitted(DurableEvent):
    type = "session.next.prompt.admitted"
    message_id: str
    prompt: Prompt
    delivery: Delivery


class Prompted(DurableEvent):
    """The promotion of an input. Its timestamp is that of the admission."""

    type = "session.next.prompted"
    message_id: str
    prompt: Prompt
    delivery: Delivery


class ContextUpdated(DurableEvent):
    type = "session.next.context.updated"
    message_id: str
    text: str


class Synthetic(DurableEvent):
    type = "session.next.synthetic"
    message_id: str
    text: str


class ShellStarted(DurableEvent):
    type = "session.next.shell.started"
    message_id: str
    call_id: str
    command: str


class ShellEnded(DurableEvent):
    type = "session.next.shell.ended"
    call_id: str
    output: str


class StepEvent(DurableEvent):
    """Base of what belongs to one assistant message."""

    assistant_message_id: str


class StepStarted(StepEvent):
    type = "session.next.step.started"
    agent: str
    model: ModelRef
    snapshot: str | None = None


class StepEnded(StepEvent):
    """`cost` is in US dollars."""

    type = "session.next.step.ended"
    version = 2
    finish: str
    cost: float
    tokens: Tokens
    snapshot: str | None = None
    files: tuple[str, ...] | None = None


class StepFailed(StepEvent):
    type = "session.next.step.failed"
    version = 2
    error: MessageError


class StepInterrupted(DurableEvent):
    """The only terminal event of an interrupted step; between two steps it names no assistant message."""

    type = "session.next.step.interrupted"
    assistant_message_id: str | None = None
    execution_id: str
    interrupt_id: str | None = None
    note: str | None = None
    reason: InterruptReason


class TextStarted(StepEvent):
    type = "session.next.text.started"
    text_id: str


class TextEnded(StepEvent):
    type = "session.next.text.ended"
    text_id: str
    text: str


class ReasoningStarted(StepEvent):
    type = "session.next.reasoning.started"
    reasoning_id: str
    provider_metadata: JsonObject | None = None


class ReasoningEnded(StepEvent):
    type = "session.next.reasoning.ended"
    reasoning_id: str
    text: str
    provider_metadata: JsonObject | None = None


class ToolInputStarted(StepEvent):
    type = "session.next.tool.input.started"
    call_id: str
    name: str


class ToolInputEnded(StepEvent):
    """`text` is the input's raw JSON text."""

    type = "session.next.tool.input.ended"
    call_id: str
    text: str


class ToolProviderInfo(WireModel):
    executed: bool
    metadata: JsonObject | None = None


class ToolCalled(StepEvent):
    type = "session.next.tool.called"
    call_id: str
    tool: str
    input: JsonObject
    provider: ToolProviderInfo


class ToolProgress(StepEvent):
    type = "session.next.tool.progress"
    call_id: str
    structured: JsonObject
    content: tuple[ContentItem, ...]


class ToolSuccess(StepEvent):
    """`result` is there only when the provider executed the call, so that media is stored once."""

    type = "session.next.tool.success"
    call_id: str
    structured: JsonObject
    content: tuple[ContentItem, ...]
    output_paths: tuple[str, ...] | None = None
    result: JsonObject | None = None
    provider: ToolProviderInfo


class ToolFailed(StepEvent):
    type = "session.next.tool.failed"
    call_id: str
    error: MessageError
    result: JsonObject | None = None
    provider: ToolProviderInfo


class RetryError(WireModel):
    message: str
    status_code: int | None = None
    is_retryable: bool
    response_headers: dict[str, str] | None = None
    response_body: str | None = None
    metadata: JsonObject | None = None


class Retried(DurableEvent):
    type = "session.next.retried"
    attempt: int
    error: RetryError


class CompactionStarted(DurableEvent):
    type = "session.next.compaction.started"
    message_id: str
    reason: Literal["auto", "manual"]


class CompactionEnded(DurableEvent):
    type = "session.next.compaction.ended"
    message_id: str
    reason: Literal["auto", "manual"]
    text: str
    recent: str


class RevertStaged(DurableEvent):
    type = "session.next.revert.staged"
    revert: JsonObject


class RevertCleared(DurableEvent):
    type = "session.next.revert.cleared"


class RevertCommitted(DurableEvent):
    type = "session.next.revert.committed"
    message_id: str


_ALL: tuple[type[DurableEvent], ...] = (
    SessionCreated, AgentSwitchedEvent, ModelSwitchedEvent, Moved, PromptAdmitted, Prompted, ContextUpdated,
    Synthetic, ShellStarted, ShellEnded, StepStarted, StepEnded, StepFailed, StepInterrupted, TextStarted, TextEnded,
    ReasoningStarted, ReasoningEnded, ToolInputStarted, ToolInputEnded, ToolCalled, ToolProgress, ToolSuccess,
    ToolFailed, Retried, CompactionStarted, CompactionEnded, RevertStaged, RevertCleared, RevertCommitted,
)  # fmt: skip

LIVE_ONLY = frozenset(f"session.next.{name}.delta" for name in ("text", "reasoning", "tool.input", "compaction"))
"""Types of events that readers are shown and no log holds."""

MANIFEST: Mapping[str, type[DurableEvent]] = MappingProxyType({kind.stored_type(): kind for kind in _ALL})


def decode_event(stored_type: str, data: Mapping[str, Any]) -> DurableEvent:
    """Read an event from its row. Raises InvalidDurableEventError for an unknown type or data that does not fit."""
    kind = MANIFEST.get(stored_type)
    if kind is None:
        if stored_type.rpartition(".")[0] in LIVE_ONLY:
            raise InvalidDurableEventError(f"{stored_type!r} is a live event: it is shown, and never stored")
        raise InvalidDurableEventError(f"unknown event type {stored_type!r}: written by a newer fencepost?")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidDurableEventError(f"{stored_type} does not fit at {first['loc']}: {first['msg']}") from error
