"""The client: what a program does with sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client as TemporalClient

from fencepost.client import Client, open_client
from fencepost.domain.contracts import SessionInput
from fencepost.domain.errors import (
    ConfigurationError,
    DirectoryError,
    InvalidInputError,
    NotFoundError,
    PromptConflictError,
    SchemaVersionError,
    UnavailableError,
)
from fencepost.domain.ids import fresh_id, is_session_id
from fencepost.domain.inbox import Location
from fencepost.providers.script import Action, Gate, Pause, Say
from fencepost.store.readers import Delta
from fencepost.store.sessions import NewSession
from tests.house_kit import House, house_settings, open_house


class Opened:
    """Opens a house and a client of it."""

    def __init__(self, database_url: str, temporal_client: TemporalClient, task_queue: str, directory: Path) -> None:
        self._given = (database_url, temporal_client, task_queue, directory)
        self.directory = directory

    @property
    def new(self) -> NewSession:
        """A session in the house's directory."""
        return NewSession(Location(directory=str(self.directory)))

    @asynccontextmanager
    async def __call__(
        self, replies: Sequence[Sequence[Action]] = (), **options: Any
    ) -> AsyncIterator[tuple[House, Client]]:
        """Give both."""
        async with (
            open_house(*self._given, replies, **options) as house,
            open_client(house.services.settings, house.services.environ) as client,
        ):
            yield house, client


@pytest.fixture
def opened(database_url: str, temporal_client: TemporalClient, task_queue: str, tmp_path: Path) -> Opened:
    """A house and a client, to be opened with what the model says."""
    return Opened(database_url, temporal_client, task_queue, tmp_path)


@pytest.mark.conformance("CRE-01")
async def test_each_creation_without_an_id_is_a_session_of_its_own(opened: Opened) -> None:
    """Two calls, also at once, give two sessions; what is sent to one is no part of the other."""
    async with opened([[Say("Only here.")]]) as (house, client):
        first, second = await asyncio.gather(client.create(opened.new), client.create(opened.new))
        await client.prompt(first.id, "Hello.")
        await client.result(first.id)

        assert first.id != second.id
        assert is_session_id(first.id)
        assert is_session_id(second.id)
        for session in (first, second):
            log = await house.events(session.id)
            assert [event.seq for event in log if event.type == "session.created.1"] == [0]
        assert [message.type for message in await client.messages(first.id)] == ["user", "assistant"]
        assert await client.messages(second.id) == []


async def test_a_prompt_is_followed_to_its_result(opened: Opened) -> None:
    """Create, prompt, the same again while it is answered, events with every piece of text once, result, messages."""
    gate = Gate()
    async with opened([[Say("Hello there, "), Pause(gate), Say("sailor.")]]) as (_, client):
        session = await client.create(opened.new)
        receipt = await client.prompt(session.id, "Say hello", id="msg_one")
        await gate.reached()
        again = await client.prompt(session.id, "Say hello", id="msg_one")
        gate.release()
        result = await client.result(session.id)
        head = await client.head(session.id)
        text = ""
        async with aclosing(client.events(session.id)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                elif event.seq == head:
                    break
        messages = await client.messages(session.id)
        idle = await client.status(session.id)

    assert (receipt.id, again.admitted_seq) == ("msg_one", receipt.admitted_seq)
    assert (result.outcome, text) == ("done", "Hello there, sailor.")
    assert [message.type for message in messages] == ["user", "assistant"]
    assert idle.phase == "idle"


async def test_a_running_turn_is_seen_and_interrupted(opened: Opened) -> None:
    """Its text stays; afterwards there is nothing to interrupt, and a resume runs one step."""
    gate = Gate()
    async with opened([[Say("Half a "), Pause(gate)], [Say("Whole.")]]) as (_, client):
        session = await client.create(opened.new)
        await client.prompt(session.id, "Go")
        await gate.reached()
        busy, queue = await client.status(session.id), await client.open_queue(session.id)
        assert await client.interrupt(session.id, "enough")
        result = await client.result(session.id)
        late = await client.interrupt(session.id)
        resumed = await client.resume(session.id)

    assert (busy.phase, queue) == ("busy", client.settings.task_queue)
    assert result.outcome == "interrupted"
    assert late is False
    assert resumed.outcome == "done"


async def test_what_cannot_be_done_is_said(opened: Opened) -> None:
    """Each with its own error, also what a worker refuses."""
    async with opened([[Say("one")], [Say("two")]]) as (_, client):
        for ask in (client.get, client.messages, client.result, client.resume):
            with pytest.raises(NotFoundError, match="no session ses_none"):
                await ask("ses_none")
        with pytest.raises(NotFoundError):
            await client.prompt("ses_none", "hello")
        with pytest.raises(InvalidInputError, match="is no session id"):
            await client.create(opened.new, "bad id")
        session = await client.create(opened.new)
        with pytest.raises(InvalidInputError, match="must not be blank"):
            await client.prompt(session.id, "  ")
        await client.prompt(session.id, "one", id="msg_one", resume=False)
        with pytest.raises(PromptConflictError):
            await client.prompt(session.id, "another", id="msg_one")
        nowhere = SessionInput(location=Location(directory="/no/such/place"))
        with pytest.raises(DirectoryError, match="create it first"):
            await client.prompt(fresh_id("ses"), "hello", session=nowhere)


async def test_a_session_that_never_ran_is_idle(opened: Opened) -> None:
    """Neither its result nor its status fails."""
    async with opened() as (_, client):
        session = await client.create(opened.new)

        assert (await client.result(session.id)).outcome == "idle"
        assert (await client.status(session.id)).phase == "idle"
        assert await client.open_queue(session.id) is None


async def test_a_run_that_was_ended_from_outside_counts_as_interrupted(opened: Opened) -> None:
    """By the Temporal UI, say."""
    first, second = Gate(), Gate()
    async with opened([[Say("a"), Pause(first)], [Say("b"), Pause(second)]]) as (house, client):
        outcomes = []
        for gate, act in ((first, "cancel"), (second, "terminate")):
            session = await client.create(opened.new)
            await client.prompt(session.id, "Go")
            await gate.reached()
            await getattr(house.client.get_workflow_handle(session.id), act)()
            outcomes.append((await client.result(session.id)).outcome)

    assert outcomes == ["interrupted", "interrupted"]


async def test_it_knows_whether_a_worker_is_there(opened: Opened) -> None:
    """By what the server has seen of the task queue."""
    async with opened(serve=False) as (_, client):
        assert not await client.is_served()
    async with opened([[Say("hi")]]) as (_, client):
        session = await client.create(opened.new)
        await client.prompt(session.id, "hello")
        await client.result(session.id)
        assert await client.is_served()


async def test_it_does_not_open_without_its_services(
    empty_database_url: str, temporal_address: str, tmp_path: Path
) -> None:
    """Each in one line that says what to do."""
    settings = house_settings(empty_database_url, "unused", tmp_path, "http://127.0.0.1:9/v1")
    with pytest.raises(SchemaVersionError, match="run `fencepost db upgrade`"):
        async with open_client(settings, {"TEMPORAL_ADDRESS": temporal_address}):
            pass
    with pytest.raises(ConfigurationError, match="set FENCEPOST_DATABASE_URL"):
        async with open_client(settings.model_copy(update={"database_url": None}), {}):
            pass
    away = settings.model_copy(update={"database_url": "postgresql+asyncpg://u@127.0.0.1:9/x"})
    with pytest.raises(UnavailableError, match=r"PostgreSQL at 127\.0\.0\.1:9/x"):
        async with open_client(away, {}):
            pass
