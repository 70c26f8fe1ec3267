"""Providers that fail, waits that outlast a lease, and rows that nobody can read: the turn goes on, or says why not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update
from temporalio.client import WorkflowFailureError

from fencepost.domain.contracts import Status
from fencepost.domain.messages import AssistantMessage, CompletedTool, SyntheticMessage
from fencepost.providers.script import Action, CallTool, Cut, Fail, Gate, Pause, Say
from fencepost.store import tables
from fencepost.store.ownership import owner_of
from tests.house_kit import HeldTool, House, assert_equal_to_rebuild, served
from tests.replay import assert_replays
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_interrupts import interruptions, is_held, logged
from tests.workflows.test_turn import said, tools


def answers(messages: list[Any]) -> list[str]:
    return [said(message) for message in messages if isinstance(message, AssistantMessage)]


async def test_a_request_that_fails_before_any_output_is_made_again(house: MakeHouse) -> None:
    """Its attempts are seen while it is retried, and leave nothing behind."""
    gate = Gate()
    h = await house([[Fail(503)], [Fail(503)], [Pause(gate), Say("At last.")]])
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.")
    await gate.reached()
    status: Status = await handle.query("status", result_type=Status)
    assert (status.attempt, status.step) == (3, 1)
    gate.release()
    result: Any = await handle.result()
    types = await h.types(session_id)

    assert (result["outcome"], result["steps"]) == ("done", 1)
    assert len(h.provider.requests) == 3
    assert answers(await h.messages(session_id)) == ["At last."]
    assert not [kind for kind in types if "failed" in kind or "interrupted" in kind or "synthetic" in kind]
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_attempts_are_bounded(house: MakeHouse) -> None:
    h = await house([[Fail(503)], [Fail(503, {"error": {"message": "too busy"}})]], limits={"max_provider_attempts": 2})
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")
    types = await h.types(session_id)

    assert result.outcome == "failed"
    assert "too busy" in (result.error or "")
    assert len(h.provider.requests) == 2
    assert types.count("session.next.step.failed.2") == 1
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)


@pytest.mark.parametrize("cuts", [1, 2, 3])
async def test_a_cut_answer_goes_on_so_often_and_no_more(house: MakeHouse, cuts: int) -> None:
    """What was shown is kept, and shown once. The third cut is one too many."""
    replies: list[list[Action]] = [[Say(f"Part {n}. "), Cut()] for n in range(cuts)]
    h = await house([*replies, [Say("The end.")]], limits={"max_continuations": 2})
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")
    messages = await h.messages(session_id)

    parts = [f"Part {n}. " for n in range(cuts)]
    assert result.outcome == ("done" if cuts <= 2 else "failed")
    assert answers(messages) == ([*parts, "The end."] if cuts <= 2 else parts)
    assert len([m for m in messages if isinstance(m, SyntheticMessage)]) == min(cuts, 2)
    assert len(h.provider.requests) == min(cuts, 2) + 1
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)
    assert cuts <= 2 or (await h.run(session_id, "Try again.")).outcome == "done"


@pytest.mark.parametrize("status", [401, 404])
async def test_a_refused_request_is_made_once_and_ends_in_the_providers_words(house: MakeHouse, status: int) -> None:
    h = await house([[Fail(status, {"error": {"message": "you shall not pass"}})], [Say("Pass.")]])
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")

    assert result.outcome == "failed"
    assert "you shall not pass" in (result.error or "")
    assert len(h.provider.requests) == 1
    assert (await h.run(session_id, "Please.")).outcome == "done"
    await assert_replays(h, session_id)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"model": "scripted-not/any"}, "scripted-not"),
        ({"agent": "nobody"}, "nobody"),
        ({"model": "keyed/any"}, "SECRET_KEY"),
    ],
    ids=["model", "agent", "key"],
)
async def test_a_step_that_nothing_can_run_fails_with_the_reason(
    house: MakeHouse, attributes: dict[str, str], words: str
) -> None:
    nowhere = {"base_url": "http://127.0.0.1:9/v1", "any_model": True}
    h = await house(providers={"scripted": nowhere, "keyed": {**nowhere, "api_key_env": "SECRET_KEY"}})
    session_id = h.new_id()
    first = await h.run(session_id, "Go.", **attributes)
    second = await h.run(session_id, "Again.")

    for result in (first, second):
        assert result.outcome == "failed"
        assert words in (result.error or "")
    assert not await is_held(h, session_id)
    await assert_replays(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def test_a_back_off_that_is_longer_than_a_lease(house: MakeHouse) -> None:
    """Nobody wanted the session meanwhile: its run renews the claim and goes on, as if the lease had held."""
    h = await house(
        [[Fail(429, headers={"retry-after": "3"})], [Say("At last.")]], limits={"lease_seconds": 2, "renew_seconds": 1}
    )
    session_id = h.new_id()
    result = await h.run(session_id, "Go.")

    assert (result.outcome, result.steps) == ("done", 1)
    assert answers(await h.messages(session_id)) == ["At last."]
    assert await interruptions(h, session_id) == []
    await assert_replays(h, session_id)


async def expired(house: House, session_id: str) -> None:
    """Wait until the session's lease has run out."""
    while True:
        async with house.services.database.read() as conn:
            owner = await owner_of(conn, session_id)
        if owner is not None and owner.expired:
            return
        await asyncio.sleep(0.05)


