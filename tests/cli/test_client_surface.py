"""The client beyond one turn: input by every door, pages, switches, deletion, and the example."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client as TemporalClient

from fencepost.domain import messages as m
from fencepost.domain.attachments import ATTACHMENT_BYTES
from fencepost.domain.errors import (
    ClaimRefusedError,
    InvalidInputError,
    MessageNotFoundError,
    NotFoundError,
    PromptConflictError,
)
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import AgentAttachment, FileAttachment, Prompt
from fencepost.domain.models import ModelRef
from fencepost.providers.script import Action, CallTool, Gate, Pause, Say
from fencepost.store import inbox, tables
from fencepost.store.event_log import StoredEvent
from tests.cli.test_client import Opened
from tests.house.project import ROOT
from tests.house_kit import House
from tests.store.kit import StoreKit

EXAMPLE = ROOT / "examples" / "client.py"


@pytest.fixture
def opened(database_url: str, temporal_client: TemporalClient, task_queue: str, tmp_path: Path) -> Opened:
    """A house and a client, to be opened with what the model says."""
    return Opened(database_url, temporal_client, task_queue, tmp_path)


def _texts(messages: list[m.Message]) -> list[str]:
    return [message.text for message in messages if isinstance(message, m.UserMessage)]


async def _wakes(house: House, session_id: str) -> list[bool]:
    rows = await StoreKit(house.services.database).rows(tables.session_input, session_id)
    return [row["wake_pending"] for row in rows]


@pytest.mark.conformance("INB-03")
async def test_an_interrupt_needs_a_session_and_does_nothing_to_an_idle_one(opened: Opened) -> None:
    """One that never ran, and one that has: no event, no wake lost, and the next prompt runs as ever."""
    async with opened([[Say("one")], [Say("two")]]) as (house, client):
        with pytest.raises(NotFoundError, match="no session ses_none"):
            await client.interrupt("ses_none")
        session = await client.create(opened.new)
        assert await client.interrupt(session.id, "enough") is False
        await client.prompt(session.id, "first")
        assert (await client.result(session.id)).outcome == "done"
        await client.prompt(session.id, "kept", resume=False)
        before = await StoreKit(house.services.database).everything(session.id)
        assert await client.interrupt(session.id, "enough", after=0) is False

        assert await StoreKit(house.services.database).everything(session.id) == before
        assert (await client.resume(session.id)).outcome == "done"
        assert _texts(await client.messages(session.id)) == ["first", "kept"]


@pytest.mark.conformance("INB-07", "INB-21")
@pytest.mark.parametrize("delivery", ["steer", "queue"])
async def test_input_may_be_recorded_only_and_is_run_by_a_resume(opened: Opened, delivery: Any) -> None:
    """The model is not asked until then; then it sees the one message, and no other is made."""
    async with opened([[Say("Here you are.")]]) as (house, client):
        session = await client.create(opened.new)
        receipt = await client.prompt(session.id, "later", id="msg_later", delivery=delivery, resume=False)
        await client.result(session.id)  # a run that only admits has ended, if there was one
        assert (receipt.id, receipt.promoted_seq) == ("msg_later", None)
        assert await client.messages(session.id) == []
        assert house.provider.requests == []
        assert await _wakes(house, session.id) == [False]

        assert (await client.resume(session.id)).outcome == "done"
        types = await house.types(session.id)
        messages = await client.messages(session.id)
        assert await client.open_queue(session.id) is None
    assert [message.id for message in messages[:1]] == ["msg_later"]
    assert [message.type for message in messages] == ["user", "assistant"]
    assert types.count("session.next.prompt.admitted.1") == types.count("session.next.prompted.1") == 1
    assert len(house.provider.requests) == 1


@pytest.mark.conformance("INB-10")
@pytest.mark.parametrize("lost", [True, False])
async def test_a_repeated_prompt_wakes_a_session_whose_wake_was_lost(opened: Opened, lost: bool) -> None:
    """The input was admitted, and its caller died before anybody was told, or had only wanted it recorded."""
    async with opened([[Say("Here you are.")]]) as (house, client):
        session = await client.create(opened.new)
        await house.services.database.transact(
            lambda conn: inbox.admit(conn, session.id, "msg_one", Prompt(text="hello"), "steer", resume=lost)
        )
        assert await client.open_queue(session.id) is None

        receipt = await client.prompt(session.id, "hello", id="msg_one")
        assert (await client.result(session.id)).outcome == "done"
        types = await house.types(session.id)
        messages = await client.messages(session.id)
        again = await client.prompt(session.id, "hello", id="msg_one")
    assert receipt.admitted_seq == again.admitted_seq == 1
    assert again.promoted_seq == 2
    assert types.count("session.next.prompt.admitted.1") == 1
    assert [message.type for message in messages] == ["user", "assistant"]


async def test_a_repeat_of_an_answered_prompt_starts_no_run(opened: Opened) -> None:
    """It would find nothing, and hide how the turn ended. What still waits is run: the repeat is that next call."""
    async with opened([[Say("one")], [Say("two")]]) as (_, client):
        session = await client.create(opened.new)
        first = await client.prompt(session.id, "hello", id="msg_one")
        ended = await client.result(session.id)

        again = await client.prompt(session.id, "hello", id="msg_one")
        with pytest.raises(PromptConflictError):
            await client.prompt(session.id, "something else", id="msg_one")
        assert await client.result(session.id) == ended
        await client.prompt(session.id, "later", resume=False)
        await client.prompt(session.id, "hello", id="msg_one")
        await client.result(session.id)
        messages = await client.messages(session.id)
    assert (ended.outcome, again.admitted_seq) == ("done", first.admitted_seq)
    assert [message.type for message in messages] == ["user", "assistant"] * 2


async def test_steering_and_queueing_have_doors_of_their_own(opened: Opened) -> None:
    """A steer joins the running turn, a queued input waits for its end."""
    gate = Gate()
    async with opened([[Say("a"), Pause(gate)], [Say("b")], [Say("c")]]) as (_, client):
        session = await client.create(opened.new)
        await client.steer(session.id, "first")
        await gate.reached()
        queued = await client.queue(session.id, "last", id="msg_last")
        steered = await client.steer(session.id, "second")
        gate.release()
        await client.result(session.id)
        texts = _texts(await client.messages(session.id))

    assert (queued.delivery, steered.delivery) == ("queue", "steer")
    assert texts == ["first", "second", "last"]


async def test_large_prompts_are_refused_and_large_attachments_are_not(opened: Opened) -> None:
    """Text has a limit that Temporal can carry; attachments may be larger, and are there when the model is asked."""
    image = FileAttachment(uri="data:image/png;base64," + "A" * 3_000_000, name="large.png")
    async with opened([[Say("I see.")]]) as (house, client):
        session = await client.create(opened.new)
        with pytest.raises(InvalidInputError, match="more than 1000000: attach a file instead"):
            await client.prompt(session.id, "x" * 1_000_001)
        huge = FileAttachment(uri="data:," + "x" * ATTACHMENT_BYTES)
        with pytest.raises(InvalidInputError, match="put the files into the session's directory"):
            await client.prompt(session.id, "look", files=[huge])
        for again in (False, True):
            receipt = await client.prompt(
                session.id, "look", id="msg_1", files=[image], agents=[AgentAttachment(name="x")]
            )
            assert (receipt.promoted_seq is not None) == again
            assert (await client.result(session.id)).outcome == "done"
        with pytest.raises(PromptConflictError):
            await client.prompt(session.id, "look again", id="msg_1", files=[image])
        with pytest.raises(NotFoundError):
            await client.prompt("ses_none", "look", files=[image])
        await client.prompt(session.id, "and this, later", files=[image], resume=False)
        [request] = house.provider.requests
        messages = await client.messages(session.id)
        assert await client.open_queue(session.id) is None
    assert image.uri in str(request)
    assert isinstance(messages[0], m.UserMessage)
    assert [file.mime for file in messages[0].files or ()] == ["image/png"]
    assert len(messages) == 2


async def test_messages_and_events_are_read_in_every_way(opened: Opened) -> None:
    """Pages, one by its id, the context, the history; and unknown sessions are refused by all."""
    async with opened([[Say("one")], [Say("two")]]) as (house, client):
        session = await client.create(opened.new)
        for words in ("first", "second"):
            await client.prompt(session.id, words)
            await client.result(session.id)
        every = await client.messages(session.id)
        newest = await client.message_page(session.id, limit=3)
        oldest = await client.message_page(session.id, limit=3, cursor=newest.next)
        assert [*newest.items, *oldest.items] == every[::-1]
        assert await client.message(session.id, every[0].id) == every[0]
        assert await client.context(session.id) == every
        page = await client.history(session.id, limit=2)
        rest = await client.history(session.id, page.events[-1].seq, 100)
        assert [event.type for event in (*page.events, *rest.events)] == await house.types(session.id)
        assert (page.has_more, rest.has_more) == (True, False)
        assert {event.location.directory for event in rest.events if event.location} == {str(opened.directory)}

        for ask in (
            client.messages,
            client.message_page,
            client.context,
            client.history,
            client.archive,
            client.delete,
        ):
            with pytest.raises(NotFoundError):
                await ask("ses_none")
        with pytest.raises(MessageNotFoundError):
            await client.message(session.id, "msg_none")


async def test_durable_events_of_all_sessions_are_watched(opened: Opened) -> None:
    """A dashboard, say: told of every settled step, whatever its session."""
    async with opened([[Say("one")], [Say("two")]]) as (_, client):
        sessions = [await client.create(opened.new) for _ in range(2)]
        async with aclosing(client.watch(types=["session.next.step.ended", "session.next.agent.switched"])) as events:
            coming = asyncio.ensure_future(anext(events))
            found: set[asyncio.Future[StoredEvent]] = set()
            flip = 0
            while not found:  # until the watcher is there
                flip += 1
                await client.switch_agent(sessions[0].id, ("plan", "build")[flip % 2])
                found, _ = await asyncio.wait({coming}, timeout=0.1)
            for session in sessions:
                await client.prompt(session.id, "hello")
            seen: list[str] = []
            while len(seen) < 2:
                event = await anext(events)
                if event.type == "session.next.step.ended.2":
                    seen.append(event.session_id)
    assert sorted(seen) == sorted(session.id for session in sessions)


async def test_switches_hold_for_the_next_turn(opened: Opened) -> None:
    """The model is asked by the name that the session has now."""
    async with opened([[Say("one")], [Say("two")]]) as (house, client):
        session = await client.create(opened.new)
        await client.prompt(session.id, "hello")
        await client.result(session.id)
        switched = await client.switch_model(session.id, ModelRef(id="other-model", provider_id="scripted"))
        await client.switch_agent(session.id, "plan")
        await client.prompt(session.id, "hello again")
        await client.result(session.id)
        answers = [message for message in await client.messages(session.id) if isinstance(message, m.AssistantMessage)]
        types = [message.type for message in await client.messages(session.id)]

    assert str(switched.model) == "scripted/other-model"
    assert [(str(answer.model), answer.agent) for answer in answers] == [
        ("scripted/test-model", "build"),
        ("scripted/other-model", "plan"),
    ]
    assert types == ["user", "assistant", "model-switched", "agent-switched", "user", "assistant"]
    assert len(house.provider.requests) == 2


async def test_sessions_are_listed_archived_and_deleted(opened: Opened) -> None:
    """One at work is not deleted; a deleted one is unknown to every call, and its id free."""
    gate = Gate()
    async with opened([[Say("a"), Pause(gate)], [Say("b")]]) as (house, client):
        first, second = [await client.create(opened.new) for _ in range(2)]
        page = await client.list(directory=str(opened.directory), order="asc")
        assert {session.id for session in page.items} == {first.id, second.id}
        await client.archive(second.id)
        assert [session.id for session in (await client.list()).items] == [first.id]
        assert [session.id for session in (await client.list(archived=True)).items] == [second.id]

        await client.prompt(first.id, "hello")
        await gate.reached()
        with pytest.raises(ClaimRefusedError, match="interrupt it"):
            await client.delete(first.id)
        await client.interrupt(first.id)
        await client.result(first.id)
        await client.delete(first.id)
        for ask in (client.get, client.resume, client.interrupt, client.delete):
            with pytest.raises(NotFoundError):
                await ask(first.id)
        assert await client.head(first.id) == -1
        assert all(rows == [] for rows in (await StoreKit(house.services.database).everything(first.id)).values())
        again = await client.create(opened.new, first.id)
        await client.prompt(again.id, "hello")
        assert (await client.result(again.id)).outcome == "done"


async def test_one_client_serves_many_callers_at_once(opened: Opened) -> None:
    """More readers and writers than the pool has connections, on one listening connection."""
    async with opened([[Say(str(n))] for n in range(8)]) as (_, client):

        async def one(n: int) -> list[str]:
            session = await client.create(opened.new)
            types: list[str] = []
            async with aclosing(client.events(session.id)) as events:
                await client.prompt(session.id, f"hello {n}", id=fresh_id("msg"))
                async for event in events:
                    if isinstance(event, StoredEvent):
                        types.append(event.type)
                        if event.type.startswith("session.next.step.ended"):
                            return types
            return types

        found = await asyncio.gather(*map(one, range(8)))
        assert client._listener.subscriptions == 0
    assert all(types[0] == "session.created.1" for types in found)
    assert all(types[-1] == "session.next.step.ended.2" for types in found)


async def test_the_example_runs(opened: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is in the repository."""
    spec = importlib.util.spec_from_file_location("example_client", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (opened.directory / "README.md").write_text("About herons.\n")
    replies: list[list[Action]] = [
        [Say("I will look."), CallTool("read", {"path": "README.md"})],
        [Say("It is "), Say("about herons.")],
    ]
    async with opened(replies) as (house, _):
        await example.main(house.services.settings, str(opened.directory), house.services.environ)

    shown = capsys.readouterr().out
    assert shown.startswith("I will look.\n[read]\nIt is about herons.\nses_")
    assert ": done, " in shown
