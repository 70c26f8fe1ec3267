"""What a tool is to the rest of the house: its definition, one invocation, its output, its one expected failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from fencepost.domain.wire import WireModel


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """What a model is told of a tool. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Invocation:
    """Who calls a tool, and where. `directory` is the session's absolute working directory."""

    session_id: str
    agent: str
    assistant_message_id: str
    tool_call_id: str
    directory: str
    effect_key: str
    """Stable for (session, assistant message, call): an effect that carries it can be recognised as the same one."""


class TextItem(WireModel):
    type: Literal["text"] = "text"
    text: str


class FileItem(WireModel):
    """A file in a tool's output; `uri` is a data URI for binary content."""

    type: Literal["file"] = "file"
    uri: str
    mime: str
    name: str | None = None


ContentItem: TypeAlias = Annotated[TextItem | FileItem, Field(discriminator="type")]


class ToolOutput(WireModel):
    """What a tool gives back: a structured object, and content for the model."""

    structured: dict[str, Any] = Field(default_factory=dict)
    content: tuple[ContentItem, ...] = ()
    output_paths: tuple[str, ...] = ()


class ToolFailure(Exception):
    """The only expected failure of a tool: its message goes to the model, and the turn goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StorageError(ToolFailure):
    """A tool ran, and its output is too large for a model and could not be kept in a file either."""
