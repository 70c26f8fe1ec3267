"""The registry of tools: their definitions for a model, and the one way to execute a call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from fencepost.domain.errors import ConfigurationError
from fencepost.domain.permissions import Rule, effect_of, evaluate, hides_tool, matches
from fencepost.domain.tools import Invocation, ToolDefinition, ToolFailure, ToolOutput
from fencepost.tools.execution import clean_arguments, encode_output, invalid
from fencepost.tools.outputs import OutputStore
from fencepost.tools.processes import ShellRunner

EXTERNAL_DIRECTORY = "external_directory"

Input = TypeVar("Input", bound=BaseModel)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What one call may use: who calls and where, the rules of its agent, the runner of processes, and the keeper of
    output that is too long for a model."""

    invocation: Invocation
    rules: tuple[Rule, ...]
    runner: ShellRunner
    outputs: OutputStore


def _none(directory: str, given: BaseModel) -> tuple[str, ...]:  # noqa: ARG001 - as Tool.external
    return ()


@dataclass(frozen=True, slots=True)
class Tool(Generic[Input]):
    """One tool. `run` raises ToolFailure for what a model should read, and lets everything else through.

    `action` is the permission action that its `resources` are judged under; `external` gives the resources of
    `external_directory` that are judged first. Both get the session's directory, and may block on the file system.
    `opens` is for a tool that only reads: it gives the file, and a managed one needs no rule of `external_directory`.
    `idempotent` says that a call whose outcome is unknown may start again. `bounds_itself` says that its output keeps
    the limits of a model's text by construction. `output_model` is the type of its structured output, checked when it
    is given; keys that the model does not declare are left out.
    """

    name: str
    description: str
    input_model: type[Input]
    action: str
    run: Callable[[ToolContext, Input], Awaitable[ToolOutput]]
    resources: Callable[[str, Input], tuple[str, ...]]
    external: Callable[[str, Input], tuple[str, ...]] = _none
    idempotent: bool = False
    bounds_itself: bool = False
    opens: Callable[[str, Input], Path] | None = None
    output_model: type[BaseModel] | None = None


def check_permission(rules: Sequence[Rule], action: str, resources: Iterable[str]) -> None:
    """Return when the rules allow the action on every resource; else raise ToolFailure that names the resource, the
    rule that decided, and what to do. A rule that asks counts as one that denies: there is nobody to ask yet."""
    wanted = tuple(resources)
    effect = evaluate(rules, action, wanted)
    if effect == "allow":
        return
    resource = next(one for one in wanted if effect_of(rules, action, one) == effect)
    rule = next((r for r in reversed(rules) if matches(r.action, action) and matches(r.resource, resource)), None)
    decided = f'rule "{rule.action} {rule.resource} {rule.effect}"' if rule else "no rule matches"
    what = f'action "{action}" on "{resource}"'
    if effect == "deny":
        raise ToolFailure(f"Permission denied: {what} ({decided}). Do not try again; go another way or tell the user.")
    raise ToolFailure(
        f"Permission denied: {what} needs the user's approval ({decided}), and asking is not available yet. "
        f'The user can allow it with the rule "{action} {resource} allow".'
    )


def compact_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Give a JSON schema without titles, null alternatives and null defaults; the same model gives the same bytes."""
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" or (key == "default" and value is None):
            continue
        if key in ("properties", "$defs"):
            out[key] = {name: compact_schema(item) for name, item in value.items()}
        elif key == "anyOf":
            kinds = [compact_schema(item) for item in value if item != {"type": "null"}]
            out |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        else:
            out[key] = compact_schema(value) if isinstance(value, dict) else value
    return out


def _definition(tool: Tool[Any]) -> ToolDefinition:
    schema = compact_schema(tool.input_model.model_json_schema(by_alias=True))
    schema.pop("description", None)
    return ToolDefinition(name=tool.name, description=tool.description, parameters=schema)


class Registry:
    """Tools by name, in the order of their registration; the later one of a name wins.

    Raises ConfigurationError for a name that a provider would refuse.
    """

    def __init__(self, tools: Iterable[Tool[Any]]) -> None:
        by_name: dict[str, Tool[Any]] = {}
        for tool in tools:
            if _NAME.match(tool.name) is None:
                raise ConfigurationError(
                    f"Tool name {tool.name!r} is not usable: a letter, then up to 63 letters, digits, '_' or '-'."
                )
            by_name[tool.name] = tool
        self._tools = MappingProxyType(by_name)
        self._definitions = MappingProxyType({tool.name: _definition(tool) for tool in by_name.values()})

    def definitions(
        self, rules: Sequence[Rule], names: Collection[str] | None = None
    ) -> tuple[ToolDefinition, ...]:  # fmt: skip
        """Give what a model may be told of, in order: not what the rules deny as a whole, and only `names` if given."""
        return tuple(
            self._definitions[tool.name]
            for tool in self._tools.values()
            if (names is None or tool.name in names) and not hides_tool(rules, tool.action)
        )

    def idempotent(self, name: str) -> bool:
        """Say whether a call of this tool may start again when its outcome is unknown; False for an unknown tool."""
        return name in self._tools and self._tools[name].idempotent

    async def execute(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> ToolOutput:
        """Run one call and give its output, cleaned for storage and bounded for a model.

        Raises ToolFailure for an unknown tool, arguments or an output that do not fit, a permission that is missing,
        an output that can be neither shown nor kept, and what the tool itself expects to fail. Cancellation and every
        other exception pass as they are.
        """
        tool = self._tools.get(name)
        if tool is None:
            raise ToolFailure(f"Unknown tool: {name}")
        try:
            given = tool.input_model.model_validate(clean_arguments(dict(arguments)))
        except ValidationError as error:
            raise invalid("input", error) from None
        await asyncio.to_thread(self._permit, tool, given, context)
        output = encode_output(await tool.run(context, given), tool.output_model)
        return output if tool.bounds_itself else await context.outputs.bound(output)

    def _permit(self, tool: Tool[Any], given: BaseModel, context: ToolContext) -> None:
        directory = context.invocation.directory
        if tool.opens is None or not context.outputs.holds(tool.opens(directory, given)):
            check_permission(context.rules, EXTERNAL_DIRECTORY, tool.external(directory, given))
        check_permission(context.rules, tool.action, tool.resources(directory, given))
