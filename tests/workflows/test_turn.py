"""A turn from end to end."""

from pathlib import Path

import pytest
from temporalio.client import Client

from fencepost.providers.script import Action, CallTool, Say
from tests.house_kit import open_house


@pytest.mark.conformance("RUN-33", "RUN-01")
async def test_a_tool_call_is_settled_and_its_result_goes_back(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("the word is heron\n")
    replies: list[list[Action]] = [[Say("Let me look."), CallTool("read", {"path": "note.txt"})], [Say("It is heron.")]]
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies) as house:
        session_id = house.new_id()
        result = await house.run(session_id, "What is the word?")
        messages = await house.messages(session_id)

    assert result.outcome == "done"
    assert [m.type for m in messages] == ["user", "assistant", "assistant"]
    assert [m["role"] for m in house.provider.requests[1]["messages"]] == ["system", "user", "assistant", "tool"]
