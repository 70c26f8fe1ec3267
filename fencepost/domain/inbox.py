"""Input of a session: the prompt as a client gives it, and the receipt of its admission."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import StringConstraints

from fencepost.domain.wire import WireModel

Delivery: TypeAlias = Literal["steer", "queue"]
MessageId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^msg_[A-Za-z0-9_-]{1,59}$")]


class Span(WireModel):
    """Where in the prompt's text an attachment is meant; offsets in characters."""

    start: int
    end: int
    text: str


class FileAttachment(WireModel):
    uri: str
    mime: str | None = None
    name: str | None = None
    description: str | None = None
    source: Span | None = None


class AgentAttachment(WireModel):
    name: str
    source: Span | None = None


class Prompt(WireModel):
    text: str
    files: tuple[FileAttachment, ...] | None = None
    agents: tuple[AgentAttachment, ...] | None = None


class Receipt(WireModel):
    """What admission gives back; `promoted_seq` is absent while the model has not seen the input."""

    id: str
    session_id: str
    prompt: Prompt
    delivery: Delivery
    admitted_seq: int
    time_created: int
    promoted_seq: int | None = None


class Location(WireModel):
    """Where a session works: an absolute directory, and the workspace whose workers see it."""

    directory: str
    workspace_id: str | None = None
