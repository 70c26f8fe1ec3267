"""How events change an assistant message: pure functions on its stored data, used by the store and by readers.

The data is the JSON object of the message's row. Every function gives the changed object, or None when the event
changes nothing, which is how late and foreign events end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from fencepost.domain import events
from fencepost.domain.messages import JsonObject

UNSETTLED = "Provider Step ended without settlement"
INTERRUPTED = "Tool execution interrupted"

Data: TypeAlias = JsonObject
Handler: TypeAlias = Callable[[Data, Any], Data | None]


def new_assistant(event: events.StepStarted) -> Data:
    """Give the data of the assistant message that a step begins."""
    data: Data = {
        "agent": event.agent,
        "model": event.model.to_wire(),
        "content": [],
        "time": {"created": event.timestamp},
    }
    if event.snapshot is not None:
        data["snapshot"] = {"start": event.snapshot}
    return data


def update_assistant(data: Data, event: events.DurableEvent) -> Data | None:
    """Apply an event to the assistant message that it names."""
    handler = HANDLERS.get(type(event))
    return handler(data, event) if handler else None


def is_open(tool: Data) -> bool:
    """Say whether a tool part of a message is not settled."""
    return tool["type"] == "tool" and tool["state"]["status"] in ("pending", "running")


def _append(data: Data, part: Data) -> Data:
    return {**data, "content": [*data["content"], part]}


def _change(data: Data, kind: str, part_id: str, change: Callable[[Data], Data | None]) -> Data | None:
    """Change the last part of this kind and id; None when there is none or the change declines."""
    content = data["content"]
    for index in range(len(content) - 1, -1, -1):
        part = content[index]
        if part["type"] == kind and part["id"] == part_id:
            changed = change(part)
            return None if changed is None else {**data, "content": [*content[:index], changed, *content[index + 1 :]]}
    return None


def _text_started(data: Data, event: events.TextStarted) -> Data:
    return _append(data, {"type": "text", "id": event.text_id, "text": ""})


def _text_ended(data: Data, event: events.TextEnded) -> Data | None:
    return _change(data, "text", event.text_id, lambda part: {**part, "text": event.text})


def _reasoning_started(data: Data, event: events.ReasoningStarted) -> Data:
    part: Data = {
        "type": "reasoning",
        "id": event.reasoning_id,
        "text": "",
        "time": {"created": event.timestamp},
    }
    if event.provider_metadata is not None:
        part["providerMetadata"] = event.provider_metadata
    return _append(data, part)


def _reasoning_ended(data: Data, event: events.ReasoningEnded) -> Data | None:
    def end(part: Data) -> Data:
        changed = {**part, "text": event.text, "time": {**part.get("time", {}), "completed": event.timestamp}}
        if event.provider_metadata is not None:
            changed["providerMetadata"] = event.provider_metadata
        return changed

    return _change(data, "reasoning", event.reasoning_id, end)


def _tool_input_started(data: Data, event: events.ToolInputStarted) -> Data:
    return _append(
        data,
        {
            "type": "tool",
            "id": event.call_id,
            "name": event.name,
            "time": {"created": event.timestamp},
            "state": {"status": "pending", "input": ""},
        },
    )


def _tool_input_ended(data: Data, event: events.ToolInputEnded) -> Data | None:
    def end(part: Data) -> Data | None:
        if part["state"]["status"] != "pending":
            return None
        return {**part, "state": {"status": "pending", "input": event.text}}

    return _change(data, "tool", event.call_id, end)


def _tool_called(data: Data, event: events.ToolCalled) -> Data | None:
    return _change(
        data,
        "tool",
        event.call_id,
        lambda part: {
            **part,
            "provider": event.provider.to_wire(),
            "time": {**part["time"], "ran": event.timestamp},
            "state": {"status": "running", "input": event.input, "structured": {}, "content": []},
        },
    )


def _tool_progress(data: Data, event: events.ToolProgress) -> Data | None:
    def progress(part: Data) -> Data | None:
        if part["state"]["status"] != "running":
            return None
        content = [item.to_wire() for item in event.content]
        return {**part, "state": {**part["state"], "structured": event.structured, "content": content}}

    return _change(data, "tool", event.call_id, progress)


def _settled_provider(part: Data, settled: events.ToolProviderInfo) -> Data:
    provider = dict(part.get("provider") or {})
    provider["executed"] = bool(provider.get("executed")) or settled.executed
    if settled.metadata is not None:
        provider["resultMetadata"] = settled.metadata
    return provider


def _tool_success(data: Data, event: events.ToolSuccess) -> Data | None:
    def complete(part: Data) -> Data | None:
        if part["state"]["status"] != "running":
            return None
        state: Data = {
            "status": "completed",
            "input": part["state"]["input"],
            "structured": event.structured,
            "content": [item.to_wire() for item in event.content],
            "outputPaths": list(event.output_paths or ()),
        }
        if event.result is not None:
            state["result"] = event.result
        return {
            **part,
            "provider": _settled_provider(part, event.provider),
            "time": {**part["time"], "completed": event.timestamp},
            "state": state,
        }

    return _change(data, "tool", event.call_id, complete)


def _tool_failed(data: Data, event: events.ToolFailed) -> Data | None:
    def fail(part: Data) -> Data | None:
        if not is_open(part):
            return None
        before = part["state"]
        raw = before["status"] == "pending"  # never parsed, so there is no input to show
        state: Data = {
            "status": "error",
            "input": {} if raw else before["input"],
            "structured": {} if raw else before["structured"],
            "content": [] if raw else before["content"],
            "error": event.error.to_wire(),
        }
        if event.result is not None:
            state["result"] = event.result
        return {
            **part,
            "provider": _settled_provider(part, event.provider),
            "time": {**part["time"], "completed": event.timestamp},
            "state": state,
        }

    return _change(data, "tool", event.call_id, fail)


def _step_ended(data: Data, event: events.StepEnded) -> Data:
    changed = {
        **data,
        "time": {**data["time"], "completed": event.timestamp},
        "finish": event.finish,
        "cost": event.cost,
        "tokens": event.tokens.to_wire(),
    }
    if event.snapshot is not None or event.files is not None:
        snapshot = dict(data.get("snapshot") or {})
        if event.snapshot is not None:
            snapshot["end"] = event.snapshot
        if event.files is not None:
            snapshot["files"] = list(event.files)
        changed["snapshot"] = snapshot
    return changed


def _finished_with_error(data: Data, timestamp: int, error: Data) -> Data:
    return {**data, "time": {**data["time"], "completed": timestamp}, "finish": "error", "error": error}


def _step_failed(data: Data, event: events.StepFailed) -> Data:
    return _finished_with_error(data, event.timestamp, event.error.to_wire())


def _step_interrupted(data: Data, event: events.StepInterrupted) -> Data | None:
    if "completed" in data["time"]:
        return None
    return _finished_with_error(data, event.timestamp, {"type": "unknown", "message": UNSETTLED})


HANDLERS: Mapping[type[events.DurableEvent], Handler] = MappingProxyType(
    cast(
        "dict[type[events.DurableEvent], Handler]",
        {
            events.TextStarted: _text_started,
            events.TextEnded: _text_ended,
            events.ReasoningStarted: _reasoning_started,
            events.ReasoningEnded: _reasoning_ended,
            events.ToolInputStarted: _tool_input_started,
            events.ToolInputEnded: _tool_input_ended,
            events.ToolCalled: _tool_called,
            events.ToolProgress: _tool_progress,
            events.ToolSuccess: _tool_success,
            events.ToolFailed: _tool_failed,
            events.StepEnded: _step_ended,
            events.StepFailed: _step_failed,
            events.StepInterrupted: _step_interrupted,
        },
    )
)
