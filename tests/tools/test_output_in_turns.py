"""Tools' output and identity through a whole turn: the registry, the log, the transcript and the next request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from temporalio.client import Client

from fencepost.domain.messages import AssistantMessage, CompletedTool, FailedTool, ToolPart
from fencepost.providers.script import CallTool, Say
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild, open_house

MakeHouse: TypeAlias = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def house(database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path) -> MakeHouse:
    """Open a house whose tools work in `ws`; output is kept beside it."""
    directory = tmp_path / "ws"
    directory.mkdir()

    def make(replies: Any, **options: Any) -> AbstractAsyncContextManager[House]:
        return open_house(database_url, temporal_client, task_queue, directory, replies, **options)

    return make


async def _parts(house: House, session_id: str) -> list[ToolPart]:
    messages = [one for one in await house.messages(session_id) if isinstance(one, AssistantMessage)]
    return [part for message in messages for part in message.content if isinstance(part, ToolPart)]


@pytest.mark.conformance("TOS-01")
async def test_a_long_output_reaches_the_model_cut_and_can_be_read_on(house: MakeHouse, tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def reply(body: dict[str, Any]) -> list[Any]:
        results = [message for message in body["messages"] if message["role"] == "tool"]
        if not results:
            return [CallTool("bash", {"command": "seq 5000"})]
        if len(results) == 1:  # the model follows the marker
            [path] = kept.iterdir()
            assert str(path) in results[0]["content"]
            return [CallTool("read", {"path": str(path), "offset": 2500, "limit": 1})]
        return [Say("It is 2500.")]

    async with house(reply, tool_output={"directory": kept}) as h:
        session_id = h.new_id()
        result = await h.run(session_id, "What is in the middle?")
        bash, read = await _parts(h, session_id)
        await assert_equal_to_rebuild(h, session_id)

    assert result.outcome == "done"
    [file] = kept.iterdir()
    assert file.read_text() == "".join(f"{number}\n" for number in range(1, 5001))
    assert isinstance(bash.state, CompletedTool)
    assert bash.state.output_paths == (str(file),)
    assert bash.state.structured == {"exitCode": 0, "timeout": False, "truncated": False, "bytes": 23_893}
    first, second = (m["content"] for m in h.provider.requests[2]["messages"] if m["role"] == "tool")
    assert first.startswith("1\n2\n")
    assert first.endswith("4999\n5000\n")
    assert "\n2500\n" not in first
    assert len(first.splitlines()) <= 2000
    assert isinstance(read.state, CompletedTool)
    assert second.startswith("2500\n")


@pytest.mark.conformance("TOS-06")
async def test_an_output_that_cannot_be_kept_is_settled_as_failed_and_the_model_is_told(
    house: MakeHouse, tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()  # a file where the directory should be
    replies = [[CallTool("bash", {"command": "seq 5000"})], [Say("There is no room.")]]
    async with house(replies, tool_output={"directory": tmp_path / "kept"}) as h:
        session_id = h.new_id()
        result = await h.run(session_id, "Count.")
        [part] = await _parts(h, session_id)

    assert result.outcome == "done"
    assert isinstance(part.state, FailedTool)
    assert part.state.error.message.startswith("StorageError: the tool ran, but its output (5000 lines, 23893 bytes)")
    assert "StorageError" in h.provider.requests[1]["messages"][-1]["content"]


@pytest.mark.conformance("REG-09")
async def test_each_call_gets_the_whole_identity_of_its_own(house: MakeHouse, tmp_path: Path) -> None:
    tool = HeldTool()
    tool.gate.set()
    replies = [
        [CallTool("hold", {"note": "a"}, id="call_a"), CallTool("hold", {"note": "b"}, id="call_b")],
        [CallTool("hold", {"note": "c"}, id="call_a")],
        [Say("Done.")],
    ]
    async with house(replies, registry=tool.registry) as h:
        session_id = h.new_id()
        await h.run(session_id, "Three times.", agent="plan")
        messages = [one.id for one in await h.messages(session_id) if isinstance(one, AssistantMessage)]

    given = {(one.assistant_message_id, one.tool_call_id): one for one in tool.invocations}
    assert set(given) == {(messages[0], "call_a"), (messages[0], "call_b"), (messages[1], "call_a")}
    for one in tool.invocations:
        assert (one.session_id, one.agent) == (session_id, "plan")
        assert one.directory == str(tmp_path / "ws")
    assert len({one.effect_key for one in tool.invocations}) == 3


@pytest.mark.conformance("TOS-10")
async def test_expired_output_is_removed_when_a_worker_starts(house: MakeHouse, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("tool_old", "tool_new", "notes"):
        (kept / name).touch()
    for name in ("tool_old", "notes"):
        os.utime(kept / name, (0, 0))
    async with house([], tool_output={"directory": kept}), asyncio.timeout(5):
        while (kept / "tool_old").exists():  # noqa: ASYNC110 - a file tells nobody that it is gone
            await asyncio.sleep(0.02)
    assert sorted(path.name for path in kept.iterdir()) == ["notes", "tool_new"]
