"""What the log keeps of a tool's outcome."""

from __future__ import annotations

import base64

import pytest

from fencepost.domain.messages import CompletedTool, FailedTool
from fencepost.providers.script import CallTool, Say
from tests.house_kit import assert_equal_to_rebuild
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_turn import tools

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@pytest.mark.conformance("TEV-01")
async def test_an_image_is_stored_once_and_without_a_result(house: MakeHouse) -> None:
    h = await house([[CallTool("read", {"path": "dot.png"})], [Say("A dot.")]])
    (h.directory / "dot.png").write_bytes(PNG)
    session_id = h.new_id()
    await h.run(session_id, "What is in the picture?")
    [success] = [event for event in await h.events(session_id) if event.type == "session.next.tool.success.1"]
    messages = await h.messages(session_id)

    assert "result" not in success.data
    texts = [item for item in success.data["content"] if item["type"] == "text"]
    [image] = [item for item in success.data["content"] if item["type"] == "file"]
    assert "Image read successfully" in str(success.data["structured"]) + str(texts)
    assert image["mime"] == "image/png"
    assert image["uri"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert str(success.data).count(base64.b64encode(PNG).decode()) == 1
    [part] = tools(messages[1])
    assert isinstance(part.state, CompletedTool)
    assert str(part.state.to_wire()).count(base64.b64encode(PNG).decode()) == 1
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("TEV-03")
async def test_a_binary_file_is_a_failure_and_no_success(house: MakeHouse) -> None:
    h = await house([[CallTool("read", {"path": "blob.txt"})], [Say("I cannot read it.")]])
    (h.directory / "blob.txt").write_bytes(b"PK\x03\x04\x00\x00" + bytes(range(256)))
    session_id = h.new_id()
    await h.run(session_id, "What is in the file?")
    types = await h.types(session_id)
    [failed] = [event for event in await h.events(session_id) if event.type == "session.next.tool.failed.1"]
    messages = await h.messages(session_id)

    assert "session.next.tool.success.1" not in types
    assert "Cannot read binary file" in failed.data["error"]["message"]
    [part] = tools(messages[1])
    assert isinstance(part.state, FailedTool)
