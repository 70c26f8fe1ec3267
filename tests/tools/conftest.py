"""A registry, a runner and a workspace for tests of tools; commands and their processes are real."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost.config import Settings
from fencepost.domain.permissions import Rule
from fencepost.domain.tools import Invocation, TextItem, ToolOutput
from fencepost.tools.builtin import builtin_registry
from fencepost.tools.outputs import OutputStore
from fencepost.tools.processes import Reaper, ShellRunner
from fencepost.tools.registry import Registry, ToolContext

ALLOW_OUTSIDE = Rule(action="external_directory", resource="*", effect="allow")


def text_of(output: ToolOutput) -> str:
    """Give the text that a model would get."""
    return "\n".join(item.text for item in output.content if isinstance(item, TextItem))


def alive(pid: int) -> bool:
    """Say whether a process runs; one that only waits to be collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Poll until the condition gives something true, and give it; fail after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, "the condition did not come true in time"
        time.sleep(0.02)


def pids_in(path: Path, count: int) -> list[int]:
    """Give the process ids that a command has written into a file, [] as long as there are fewer than `count`."""
    words = path.read_text().split() if path.exists() else []
    return [int(word) for word in words] if len(words) >= count else []


class Workspace:
    """A session's directory with the tools bound to it."""

    def __init__(self, root: Path, runner: ShellRunner) -> None:
        self.root = root
        self.runner = runner
        self.registry: Registry = builtin_registry()
        self.outputs = OutputStore(root.parent / "tool-output")

    def context(self, *rules: Rule) -> ToolContext:
        invocation = Invocation("ses_1", "build", "msg_1", "call_1", str(self.root), "ses_1/msg_1/call_1")
        return ToolContext(invocation, (*Settings().permissions, *rules), self.runner, self.outputs)

    async def call(self, tool: str, *rules: Rule, **arguments: Any) -> ToolOutput:
        return await self.registry.execute(tool, arguments, self.context(*rules))


@pytest.fixture
async def runner() -> AsyncIterator[ShellRunner]:
    runner = ShellRunner(Reaper())
    await runner.start()
    yield runner
    await runner.close()


@pytest.fixture
async def workspace(tmp_path: Path, runner: ShellRunner) -> Workspace:
    root = tmp_path / "ws"
    root.mkdir()
    return Workspace(root, runner)
