"""Reading the log."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.domain import events
from fencepost.domain.errors import InvalidDurableEventError, MessageDecodeError
from fencepost.domain.events import MANIFEST, decode_event
from fencepost.domain.messages import AssistantMessage, CompletedTool, ToolPart, decode_message
from fencepost.domain.projection import update_assistant
from fencepost.domain.tools import TextItem

OLD_SUCCESS: dict[str, Any] = {
    "timestamp": 3,
    "sessionID": "ses_1",
    "assistantMessageID": "msg_1",
    "callID": "call_1",
    "structured": {"lines": 1},
    "content": [{"type": "text", "text": "hello"}],
    "result": {"type": "text", "value": "hello"},
    "provider": {"executed": False},
}


@pytest.mark.conformance("TEV-04")
def test_an_older_success_with_a_result_can_still_be_read() -> None:
    """Local calls once kept it: the event is read, written again as it was, projected, and the message is read."""
    event = decode_event("session.next.tool.success.1", OLD_SUCCESS)
    assert isinstance(event, events.ToolSuccess)
    assert event.result == {"type": "text", "value": "hello"}
    assert event.to_wire() == OLD_SUCCESS

    running = {"status": "running", "input": {"path": "a"}, "structured": {}, "content": []}
    tool = {"type": "tool", "id": "call_1", "name": "read", "time": {"created": 1, "ran": 2}, "state": running}
    model = {"id": "m", "providerID": "p"}
    data = update_assistant({"agent": "build", "model": model, "content": [tool], "time": {"created": 1}}, event)
    assert data is not None
    message = decode_message("msg_1", "assistant", data)
    assert isinstance(message, AssistantMessage)
    [part] = message.content
    assert isinstance(part, ToolPart)
    assert part.state == CompletedTool(
        input={"path": "a"},
        structured={"lines": 1},
        content=(TextItem(text="hello"),),
        result={"type": "text", "value": "hello"},
    )


def test_all_kinds_of_events_have_names_of_their_own() -> None:
    """And say the version of their definition."""
    assert len(MANIFEST) == 30
    assert {name for name, kind in MANIFEST.items() if kind.version != 1} == {
        "session.next.step.ended.2",
        "session.next.step.failed.2",
    }


@pytest.mark.parametrize(
    ("stored_type", "data", "complaint"),
    [
        ("session.next.step.ended.1", {}, "unknown event type"),
        ("session.next.future.1", {}, "unknown event type"),
        ("session.next.text.ended.1", {"timestamp": 1, "sessionID": "s"}, "does not fit at"),
        ("session.next.tool.success.1", {**OLD_SUCCESS, "content": [{"type": "odd"}]}, "does not fit at"),
    ],
)
def test_what_cannot_be_read_is_named(stored_type: str, data: dict[str, Any], complaint: str) -> None:
    """Not passed over."""
    with pytest.raises(InvalidDurableEventError, match=complaint):
        decode_event(stored_type, data)


def test_a_message_is_written_as_it_is_read() -> None:
    """Without what its row has in columns; one that does not fit is named."""
    data = {"text": "hi", "time": {"created": 1}}

    assert decode_message("msg_1", "user", data).to_wire() == {"id": "msg_1", "type": "user", **data}
    for kind, wrong in (("user", {"time": {"created": 1}}), ("unknown", data)):
        with pytest.raises(MessageDecodeError, match="msg_1"):
            decode_message("msg_1", kind, wrong)
