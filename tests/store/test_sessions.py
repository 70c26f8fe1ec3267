"""Creating and reading sessions."""

from __future__ import annotations

import asyncio

import pytest

from fencepost import __version__
from fencepost.domain.errors import NotFoundError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.models import ModelRef
from fencepost.store import sessions, tables
from fencepost.store.sessions import NewSession
from tests.store.kit import StoreKit

WANTED = NewSession(
    Location(directory="/work", workspace_id="wrk_1"), agent="plan", model=ModelRef.parse("openai/gpt"), title="A title"
)


@pytest.mark.conformance("CRE-02")
async def test_a_repeated_id_gives_the_session_that_exists(store: StoreKit) -> None:
    """With the same attributes or others: the first one stays, and nothing is written."""
    session_id = fresh_id("ses")
    first = await store.do(sessions.create, session_id, WANTED)
    before = await store.everything(session_id)

    assert await store.do(sessions.create, session_id, WANTED) == first
    assert await store.do(sessions.create, session_id, NewSession(Location(directory="/elsewhere"))) == first
    assert await store.everything(session_id) == before
    assert [event.type for event in await store.events(session_id)] == ["session.created.1"]


@pytest.mark.conformance("CRE-02")
@pytest.mark.parametrize("repetition", range(3))
async def test_simultaneous_creations_of_one_id_make_one_session(store: StoreKit, repetition: int) -> None:
    """Every caller gets the same one."""
    session_id = fresh_id("ses")
    made = await asyncio.gather(*(store.do(sessions.create, session_id, WANTED) for _ in range(8)))

    assert all(session == made[0] for session in made)
    assert len(await store.events(session_id)) == 1
    assert len(await store.rows(tables.session, session_id)) == 1


async def test_a_session_is_what_was_wanted(store: StoreKit) -> None:
    """Attributes that were not given are the configured default's, or none."""
    session_id = fresh_id("ses")
    made = await store.do(sessions.create, session_id, WANTED)
    plain = await store.do(sessions.create, fresh_id("ses"), NewSession(Location(directory="/work")))

    assert (made.id, made.title, made.location, made.agent, made.model) == (
        session_id,
        "A title",
        WANTED.location,
        "plan",
        WANTED.model,
    )
    assert (await store.row(tables.session, session_id))["version"] == __version__
    assert plain.title.startswith("New session - 20")
    assert plain.title.endswith("Z")
    assert (plain.agent, plain.model, plain.cost, plain.location.workspace_id) == (None, None, 0, None)
    [created] = await store.events(session_id)
    row = await store.row(tables.session, session_id)
    assert created.data["info"]["projectID"] == row["project_id"]
    assert created.data["timestamp"] == row["time_created"] == row["time_updated"]
    async with store.database.read() as conn:
        assert await sessions.get(conn, session_id) == made
        with pytest.raises(NotFoundError, match="ses_unknown"):
            await sessions.get(conn, "ses_unknown")
