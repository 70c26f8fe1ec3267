"""The registry: definitions, argument checks, permissions, and what becomes of errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from fencepost.config import Settings
from fencepost.domain.errors import ConfigurationError
from fencepost.domain.permissions import Rule
from fencepost.domain.tools import Invocation, TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools.builtin import builtin_registry
from fencepost.tools.execution import clean_arguments
from fencepost.tools.registry import Registry, Tool, ToolContext
from tests.tools.conftest import Workspace, text_of

RULES = Settings().permissions


class _Input(WireModel):
    some_text: str
    count: int | None = Field(default=None, ge=1)


def _tool(name: str, result: Any = "ok", description: str = "d") -> Tool[_Input]:
    async def run(context: ToolContext, given: _Input) -> ToolOutput:
        if isinstance(result, BaseException):
            raise result
        return result if isinstance(result, ToolOutput) else ToolOutput(content=(TextItem(text=given.some_text),))

    return Tool(name, description, _Input, "act", run, lambda directory, given: (given.some_text,))


def test_definitions_keep_the_order_and_the_later_of_a_name() -> None:
    registry = Registry([_tool("b"), _tool("a"), _tool("b", description="later")])
    found = registry.definitions(RULES)
    assert [(one.name, one.description) for one in found] == [("b", "later"), ("a", "d")]
    assert [one.name for one in registry.definitions(RULES, names={"a"})] == ["a"]


def test_a_schema_has_wire_names_and_no_noise() -> None:
    (found,) = Registry([_tool("a")]).definitions(RULES)
    assert found.parameters == {
        "type": "object",
        "properties": {"someText": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
        "required": ["someText"],
    }


def test_builtin_definitions_are_the_same_bytes_each_time() -> None:
    first, second = (json.dumps([one.parameters for one in builtin_registry().definitions(RULES)]) for _ in range(2))
    assert first == second
    names = [one.name for one in builtin_registry().definitions(RULES)]
    assert names == ["bash", "read", "write", "edit", "glob", "grep"]


def test_a_rule_that_denies_an_action_hides_every_tool_of_it() -> None:
    rules = (*RULES, Rule(action="edit", effect="deny"))
    assert [one.name for one in builtin_registry().definitions(rules)] == ["bash", "read", "glob", "grep"]
    rules = (*rules, Rule(action="edit", resource="plan.md", effect="allow"))
    assert "write" in [one.name for one in builtin_registry().definitions(rules)]


@pytest.mark.parametrize("name", ["", "1a", "a b", "a.b", "a/b", "ä", "a" * 65, "a\n"])
def test_a_name_that_a_provider_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        Registry([_tool(name)])


async def test_an_unknown_tool_is_a_failure(workspace: Workspace) -> None:
    with pytest.raises(ToolFailure, match=r"^Unknown tool: nosuch$"):
        await workspace.call("nosuch")


async def test_arguments_that_do_not_fit_are_named_on_one_line(workspace: Workspace) -> None:
    with pytest.raises(ToolFailure) as caught:
        await workspace.call("read", limit=5000)
    assert caught.value.message.startswith("Invalid tool input: path: Field required; limit: Input should be less")
    assert "\n" not in caught.value.message


async def test_deny_and_ask_name_the_rule_and_the_way_out(workspace: Workspace) -> None:
    workspace.registry = Registry([_tool("a")])
    with pytest.raises(ToolFailure, match=r'action "act" on "secret" \(rule "act s\* deny"\)'):
        await workspace.call("a", Rule(action="act", resource="s*", effect="deny"), some_text="secret")
    with pytest.raises(ToolFailure, match=r'not available yet.*with the rule "act secret allow"'):
        await workspace.call("a", Rule(action="act", resource="s*", effect="ask"), some_text="secret")
    assert text_of(await workspace.call("a", Rule(action="act", resource="s*", effect="ask"), someText="x")) == "x"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("defect"), KeyboardInterrupt()])
async def test_cancellation_and_defects_pass_as_they_are(workspace: Workspace, error: BaseException) -> None:
    workspace.registry = Registry([_tool("a", error)])
    with pytest.raises(type(error)) as caught:
        await workspace.call("a", some_text="x")
    assert caught.value is error


async def test_outputs_are_clean_in_values_and_keys(workspace: Workspace) -> None:
    dirty = ToolOutput(structured={"k\0": ["v\0", {"\ud800": 1}]}, content=(TextItem(text="a\0b\udc97"),))
    workspace.registry = Registry([_tool("a", dirty)])
    output = await workspace.call("a", some_text="x")
    assert output.structured == {"k\ufffd": ["v\ufffd", {"\ufffd": 1}]}
    assert text_of(output) == "a\ufffdb\ufffd"


def test_a_split_pair_of_surrogates_in_arguments_becomes_one_character() -> None:
    assert clean_arguments({"a": ["\ud83d\ude00", "\ud83d", "\\u0000"]}) == {"a": ["\U0001f600", "\ufffd", "\\u0000"]}


class _Row(WireModel):
    name: str
    row_count: int = Field(ge=0)


class _Table(WireModel):
    rows: tuple[_Row, ...] = ()
    made: datetime | None = None


def _declared(structured: dict[str, Any]) -> Registry:
    output = ToolOutput(structured=structured, content=(TextItem(text="shown"),))
    return Registry([replace(_tool("a", output), output_model=_Table)])


@pytest.mark.conformance("REG-11")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "someText: Field required"),
        ({"someText": 5}, "someText: Input should be a valid string"),
        ({"someText": "x", "count": 0}, "count: Input should be greater than or equal to 1"),
    ],
)
async def test_an_input_of_another_type_names_field_and_reason(
    workspace: Workspace, arguments: dict[str, Any], reason: str
) -> None:
    ran = RuntimeError("it ran")
    workspace.registry = Registry([_tool("a", ran)])
    with pytest.raises(ToolFailure) as caught:
        await workspace.call("a", **arguments)
    assert caught.value.message == f"Invalid tool input: {reason}"


@pytest.mark.conformance("REG-11")
@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"rows": [{"name": "a"}]}, "rows.0.rowCount: Field required"),
        ({"rows": [{"name": "a", "rowCount": -1}]}, "rows.0.rowCount: Input should be greater than or equal to 0"),
        ({"rows": 5}, "rows: Input should be a valid tuple"),
    ],
)
async def test_an_output_of_another_type_names_field_and_reason(
    workspace: Workspace, structured: dict[str, Any], reason: str
) -> None:
    workspace.registry = _declared(structured)
    with pytest.raises(ToolFailure) as caught:
        await workspace.call("a", someText="x")
    assert caught.value.message == f"Invalid tool output: {reason}"


@pytest.mark.conformance("REG-11")
async def test_what_is_no_output_at_all_is_a_failure_of_the_tool(workspace: Workspace) -> None:
    async def run(context: ToolContext, given: _Input) -> Any:
        return {"text": "x"}

    workspace.registry = Registry([replace(_tool("a"), run=run)])
    with pytest.raises(ToolFailure, match=r"^Invalid tool output: should be a ToolOutput, and is of type dict$"):
        await workspace.call("a", someText="x")


@pytest.mark.conformance("REG-10", "REG-11")
async def test_an_output_is_written_as_its_declared_type(workspace: Workspace) -> None:
    row = {"name": "a\0", "row_count": "3", "undeclared": 1}
    workspace.registry = _declared({"rows": [row], "made": datetime(2026, 1, 2, tzinfo=UTC)})
    output = await workspace.call("a", someText="x")
    assert output.structured == {"rows": [{"name": "a\ufffd", "rowCount": 3}], "made": "2026-01-02T00:00:00Z"}


@pytest.mark.conformance("REG-10")
async def test_an_output_without_a_declared_type_is_written_as_json(workspace: Workspace) -> None:
    given: dict[Any, Any] = {
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        1: (Path("a"), {2}),
        "row": _Row(name="a\0", row_count=1),
    }
    workspace.registry = Registry([_tool("a", ToolOutput.model_construct(structured=given, content=()))])
    output = await workspace.call("a", someText="x")
    assert output.structured == {
        "at": "2026-01-02T00:00:00Z",
        "1": ["a", [2]],
        "row": {"name": "a\ufffd", "rowCount": 1},
    }
    json.dumps(output.to_wire())


@pytest.mark.conformance("REG-09")
async def test_a_tool_is_given_the_invocation_as_it_is(workspace: Workspace) -> None:
    seen: list[ToolContext] = []

    async def run(context: ToolContext, given: _Input) -> ToolOutput:
        seen.append(context)
        return ToolOutput()

    workspace.registry = Registry([replace(_tool("a"), run=run)])
    await workspace.call("a", someText="x")
    expected = Invocation("ses_1", "build", "msg_1", "call_1", str(workspace.root), "ses_1/msg_1/call_1")
    assert [context.invocation for context in seen] == [expected]
