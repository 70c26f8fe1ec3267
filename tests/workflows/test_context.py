"""What a model is told of its surroundings: once in the system text, and then by messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text

from fencepost.domain.messages import AssistantMessage, SystemMessage
from fencepost.providers.script import Action, CallTool, Gate, Pause, Say
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse

UNREADABLE = "was told of its context cannot be read"


async def execute(house: House, statement: str, **values: Any) -> None:
    async with house.services.database.begin() as conn:
        await conn.execute(text(statement), values)


async def let_a_day_pass(house: House, session_id: str) -> None:
    """Let the session have begun on an earlier day."""
    statement = """
        UPDATE session_context_epoch SET baseline = regexp_replace(baseline, '\\d{4}-\\d\\d-\\d\\d', '2020-02-29'),
            snapshot = jsonb_set(snapshot, '{session/date,value}', '"2020-02-29"')
        WHERE session_id = :id
    """
    await execute(house, statement, id=session_id)


async def spoil(house: House, session_id: str) -> None:
    await execute(house, "UPDATE session_context_epoch SET snapshot = '7' WHERE session_id = :id", id=session_id)


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def system(body: dict[str, Any]) -> str:
    """Give the system text that a request begins with."""
    assert body["messages"][0]["role"] == "system"
    content: str = body["messages"][0]["content"]
    return content


@pytest.mark.conformance("RUN-12")
async def test_the_system_text_is_the_agents_and_then_the_directory_and_the_date(house: MakeHouse) -> None:
    """An agent without instructions has the baseline alone."""
    h = await house(
        [[Say("1")], [Say("2")]],
        agents={"build": {"system": " Be brief. \n"}, "plan": {"system": ""}},
    )
    first, second = h.new_id(), h.new_id()
    days = {datetime.now(UTC).date().isoformat()}
    await h.run(first, "Go.")
    await h.run(second, "Go.", agent="plan")
    days.add(datetime.now(UTC).date().isoformat())
    baselines = [f"Working directory: {h.directory}\n\nToday's date: {day} (UTC)" for day in days]

    assert system(h.provider.requests[0]) in [f"Be brief.\n\n{baseline}" for baseline in baselines]
    assert system(h.provider.requests[1]) in baselines
    assert await h.types(first) == [
        "session.next.prompt.admitted.1",
        "session.next.prompted.1",
        "session.next.step.started.1",
        "session.next.text.started.1",
        "session.next.text.ended.1",
        "session.next.step.ended.2",
    ]


@pytest.mark.conformance("RUN-11")
async def test_a_new_day_leaves_the_system_text_and_comes_as_one_message_after_the_input(house: MakeHouse) -> None:
    """In the turn of that day, and in every request from then on at the same place."""
    tool = HeldTool()
    tool.gate.set()
    replies: list[list[Action]] = [[Say("1")], [CallTool("hold")], [Say("2")], [Say("3")]]
    h = await house(replies, registry=tool.registry)
    session_id = h.new_id()
    await h.run(session_id, "First.")
    await let_a_day_pass(h, session_id)
    await h.run(session_id, "Second.")
    await h.run(session_id, "Third.")
    requests = h.provider.requests

    conversation = ["system", "user", "assistant", "user", "system", "assistant", "tool", "assistant", "user"]
    assert [roles(body) for body in requests] == [conversation[:n] for n in (2, 5, 7, 9)]
    assert len({system(body) for body in requests[1:]}) == 1
    assert "2020-02-29" in system(requests[1])
    said = {body["messages"][4]["content"] for body in requests[1:]}
    assert len(said) == 1
    assert said.pop().startswith("Today's date is now ")
    assert (await h.types(session_id)).count("session.next.context.updated.1") == 1
    told = [message for message in await h.messages(session_id) if isinstance(message, SystemMessage)]
    assert len(told) == 1
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_session_that_moved_is_told_where_it_is_now(house: MakeHouse) -> None:
    """By the first request after the move, and by no later one again."""
    h = await house([[Say("1")], [Say("2")], [Say("3")]])
    session_id = h.new_id()
    await h.run(session_id, "First.")
    there = h.directory / "there"
    there.mkdir()
    await execute(h, "UPDATE session SET directory = :there WHERE id = :id", there=str(there), id=session_id)
    await h.run(session_id, "Second.")
    await h.run(session_id, "Third.")
    messages = h.provider.requests[-1]["messages"]

    assert system(h.provider.requests[2]) == system(h.provider.requests[0])
    [told] = [message["content"] for message in messages[1:] if message["role"] == "system"]
    assert told == f"The working directory has changed from {h.directory} to {there}."
    assert roles(h.provider.requests[1])[-2:] == ["user", "system"]


@pytest.mark.conformance("RUN-10")
async def test_a_snapshot_that_cannot_be_read_fails_the_turn_and_no_request_is_made(house: MakeHouse) -> None:
    """The failure is the input's answer, and everything can be read. Repaired as it says, the session goes on."""
    h = await house([[Say("1")], [Say("3")]])
    session_id = h.new_id()
    await h.run(session_id, "First.")
    await spoil(h, session_id)
    result = await h.run(session_id, "Second.")
    messages = await h.messages(session_id)

    assert (result.outcome, len(h.provider.requests)) == ("failed", 1)
    assert result.error is not None
    assert session_id in result.error
    assert UNREADABLE in result.error
    assert [message.type for message in messages] == ["user", "assistant", "user", "assistant"]
    assert isinstance(messages[3], AssistantMessage)
    assert messages[3].error is not None
    assert messages[3].error.message == result.error
    async with h.services.database.read() as conn:
        assert (await conn.execute(text("SELECT count(*) FROM session_execution"))).scalar_one() == 0
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)

    await execute(h, "DELETE FROM session_context_epoch WHERE session_id = :id", id=session_id)
    assert (await h.run(session_id, "Third.")).outcome == "done"
    assert roles(h.provider.requests[1])[:2] == ["system", "user"]


async def test_a_snapshot_that_cannot_be_read_between_two_steps_settles_the_first(house: MakeHouse) -> None:
    """Its answer and its tool stand; the step that would see the result is the one that fails."""
    tool, gate = HeldTool(), Gate()
    tool.gate.set()
    h = await house([[CallTool("hold"), Say("Wait."), Pause(gate)], [Say("never")]], registry=tool.registry)
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    await spoil(h, session_id)
    gate.release()
    result = await handle.result()
    types = await h.types(session_id)

    assert result["outcome"] == "failed"
    assert UNREADABLE in result["error"]
    assert len(h.provider.requests) == 1
    assert len(tool.invocations) == 1
    assert types[-3:] == ["session.next.step.ended.2", "session.next.step.started.1", "session.next.step.failed.2"]
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)
