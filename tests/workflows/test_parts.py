"""Parts of an answer as they stream, are cut off, or are interrupted: text, reasoning, and a tool's raw input."""

from __future__ import annotations

import asyncio
import json
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
PIECES = ['{"note": "', *(f"{n:03d} " for n in range(30)), '"}']
"""What is streamed piece by piece; as a tool's raw input it is JSON."""


def fragment(text: str, *, first: bool = False) -> Raw:
    """Give one network chunk with a piece of a tool call's arguments."""
    function: dict[str, Any] = {"arguments": text}
    call: dict[str, Any] = {"index": 0, "function": function}
    if first:
        call |= {"id": "call_1", "type": "function"}
        function["name"] = "hold"
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    return Raw(f"data: {json.dumps(chunk)}\n\n".encode())


def whole(kind: str, gates: list[Gate]) -> list[Action]:
    """Give an answer whose part comes in pieces, each after the gate of the one before."""
    made: list[Action] = []
    for number, (piece, gate) in enumerate(zip(PIECES, gates, strict=True)):
        pieces: dict[str, Action] = {
            "text": Say(piece, chunks=1),
            "reasoning": Think(piece, chunks=1),
            "tool": fragment(piece, first=number == 0),
        }
        made += [pieces[kind], Pause(gate)]
    return made


def partial(kind: str) -> list[Action]:
    """Give the beginning of an answer that stops inside the part."""
    answers: dict[str, list[Action]] = {
        "text": [Say("half of it", chunks=1)],
        "reasoning": [Think("half of it", chunks=1)],
        "tool": [fragment('{"note": "half', first=True)],
    }
    return answers[kind]


async def watch(house: House, session_id: str, kind: str, gates: list[Gate]) -> list[Delta]:
    """Follow a session until its first step has ended, and let the next piece come when one was seen."""
    listener = Listener(house.services.database)
    seen: list[Delta] = []
    try:
        async for item in follow(house.services.database, listener, session_id):
            if isinstance(item, Delta) and item.kind == kind:
                seen.append(item)
                gates[min(len(seen), len(gates)) - 1].release()
            elif isinstance(item, StoredEvent) and item.type == "session.next.step.ended.2":
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
    gates = [Gate() for _ in PIECES]
    script = whole(kind, gates)
    h = await house(lambda body: script if len(body["messages"]) < 4 else [Say("End.")], registry=tool.registry)
    session_id = h.new_id()
    watching = asyncio.create_task(watch(h, session_id, kind, gates))
    handle = await h.start(session_id, "Go.")
    deltas = await watching
    await handle.result()

    assert [delta.text for delta in deltas] == PIECES
    assert len(deltas) == 32
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


@pytest.mark.conformance("RUN-70", "ITR-01")
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
