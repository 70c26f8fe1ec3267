"""How values are written, and text that nothing can store."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.domain.clean import clean, clean_text
from fencepost.domain.events import ToolCalled, ToolProviderInfo
from fencepost.domain.inbox import Prompt
from fencepost.domain.wire import wire_name

BAD, GOOD = "a\x00b\ud800c", "a\ufffdb\ufffdc"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("id", "id"),
        ("assistant_message_id", "assistantMessageID"),
        ("old_string", "oldString"),
        ("provider_id", "providerID"),
        ("text", "text"),
    ],
)
def test_names_on_the_wire(name: str, expected: str) -> None:
    """Camel case, with ID in capitals."""
    assert wire_name(name) == expected


def test_absent_fields_are_not_written_but_null_values_are() -> None:
    """What a model passes to a tool is kept as it is."""
    call = ToolCalled(
        timestamp=1,
        session_id="ses_1",
        assistant_message_id="msg_1",
        call_id="call_1",
        tool="bash",
        input={"path": None, "list": [None]},
        provider=ToolProviderInfo(executed=False),
    )

    assert call.to_wire() == {
        "timestamp": 1,
        "sessionID": "ses_1",
        "assistantMessageID": "msg_1",
        "callID": "call_1",
        "tool": "bash",
        "input": {"path": None, "list": [None]},
        "provider": {"executed": False},
    }
    assert ToolCalled.model_validate(call.to_wire()) == call


def test_unknown_fields_are_left_out() -> None:
    """A newer program's data can be read."""
    assert Prompt.model_validate({"text": "hi", "colour": "red"}) == Prompt(text="hi")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (BAD, GOOD),
        ("fine \U0001f426", "fine \U0001f426"),
        ({BAD: BAD}, {GOOD: GOOD}),
        ([BAD, (BAD,)], [GOOD, [GOOD]]),
        ({"a": [{"b": BAD}]}, {"a": [{"b": GOOD}]}),
        ({1: "x"}, {"1": "x"}),
        ([1, 1.5, True, None], [1, 1.5, True, None]),
        ([float("nan"), float("inf"), float("-inf")], [None, None, None]),
    ],
)
def test_what_cannot_be_stored_is_replaced_everywhere(value: Any, expected: Any) -> None:
    """In values and keys, at any depth; everything else passes."""
    assert clean(value) == expected


def test_clean_text_is_the_same_object() -> None:
    """The common case costs no copy."""
    text = "fine"

    assert clean_text(text) is text


def test_free_form_values_with_lone_surrogates_can_be_written() -> None:
    """Pydantic would refuse them."""
    call = ToolCalled(
        timestamp=1,
        session_id="ses_1",
        assistant_message_id="msg_1",
        call_id=BAD,
        tool="bash",
        input={BAD: [BAD]},
        provider=ToolProviderInfo(executed=True, metadata={"p": {BAD: BAD}}),
    )

    wire = clean(call.to_wire())
    assert (wire["callID"], wire["input"]) == (GOOD, {GOOD: [GOOD]})
    assert wire["provider"] == {"executed": True, "metadata": {"p": {GOOD: GOOD}}}
