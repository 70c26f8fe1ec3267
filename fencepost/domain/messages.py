"""Messages: what the projection shows of a session. Stored without `id` and `type`, which are columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from fencepost.domain.errors import MessageDecodeError
from fencepost.domain.inbox import AgentAttachment, FileAttachment
from fencepost.domain.models import ModelRef
from fencepost.domain.tools import ContentItem
from fencepost.domain.wire import WireModel

JsonObject: TypeAlias = dict[str, Any]


class MessageError(WireModel):
    """The durable shape of an error."""

    type: Literal["unknown"] = "unknown"
    message: str


class CacheTokens(WireModel):
    read: int = 0
    write: int = 0


class Tokens(WireModel):
    """Token counts of a step: input without cached ones, output without reasoning."""

    input: int = 0
    output: int = 0
    reasoning: int = 0
    cache: CacheTokens = CacheTokens()


class Created(WireModel):
    """Times are milliseconds since the epoch."""

    created: int


class Completed(Created):
    completed: int | None = None


class ToolTime(Created):
    ran: int | None = None
    completed: int | None = None
    pruned: int | None = None


class TextPart(WireModel):
    type: Literal["text"] = "text"
    id: str
    text: str


class ReasoningPart(WireModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    text: str
    provider_metadata: JsonObject | None = None
    time: Completed | None = None


class PendingTool(WireModel):
    """The input is still raw text, and may be cut."""

    status: Literal["pending"] = "pending"
    input: str


class RunningTool(WireModel):
    status: Literal["running"] = "running"
    input: JsonObject
    structured: JsonObject
    content: tuple[ContentItem, ...] = ()


class CompletedTool(WireModel):
    """`result` is kept only when the provider itself executed the call."""

    status: Literal["completed"] = "completed"
    input: JsonObject
    structured: JsonObject
    content: tuple[ContentItem, ...] = ()
    output_paths: tuple[str, ...] = ()
    attachments: tuple[FileAttachment, ...] | None = None
    result: JsonObject | None = None


class FailedTool(WireModel):
    status: Literal["error"] = "error"
    input: JsonObject
    structured: JsonObject
    content: tuple[ContentItem, ...] = ()
    error: MessageError
    result: JsonObject | None = None


ToolState: TypeAlias = Annotated[PendingTool | RunningTool | CompletedTool | FailedTool, Field(discriminator="status")]


class ToolProvider(WireModel):
    executed: bool = False
    metadata: JsonObject | None = None
    result_metadata: JsonObject | None = None


class ToolPart(WireModel):
    """One tool call; its id is the provider's call id, unique within its assistant message only."""

    type: Literal["tool"] = "tool"
    id: str
    name: str
    provider: ToolProvider | None = None
    time: ToolTime
    state: ToolState


Part: TypeAlias = Annotated[TextPart | ReasoningPart | ToolPart, Field(discriminator="type")]


class MessageBase(WireModel):
    id: str
    metadata: JsonObject | None = None


class AgentSwitched(MessageBase):
    type: Literal["agent-switched"] = "agent-switched"
    agent: str
    time: Created


class ModelSwitched(MessageBase):
    type: Literal["model-switched"] = "model-switched"
    model: ModelRef
    time: Created


class UserMessage(MessageBase):
    type: Literal["user"] = "user"
    text: str
    files: tuple[FileAttachment, ...] | None = None
    agents: tuple[AgentAttachment, ...] | None = None
    time: Created


class SyntheticMessage(MessageBase):
    type: Literal["synthetic"] = "synthetic"
    session_id: str
    text: str
    time: Created


class SystemMessage(MessageBase):
    type: Literal["system"] = "system"
    text: str
    time: Created


class ShellMessage(MessageBase):
    type: Literal["shell"] = "shell"
    call_id: str
    command: str
    output: str
    time: Completed


class CompactionMessage(MessageBase):
    type: Literal["compaction"] = "compaction"
    reason: Literal["auto", "manual"]
    summary: str
    recent: str
    time: Created


class StepSnapshot(WireModel):
    start: str | None = None
    end: str | None = None
    files: tuple[str, ...] | None = None


class AssistantMessage(MessageBase):
    """One step's answer. It is settled when `time.completed` is there."""

    type: Literal["assistant"] = "assistant"
    agent: str
    model: ModelRef
    content: tuple[Part, ...] = ()
    snapshot: StepSnapshot | None = None
    finish: str | None = None
    cost: float | None = None
    tokens: Tokens | None = None
    error: MessageError | None = None
    time: Completed


Message: TypeAlias = Annotated[
    AgentSwitched
    | ModelSwitched
    | UserMessage
    | SyntheticMessage
    | SystemMessage
    | ShellMessage
    | CompactionMessage
    | AssistantMessage,
    Field(discriminator="type"),
]

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def decode_message(id: str, type: str, data: Mapping[str, Any]) -> Message:
    """Read a message from its row. Raises MessageDecodeError, naming the message, when the data does not fit."""
    try:
        return _MESSAGE.validate_python({**data, "id": id, "type": type})
    except ValidationError as error:
        raise _unreadable(id, error) from error


def decode_message_json(id: str, text: str) -> Message:
    """Read a message from JSON that has its id and type in it: half the work for a long history. Raises the same."""
    try:
        return _MESSAGE.validate_json(text)
    except ValidationError as error:
        raise _unreadable(id, error) from error


def _unreadable(id: str, error: ValidationError) -> MessageDecodeError:
    return MessageDecodeError(f"message {id} cannot be read: {error.errors()[0]['msg']}")
