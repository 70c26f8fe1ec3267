"""Turns from end to end: what is requested of the model, what the log says, what the transcript shows."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.domain.messages import AssistantMessage, CompletedTool, FailedTool, TextPart, ToolPart, UserMessage
from fencepost.providers.script import Action, CallTool, ErrorEvent, Fail, Gate, Pause, Say
from tests.house_kit import HeldTool, assert_equal_to_rebuild
from tests.workflows.conftest import MakeHouse


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"] if message["role"] != "system"]


def said(message: Any) -> str:
    assert isinstance(message, AssistantMessage)
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def tools(message: Any) -> list[ToolPart]:
    assert isinstance(message, AssistantMessage)
    return [part for part in message.content if isinstance(part, ToolPart)]


@pytest.mark.conformance("RUN-02", "INB-20")
@pytest.mark.parametrize("explicit", [{}, {"resume": True}], ids=["by default", "asked for"])
async def test_a_prompt_starts_one_turn(house: MakeHouse, explicit: dict[str, bool]) -> None:
    h = await house([[Say("Hello!")]])
    session_id = h.new_id()
    receipt = await h.prompt(session_id, "Say hello.", **explicit)
    result = await h.ended(session_id)
    messages = await h.messages(session_id)

    assert result.outcome == "done"
    assert len(h.provider.requests) == 1
    assert [message.type for message in messages] == ["user", "assistant"]
    assert isinstance(messages[0], UserMessage)
    assert (messages[0].id, messages[0].text) == (receipt.id, "Say hello.")
    assert said(messages[1]) == "Hello!"
    # One wake: nothing resumed it a second time.
    runs = [run async for run in h.client.list_workflows(f"WorkflowId = '{session_id}'")]
    assert len(runs) == 1


@pytest.mark.conformance("RUN-03")
async def test_one_request_carries_the_whole_history_and_the_tools_in_order(house: MakeHouse) -> None:
    h = await house([[Say("Both seen.")]])
    session_id = h.new_id()
    await h.prompt(session_id, "First.", resume=False)
    await h.ended(session_id)
    await h.prompt(session_id, "Second.")
    await h.ended(session_id)

    assert len(h.provider.requests) == 1
    [body] = h.provider.requests
    assert [m["content"] for m in body["messages"] if m["role"] == "user"] == ["First.", "Second."]
    offered = [tool["function"]["name"] for tool in body["tools"]]
    assert offered == ["bash", "read", "write", "edit", "glob", "grep"]


@pytest.mark.conformance("RUN-01")
async def test_a_registered_tool_is_offered_and_called_with_the_identity_of_its_call(house: MakeHouse) -> None:
    tool = HeldTool()
    tool.gate.set()
    h = await house([[CallTool("hold", {"note": "x"}, id="call_7")], [Say("Done.")]], registry=tool.registry)
    session_id = h.new_id()
    await h.run(session_id, "Hold on.")
    messages = await h.messages(session_id)

    assert "hold" in [entry["function"]["name"] for entry in h.provider.requests[0]["tools"]]
    [invocation] = tool.invocations
    assert invocation.session_id == session_id
    assert invocation.agent == "build"
    assert invocation.assistant_message_id == messages[1].id
    assert invocation.tool_call_id == "call_7"
    [part] = tools(messages[1])
    assert isinstance(part.state, CompletedTool)
    assert part.state.content[0].to_wire() == {"type": "text", "text": "held x"}


@pytest.mark.conformance("RUN-33")
async def test_a_settled_tool_call_goes_back_in_a_second_request(house: MakeHouse) -> None:
    h = await house([[Say("Let me look."), CallTool("read", {"path": "note.txt"})], [Say("It is heron.")]])
    (h.directory / "note.txt").write_text("the word is heron\n")
    session_id = h.new_id()
    result = await h.run(session_id, "What is the word?")
    types = await h.types(session_id)

    assert (result.outcome, result.steps) == ("done", 2)
    assert len(h.provider.requests) == 2
    assert roles(h.provider.requests[1]) == ["user", "assistant", "tool"]
    assert "heron" in h.provider.requests[1]["messages"][-1]["content"]
    settled = types.index("session.next.tool.success.1")
    assert types.index("session.next.tool.called.1") < settled < types.index("session.next.step.ended.2")
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-37")
async def test_tools_start_while_the_stream_goes_on_and_all_settle_before_the_next_request(house: MakeHouse) -> None:
    tool, gate = HeldTool(), Gate()
    calls: list[Action] = [CallTool("hold", {"note": str(n)}, id=f"call_{n}") for n in range(5)]
    h = await house([[*calls, Say("Waiting."), Pause(gate)], [Say("All done.")]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Do five things.")
    await gate.reached()
    await tool.started(5)  # the stream is still held
    messages = await h.messages(session_id)
    assert [part.state.status for part in tools(messages[1])] == ["running"] * 5
    assert len(h.provider.requests) == 1
    gate.release()
    tool.gate.set()
    await handle.result()

    assert len(h.provider.requests) == 2
    assert roles(h.provider.requests[1]) == ["user", "assistant", *["tool"] * 5]
    types = await h.types(session_id)
    assert types.index("session.next.step.ended.2") > max(
        n for n, kind in enumerate(types) if kind == "session.next.tool.success.1"
    )
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-38")
async def test_one_call_id_in_two_steps_stays_two_calls(house: MakeHouse) -> None:
    tool = HeldTool()
    tool.gate.set()
    h = await house(
        [[CallTool("hold", {"note": "a"}, id="call_1")], [CallTool("hold", {"note": "b"}, id="call_1")], [Say("Ok.")]],
        registry=tool.registry,
    )
    session_id = h.new_id()
    await h.run(session_id, "Twice.")
    messages = await h.messages(session_id)

    texts = []
    for message in messages[1:3]:
        [part] = tools(message)
        assert isinstance(part.state, CompletedTool)
        texts.append(part.state.content[0].to_wire()["text"])
    assert texts == ["held a", "held b"]
    assert len({invocation.effect_key for invocation in tool.invocations}) == 2
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-39")
async def test_a_failed_tool_is_shown_to_the_model_and_the_turn_goes_on(house: MakeHouse) -> None:
    h = await house([[CallTool("fly", {"to": "the moon"})], [Say("I cannot fly.")]])
    session_id = h.new_id()
    result = await h.run(session_id, "Fly.")
    messages = await h.messages(session_id)

    assert result.outcome == "done"
    [part] = tools(messages[1])
    assert isinstance(part.state, FailedTool)
    assert part.state.error.message == "Unknown tool: fly"
    assert roles(h.provider.requests[1]) == ["user", "assistant", "tool"]
    assert "Unknown tool: fly" in h.provider.requests[1]["messages"][-1]["content"]


@pytest.mark.conformance("RUN-69")
async def test_text_before_and_after_a_call_stays_two_blocks(house: MakeHouse) -> None:
    tool = HeldTool()
    tool.gate.set()
    h = await house([[Say("Before."), CallTool("hold"), Say("After.")], [Say("End.")]], registry=tool.registry)
    session_id = h.new_id()
    await h.run(session_id, "Go.")
    messages = await h.messages(session_id)

    assert isinstance(messages[1], AssistantMessage)
    blocks = [part for part in messages[1].content if isinstance(part, TextPart)]
    assert [block.text for block in blocks] == ["Before.", "After."]
    assert len({block.id for block in blocks}) == 2
    assert [part.type for part in messages[1].content] == ["text", "tool", "text"]


@pytest.mark.conformance("RUN-66")
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([Say("Half an"), ErrorEvent("the model fell over")], "Half an"),
        ([ErrorEvent("the model fell over", code="invalid_request_error", type="invalid_request_error")], ""),
        ([Fail(400, {"error": {"message": "the model fell over"}})], ""),
    ],
    ids=["after text", "before the step", "refused"],
)
async def test_a_provider_error_ends_the_step_in_its_own_words(
    house: MakeHouse, script: list[Action], text: str
) -> None:
    h = await house([script], limits={"max_continuations": 0})
    session_id = h.new_id()
    await h.prompt(session_id, "Go.", resume=False)
    await h.ended(session_id)
    handle = await h.start(session_id)
    result = await h.ended(session_id)
    messages = await h.messages(session_id)
    types = await h.types(session_id)

    assert (await handle.describe()).status is not None
    assert result.outcome == "failed"
    assert "the model fell over" in (result.error or "")
    assert len(h.provider.requests) == 1
    assert isinstance(messages[1], AssistantMessage)
    assert messages[1].finish == "error"
    assert messages[1].error is not None
    assert "the model fell over" in messages[1].error.message
    assert said(messages[1]) == text
    assert types.count("session.next.step.failed.2") == 1
    assert not [kind for kind in types if kind.startswith(("session.next.step.ended", "session.next.step.interrupted"))]