async def test_a_tool_that_waits_for_its_worker_longer_than_a_lease(house: MakeHouse) -> None:
    """The session's files are elsewhere, and nobody there is at work yet. Once somebody is, the tool runs, once."""
    tool = HeldTool()
    tool.gate.set()
    limits = {"lease_seconds": 2, "renew_seconds": 1}
    h = await house([[CallTool("hold", id="call_1")], [Say("Done.")]], registry=tool.registry, limits=limits)
    elsewhere = await house(
        registry=tool.registry, limits=limits, workspace={"id": "far", "directory": h.directory}, serve=False
    )
    session_id = h.new_id()
    handle = await h.start(session_id, "Go.", location={"directory": "/far/away", "workspaceID": "far"})
    await h.provider.received(1)
    await logged(h, session_id, "session.next.tool.called.1")
    await expired(h, session_id)
    async with served(elsewhere.services):
        result: Any = await handle.result()

    assert result["outcome"] == "done"
    assert len(tool.invocations) == 1
    messages = await h.messages(session_id)
    [part] = tools(messages[1])
    assert isinstance(part.state, CompletedTool)
    assert await interruptions(h, session_id) == []
    assert [message.type for message in messages] == ["user", "assistant", "assistant"]
    await assert_replays(h, session_id)


@pytest.mark.parametrize("broken", ["user", "assistant"])
async def test_a_message_that_cannot_be_read_fails_the_turn_and_wedges_nothing(house: MakeHouse, broken: str) -> None:
    """Each prompt is admitted, and each run says which message it is; once that is repaired, everything is answered."""
    h = await house([[Say("Hello.")], [Say("Now I can.")]])
    session_id = h.new_id()
    await h.run(session_id, "Go.")
    row = await _message(h, session_id, broken)
    await _write(h, row.id, {"nonsense": True})
    for prompt in ("Again.", "And again."):
        receipt = await h.prompt(session_id, prompt)
        assert receipt.prompt.text == prompt
        assert row.id in await _end(h, session_id)
    assert len(h.provider.requests) == 1
    await assert_replays(h, session_id)
    await _write(h, row.id, row.data)
    result = await h.run(session_id, "Finally.")

    assert result.outcome == "done"
    users = [message["content"] for message in h.provider.requests[1]["messages"] if message["role"] == "user"]
    assert users == ["Go.", "Again.", "And again.", "Finally."]
    assert not await is_held(h, session_id)
    await assert_equal_to_rebuild(h, session_id)


async def _message(house: House, session_id: str, kind: str) -> Any:
    messages = tables.session_message
    async with house.services.database.read() as conn:
        found = await conn.execute(select(messages).where(messages.c.session_id == session_id, messages.c.type == kind))
        return found.one()


async def _write(house: House, message_id: str, data: dict[str, Any]) -> None:
    messages = tables.session_message
    async with house.services.database.begin() as conn:
        await conn.execute(update(messages).where(messages.c.id == message_id).values(data=data))


async def _end(house: House, session_id: str) -> str:
    """Give the words with which the session's open run fails, be it the run itself or its turn."""
    try:
        result = await house.ended(session_id)
    except WorkflowFailureError as error:
        return getattr(error.cause, "message", "")
    return result.error or "" if result.outcome == "failed" else ""
