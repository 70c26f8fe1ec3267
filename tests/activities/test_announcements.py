"""What readers are told, and when: after the commit, of what was committed, and by the owner alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError

from activities.inbox import InboxActivities
from activities.model import ModelActivities
from activities.ownership import OwnershipActivities
from activities.publisher import StepPublisher
from fencepost.domain import stream as s
from fencepost.domain.contracts import AdmitInput, Plan, PromptInput, StreamInput
from fencepost.domain.errors import OwnershipLostError, UnavailableError
from fencepost.domain.ids import fresh_id
from fencepost.services import Services
from fencepost.store import event_log
from fencepost.store.engine import Database
from fencepost.store.live import Announcer, Notice, channel_of, listen_url
from tests.house_kit import house_settings
from tests.store.kit import MODEL, StoreKit, Work, token_of


@dataclass
class Ear:
    """Hears everything that is announced of one session."""

    announcer: Announcer
    session_id: str
    heard: asyncio.Queue[Notice]
    connection: asyncpg.Connection[Any]

    async def next(self) -> Notice:
        """Wait for the next notice."""
        return await self.heard.get()

    async def silent(self) -> bool:
        """Say whether nothing was announced up to now: a mark that is sent now is the first to come."""
        mark = Notice(-2, "mark", text=fresh_id("msg"))
        self.announcer.send(self.session_id, mark)
        return await self.next() == mark


@dataclass
class Told:
    """Services over the shared store, with an ear for one session."""

    store: StoreKit
    services: Services
    session_id: str
    ear: Ear

    async def admit(self, text: str = "hello", input_id: str | None = None) -> Any:
        """Admit one input as a signal or update does."""
        given = PromptInput(text=text)
        letter = AdmitInput(session_id=self.session_id, input_id=input_id or fresh_id("msg"), prompt=given)
        ownership, models = OwnershipActivities(self.services), ModelActivities(self.services)
        return await InboxActivities(self.services, ownership, models).admit_input(letter)

    def publisher(self, work: Work, trusted: Callable[[], bool] = lambda: True) -> StepPublisher:
        """Give the publisher of a step's stream."""
        given = StreamInput(
            token=work.token,
            step=1,
            attempt=1,
            assistant_message_id=work.message_id,
            plan=Plan(agent="build", model=MODEL),
        )
        return StepPublisher(self.services, given, announce=lambda call: None, trusted=trusted)


@pytest.fixture
async def told(store: StoreKit, tmp_path: Path) -> AsyncIterator[Told]:
    """A new session whose channel is listened to."""
    session_id = await store.new_session()
    announcer = Announcer(store.database)
    await announcer.start()
    connection = await asyncpg.connect(listen_url(store.database.url))
    heard: asyncio.Queue[Notice] = asyncio.Queue()
    await connection.add_listener(
        channel_of(session_id), lambda *given: heard.put_nowait(Notice.decode(str(given[-1])))
    )
    nothing: Any = None
    services = Services(
        settings=house_settings(
            "postgresql://nowhere/none", "none", tmp_path, "http://nowhere", limits={"live_seconds": 0}
        ),
        database=store.database,
        temporal=nothing,
        http=nothing,
        catalog=nothing,
        registry=nothing,
        runner=nothing,
        announcer=announcer,
        environ={},
    )
    yield Told(store, services, session_id, Ear(announcer, session_id, heard, connection))
    await connection.close()
    await announcer.close()


@pytest.mark.conformance("LOG-10")
async def test_nothing_is_announced_before_its_commit(told: Told) -> None:
    """An admission and a stream's part that wait for the log's lock: silence, then both are told of."""
    work = await told.store.begin(told.session_id)
    publisher = told.publisher(work)
    async with told.store.database.begin() as gate:
        await event_log.lock(gate, told.session_id)
        admitting = asyncio.create_task(told.admit())
        await told.store.waiting(1)
        publisher.take(s.TextStart("t1"))
        publisher.take(s.TextDelta("t1", "Hello"))
        await told.store.waiting(2)
        assert await told.ear.silent()
        head = (await told.store.events(told.session_id))[-1].seq
    receipt = await admitting
    await publisher.durable()

    notices = [await told.ear.next() for _ in range(3)]
    async with told.store.database.read() as conn:
        latest = await event_log.latest(conn, told.session_id)
    assert receipt.admitted_seq > head
    assert {notice.seq for notice in notices} >= {Notice.look().seq}
    durable = [notice.seq for notice in notices if notice.seq != Notice.look().seq]
    assert all(head < seq <= latest for seq in durable)
    assert [notice.text for notice in notices if notice.message_id] == ["Hello"]
    await publisher.close_parts()


@pytest.mark.conformance("LOG-12")
async def test_an_append_that_fails_is_not_announced(told: Told) -> None:
    """A conflicting admission, and a stream whose step is not its own any more."""
    work = await told.store.begin(told.session_id)
    taken = await told.store.admit(told.session_id, "one thing")
    with pytest.raises(ApplicationError, match="stands for something else"):
        await told.admit("another thing", taken.receipt.id)
    assert await told.ear.silent()

    publisher = told.publisher(work)
    await told.store.claim(token_of(told.session_id, "run-2"), owner_run="closed", force=True)
    publisher.take(s.TextStart("t1"))
    publisher.take(s.TextDelta("t1", "Hello"))
    with pytest.raises(OwnershipLostError):
        await publisher.durable()
    assert await told.ear.silent()
    await told.admit("fine")
    assert await told.ear.next() == Notice.look()


@pytest.mark.conformance("LOG-11")
async def test_a_channel_that_cannot_be_reached_undoes_and_delays_nothing(told: Told) -> None:
    """Admissions and a stream go on as ever; what they would have told is dropped."""
    broken = Announcer(Database("postgresql://nobody@127.0.0.1:9/none", pool_size=1))
    await broken.start()
    told.services = replace(told.services, announcer=broken)
    work = await told.store.begin(told.session_id)
    publisher = told.publisher(work)
    publisher.take(s.TextStart("t1"))
    for n in range(3):
        publisher.take(s.TextDelta("t1", f"{n} "))
        await told.admit(str(n))
        with pytest.raises(UnavailableError):
            await broken._database.ping()
    await publisher.close_parts()

    types = await told.store.types(told.session_id)
    assert types.count("prompt.admitted") == 4
    assert types.count("text.ended") == 1
    assert await told.ear.silent()
    await broken.close()


@pytest.mark.conformance("LOG-15")
async def test_a_worker_that_may_have_lost_its_session_shows_no_more_text(told: Told) -> None:
    """The part had begun while it owned the session, and what it streamed then was shown."""
    work = await told.store.begin(told.session_id)
    trust = {"owner"}
    publisher = told.publisher(work, lambda: bool(trust))
    publisher.take(s.TextStart("t1"))
    await publisher.durable()
    publisher.take(s.TextDelta("t1", "Hello"))
    assert (await told.ear.next()).message_id == ""
    assert (await told.ear.next()).text == "Hello"

    await told.store.claim(token_of(told.session_id, "run-2"), owner_run="closed", force=True)
    trust.clear()
    publisher.take(s.TextDelta("t1", " and more"))
    publisher.take(s.TextEnd("t1"))
    with pytest.raises(OwnershipLostError):
        await publisher.durable()
    assert await told.ear.silent()
    assert "Hello and more" not in str(await told.store.everything(told.session_id))
