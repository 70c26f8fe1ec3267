"""Parts of an answer as they stream, are cut off, or are interrupted: text, reasoning, and a tool's raw input."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.domain.messages import AssistantMessage, FailedTool, ReasoningPart, TextPart, ToolPart
from fencepost.domain.projection import INTERRUPTED, UNSETTLED
from fencepost.providers.script import Action, CallTool, Cut, Gate, Hang, Pause, Raw, Say, Think
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Listener
from fencepost.store.readers import Delta, follow
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.workflows.conftest import MakeHouse

KINDS = ["text", "reasoning", "tool"]
WHOLE = "".join(f"{n:03d} " for n in range(32))
ARGUMENTS = '{"note": "' + WHOLE[:-12] + '"}'


def whole(kind: str) -> list[Action]:
    """Give an answer whose part comes in 32 pieces."""
    answers: dict[str, list[Action]] = {
        "text": [Say(WHOLE, chunks=32)],
        "reasoning": [Think(WHOLE, chunks=32), Say("So.")],
        "tool": [CallTool("hold", ARGUMENTS, id="call_1", split=32)],
    }
    return answers[kind]


def partial(kind: str) -> list[Action]:
    """Give the beginning of an answer that stops inside the part."""
    fragment = (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function",'
        b'"function":{"name":"hold","arguments":"{\\"note\\": \\"half"}}]}}]}\n\n'
    )
    answers: dict[str, list[Action]] = {
        "text": [Say("half of it", chunks=1)],
        "reasoning": [Think("half of it", chunks=1)],
        "tool": [Raw(fragment)],
    }
    return answers[kind]


async def watch(house: House, session_id: str) -> list[StoredEvent | Delta]:
    """Follow a session until its first step has ended."""
    listener = Listener(house.services.database)
    seen: list[StoredEvent | Delta] = []
    try:
        async for item in follow(house.services.database, listener, session_id):
            seen.append(item)
            if isinstance(item, StoredEvent) and item.type == "session.next.step.ended.2":
                break
    finally:
        await listener.close()
    return seen


async def shown(house: House, session_id: str) -> AssistantMessage:
    """Give the newest assistant message."""
    messages = [m for m in await house.messages(session_id) if isinstance(m, AssistantMessage)]
    return messages[-1]


@pytest.mark.conformance("RUN-70")
@pytest.mark.parametrize("kind", KINDS)
async def test_deltas_are_live_and_never_stored(house: MakeHouse, kind: str) -> None:
    tool = HeldTool()
    tool.gate.set()
    # Nothing gathers, so each piece is a delta of its own; the pace lets the reader keep up with them.
    slow = [_slowly(action) for action in whole(kind)]
    h = await house(
        lambda body: slow if len(body["messages"]) < 4 else [Say("End.")],
        registry=tool.registry,
        limits={"live_seconds": 0},
    )
    session_id = h.new_id()
    watching = asyncio.create_task(watch(h, session_id))
    handle = await h.start(session_id, "Go.")
    seen = await watching
    await handle.result()

    deltas = [item for item in seen if isinstance(item, Delta) and item.kind == kind]
    assert len(deltas) == 32
    assert "".join(delta.text for delta in deltas) == (ARGUMENTS if kind == "tool" else WHOLE)
    types = await h.types(session_id)
    assert not [name for name in types if "delta" in name]
    started, ended = {
        "text": ("session.next.text.started.1", "session.next.text.ended.1"),
        "reasoning": ("session.next.reasoning.started.1", "session.next.reasoning.ended.1"),
        "tool": ("session.next.tool.input.started.1", "session.next.tool.input.ended.1"),
    }[kind]
    first_step = types[: types.index("session.next.step.ended.2")]
    assert (first_step.count(started), first_step.count(ended)) == (1, 1)
    await assert_equal_to_rebuild(h, session_id)


def _slowly(action: Action) -> Action:
    if isinstance(action, Say):
        return Say(action.text, action.chunks, delay=0.02)
    if isinstance(action, Think):
        return Think(action.text, action.chunks, delay=0.02)
    assert isinstance(action, CallTool)
    return CallTool(action.name, action.arguments, action.id, action.split, delay=0.02)


def _check_closed(kind: str, message: AssistantMessage) -> None:
    [part] = message.content
    if kind == "tool":
        assert isinstance(part, ToolPart)
        assert isinstance(part.state, FailedTool)
        assert part.state.error.message == INTERRUPTED
    else:
        assert isinstance(part, TextPart | ReasoningPart)
        assert part.text == "half of it"
    if isinstance(part, ReasoningPart):
        assert part.time is not None
        assert part.time.completed is not None
    assert message.finish == "error"
    assert message.time.completed is not None


@pytest.mark.conformance("RUN-70")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_is_closed_with_what_there_is_when_the_stream_fails(house: MakeHouse, kind: str) -> None:
    tool = HeldTool()
    h = await house([[*partial(kind), Cut()]], registry=tool.registry, limits={"max_continuations": 0})
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")
    message = await shown(h, session_id)

    assert result.outcome == "failed"
    _check_closed(kind, message)
    assert message.error is not None
    assert message.error.message not in ("", UNSETTLED)
    assert tool.invocations == []
    await assert_equal_to_rebuild(h, session_id)


@pytest.mark.conformance("RUN-70")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_part_is_closed_with_what_there_is_when_the_step_is_interrupted(house: MakeHouse, kind: str) -> None:
    tool, gate = HeldTool(), Gate()
    h = await house([[*partial(kind), Pause(gate), Hang()]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await _has_part(h, session_id)
    await handle.signal("interrupt", {"reason": "enough"})
    result: Any = await handle.result()
    message = await shown(h, session_id)

    assert result["outcome"] == "interrupted"
    _check_closed(kind, message)
    assert message.error is not None
    assert message.error.message == UNSETTLED
    assert tool.invocations == []
    await assert_equal_to_rebuild(h, session_id)


async def _has_part(house: House, session_id: str) -> None:
    """Wait until the part has begun, by following the log."""
    listener = Listener(house.services.database)
    try:
        async for item in follow(house.services.database, listener, session_id):
            if isinstance(item, Delta):
                return
    finally:
        await listener.close()


@pytest.mark.conformance("RUN-64")
async def test_an_interrupt_before_the_first_word_ends_the_turn_and_runs_no_tool(house: MakeHouse) -> None:
    tool, gate = HeldTool(), Gate()
    h = await house([[Pause(gate), CallTool("hold")]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await handle.signal("interrupt")
    result: Any = await handle.result()
    gate.release()

    assert result["outcome"] == "interrupted"
    assert tool.invocations == []
    assert len(h.provider.requests) == 1
    await h.provider.left()  # its connection was closed, not just forgotten
    types = await h.types(session_id)
    assert types[-1] == "session.next.step.interrupted.1"
    assert not [kind for kind in types if kind.startswith("session.next.tool")]
