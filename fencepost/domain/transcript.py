"""The transcript: folds a session's messages into what a model is sent.

Every tool call gets exactly one result, right after the assistant message that holds it, whatever happened to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, assert_never

from fencepost.domain import messages as m
from fencepost.domain.clean import clean
from fencepost.domain.models import (
    Content,
    MediaContent,
    ModelMessage,
    ModelRef,
    ReasoningContent,
    TextContent,
    ToolCallContent,
    ToolResultContent,
)
from fencepost.domain.projection import INTERRUPTED
from fencepost.domain.tools import ContentItem

# A step sends the whole conversation again, and all but its last messages have been translated before. Long ones are
# not kept: they would fill the memory, and what takes the time is their number, not their length.
_KEPT_MESSAGES = 4096
_KEPT_CHARACTERS = 4096


def to_model_messages(history: Iterable[m.Message], model: ModelRef) -> tuple[ModelMessage, ...]:
    """Translate messages, in order of their sequence, for a request to this model."""
    return tuple(made for message in history for made in _translate(message, model))


def read_model_messages(history: Iterable[tuple[str, str]], model: ModelRef) -> tuple[ModelMessage, ...]:
    """Translate messages given as id and JSON. Raises MessageDecodeError for one that cannot be read."""
    made: list[ModelMessage] = []
    for message_id, text in history:
        read = _kept if len(text) <= _KEPT_CHARACTERS else _read
        made += read(message_id, text, model.provider_id, model.id)
    return tuple(made)


def _read(message_id: str, text: str, provider_id: str, model_id: str) -> tuple[ModelMessage, ...]:
    return tuple(_translate(m.decode_message_json(message_id, text), ModelRef(id=model_id, provider_id=provider_id)))


_kept = lru_cache(_KEPT_MESSAGES)(_read)


def _translate(message: m.Message, model: ModelRef) -> list[ModelMessage]:
    match message:
        case m.AgentSwitched() | m.ModelSwitched():
            return []
        case m.UserMessage():
            return [ModelMessage("user", _user(message))]
        case m.SyntheticMessage():
            return [_said("user", message.text)]
        case m.SystemMessage():
            return [_said("system", message.text)]
        case m.ShellMessage():
            return [_said("user", f"Shell command: {message.command}\n\n{message.output}")]
        case m.CompactionMessage():
            return [_said("user", _checkpoint(message))]
        case m.AssistantMessage():
            return _assistant(message, model)
        case _:
            assert_never(message)


def _said(role: Any, text: str) -> ModelMessage:
    return ModelMessage(role, (TextContent(text),))


def _user(message: m.UserMessage) -> tuple[Content, ...]:
    media = [MediaContent(file.uri, file.mime or "application/octet-stream", file.name) for file in message.files or ()]
    return (TextContent(message.text), *media)


def _checkpoint(message: m.CompactionMessage) -> str:
    parts = ["<conversation-checkpoint>", "Summary of the conversation so far:", message.summary]
    if message.recent:
        parts += ["The most recent messages, as they were:", message.recent]
    return "\n\n".join([*parts, "</conversation-checkpoint>"])


def _assistant(message: m.AssistantMessage, model: ModelRef) -> list[ModelMessage]:
    same_model = (message.model.provider_id, message.model.id) == (model.provider_id, model.id)
    keep_metadata = same_model and message.error is None
    content: list[Content] = []
    results: list[ModelMessage] = []
    for part in message.content:
        match part:
            case m.TextPart():
                if part.text:
                    content.append(TextContent(part.text))
            case m.ReasoningPart():
                metadata = part.provider_metadata if keep_metadata else None
                if same_model and (part.text or metadata):
                    content.append(ReasoningContent(part.text, metadata))
                elif part.text and not same_model:
                    content.append(TextContent(part.text))
            case m.ToolPart():
                call, result = _tool(part, keep_metadata)
                content.append(call)
                if call.provider_executed:
                    content.append(result)
                else:
                    results.append(ModelMessage("tool", (result,)))
            case _:
                assert_never(part)
    # An empty assistant message is refused by providers; it is only left out when nothing answers it either.
    return [ModelMessage("assistant", tuple(content)), *results] if content else results


def _tool(part: m.ToolPart, keep_metadata: bool) -> tuple[ToolCallContent, ToolResultContent]:
    provider = part.provider or m.ToolProvider()
    metadata = provider.metadata if keep_metadata else None
    result_metadata = provider.result_metadata if keep_metadata else None
    call = ToolCallContent(part.id, part.name, _input(part.state), provider.executed, metadata)
    return call, ToolResultContent(part.id, part.name, _result(part.state), provider.executed, result_metadata)


def _input(state: m.ToolState) -> Any:
    if not isinstance(state, m.PendingTool):
        return state.input
    try:
        given = clean(json.loads(state.input, parse_constant=_no_json))
    except ValueError:
        return {}  # cut in the middle: providers refuse arguments that are no JSON
    return given if isinstance(given, dict) else {"value": given}


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON, although Python reads it")


def _result(state: m.ToolState) -> dict[str, Any]:
    match state:
        case m.PendingTool() | m.RunningTool():
            return {"type": "error", "value": {"error": {"type": "unknown", "message": INTERRUPTED}}}
        case m.FailedTool():
            value = {"error": state.error.to_wire(), "content": _wire(state.content), "structured": state.structured}
            return {"type": "error", "value": value}
        case m.CompletedTool():
            if state.result is not None:
                return state.result
            if not state.content:
                return {"type": "json", "value": state.structured}
            if len(state.content) == 1 and state.content[0].type == "text":
                return {"type": "text", "value": state.content[0].text}
            return {"type": "content", "value": _wire(state.content)}
        case _:
            assert_never(state)


def _wire(content: tuple[ContentItem, ...]) -> list[dict[str, Any]]:
    return [item.to_wire() for item in content]
