"""What happens to a session besides its turns: creation, switches, archiving, deletion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asyncpg import CheckViolationError
from sqlalchemy import text

from fencepost import __version__
from fencepost.domain import events
from fencepost.domain import messages as m
from fencepost.domain.errors import ClaimRefusedError, NotFoundError, OwnershipLostError
from fencepost.domain.ids import derived_id, fresh_id, is_session_id
from fencepost.domain.inbox import Location
from fencepost.domain.models import ModelRef
from fencepost.store import event_log, sessions, tables
from fencepost.store.sessions import NewSession, Session
from tests.store.kit import StoreKit

WANTED = NewSession(
    Location(directory="/work", workspace_id="wrk_1"),
    agent="plan",
    model=ModelRef(id="gpt", provider_id="openai", variant="slow"),
    title="A title",
)
OTHER = NewSession(Location(directory="/other"), agent="build", model=ModelRef.parse("other/model"), title="Another")


async def _get(store: StoreKit, session_id: str) -> Session:
    async with store.database.read() as conn:
        return await sessions.get(conn, session_id)


@pytest.mark.conformance("CRE-03")
async def test_what_is_said_at_creation_is_stored_and_stays(store: StoreKit) -> None:
    """Agent, model with variant, place and title, through a whole turn."""
    session_id = fresh_id("ses")
    made = await store.do(sessions.create, session_id, WANTED)
    work = await store.begin(session_id)
    await work.say("hello")
    await work.settle()

    for session in (made, await _get(store, session_id)):
        assert (session.id, session.title, session.location) == (session_id, "A title", WANTED.location)
        assert (session.agent, session.model) == ("plan", WANTED.model)
    row = await store.row(tables.session, session_id)
    assert (row["project_id"], row["version"]) == (derived_id("prj", "/work"), __version__)
    assert row["model"] == {"id": "gpt", "providerID": "openai", "variant": "slow"}


@pytest.mark.conformance("CRE-04")
@pytest.mark.parametrize("worked_with", [False, True])
async def test_other_arguments_do_not_change_a_session(store: StoreKit, worked_with: bool) -> None:
    """They are ignored, whatever has happened to it since."""
    session_id = fresh_id("ses")
    await store.do(sessions.create, session_id, WANTED)
    if worked_with:
        await store.begin(session_id)
    before, session = await store.everything(session_id), await _get(store, session_id)

    assert await store.do(sessions.create, session_id, OTHER) == session
    assert await store.everything(session_id) == before


@pytest.mark.conformance("CRE-06")
async def test_reading_a_session_shows_its_latest_updates(store: StoreKit) -> None:
    """Switches, a move, and what its steps cost; reading it by creating it again, too."""
    session_id = fresh_id("ses")
    await store.do(sessions.create, session_id, WANTED)
    await store.do(sessions.switch_agent, session_id, "build")
    await store.do(sessions.switch_model, session_id, ModelRef.parse("other/model"))
    here = Location(directory="/there")
    await store.append(session_id, events.Moved(timestamp=1, session_id=session_id, location=here))
    work = await store.begin(session_id)
    await work.say("hello")
    await work.settle()

    session = await _get(store, session_id)
    assert (session.agent, session.model, session.location) == ("build", ModelRef.parse("other/model"), here)
    assert (session.cost, session.tokens.input, session.tokens.output) == (0.5, 3, 5)
    assert session.title == "A title"
    assert await store.do(sessions.create, session_id, WANTED) == session


@pytest.mark.conformance("CRE-07")
@pytest.mark.parametrize("session_id", [None, "ses_of_the_caller"])
async def test_creation_is_an_event_with_a_projection(store: StoreKit, session_id: str | None) -> None:
    """Of the existing kind, at sequence 0, also with an id of the caller's."""
    wanted = session_id or fresh_id("ses")
    session = await store.do(sessions.create, wanted, WANTED)

    [created] = await store.events(session.id)
    assert (created.type, created.seq, created.session_id) == ("session.created.1", 0, wanted)
    row = await store.row(tables.session, session.id)
    assert created.data == {
        "timestamp": row["time_created"],
        "sessionID": wanted,
        "info": {
            "id": wanted,
            "projectID": row["project_id"],
            "workspaceID": "wrk_1",
            "slug": row["slug"],
            "directory": "/work",
            "title": "A title",
            "version": __version__,
            "agent": "plan",
            "model": {"id": "gpt", "providerID": "openai", "variant": "slow"},
            "timeCreated": row["time_created"],
            "timeUpdated": row["time_updated"],
        },
    }
    assert is_session_id(wanted)


@pytest.mark.conformance("CRE-10")
async def test_a_defect_while_a_creation_is_projected_is_not_hidden(store: StoreKit) -> None:
    """It comes out as it is, and nothing of the session stays; without the defect the same creation works."""
    session_id = fresh_id("ses")
    async with store.database.begin() as conn:
        await conn.execute(text(f"ALTER TABLE session ADD CONSTRAINT defect CHECK (id <> '{session_id}')"))
    try:
        with pytest.raises(CheckViolationError, match="defect"):
            await store.do(sessions.create, session_id, WANTED)
        assert all(rows == [] for rows in (await store.everything(session_id)).values())
        with pytest.raises(NotFoundError):
            await _get(store, session_id)
    finally:
        async with store.database.begin() as conn:
            await conn.execute(text("ALTER TABLE session DROP CONSTRAINT defect"))
    assert (await store.do(sessions.create, session_id, WANTED)).id == session_id


@pytest.mark.conformance("CRE-12")
async def test_the_agent_is_switched(store: StoreKit, session_id: str) -> None:
    """By an event that shows in the transcript; the same one again changes nothing."""
    switched = await store.do(sessions.switch_agent, session_id, "plan")
    assert await store.do(sessions.switch_agent, session_id, "plan") == switched
    assert (switched.agent, (await _get(store, session_id)).agent) == ("plan", "plan")

    assert await store.types(session_id) == ["agent.switched"]
    [message] = await store.messages(session_id)
    assert isinstance(message, m.AgentSwitched)
    assert message.agent == "plan"
    with pytest.raises(NotFoundError, match="ses_none"):
        await store.do(sessions.switch_agent, "ses_none", "plan")
    assert await store.events("ses_none") == []


@pytest.mark.conformance("CRE-13")
async def test_the_model_is_switched(store: StoreKit, session_id: str) -> None:
    """No change is no event, and no variant is the default one."""
    plain = ModelRef(id="m", provider_id="p")
    default, slow = (plain.model_copy(update={"variant": variant}) for variant in ("default", "slow"))
    stored = []
    for model in (plain, plain, default, slow, slow, default, plain):
        await store.do(sessions.switch_model, session_id, model)
        stored.append((await _get(store, session_id)).model)

    assert stored == [plain, plain, plain, slow, slow, default, default]
    assert await store.types(session_id) == ["model.switched"] * 3
    shown = [message.model for message in await store.messages(session_id) if isinstance(message, m.ModelSwitched)]
    assert shown == [plain, slow, default]
    with pytest.raises(NotFoundError, match="ses_none"):
        await store.do(sessions.switch_model, "ses_none", plain)
    assert await store.events("ses_none") == []


async def test_a_switch_may_come_while_a_turn_runs(store: StoreKit, session_id: str) -> None:
    """It waits for the log's lock like every append, and the work goes on."""
    work = await store.begin(session_id)
    await work.say("half")
    await asyncio.gather(*(store.do(sessions.switch_agent, session_id, agent) for agent in ("plan", "build")))
    await work.settle()

    types = await store.types(session_id)
    assert types.count("agent.switched") == 2
    assert types[-1] == "step.ended"


async def test_a_deleted_session_leaves_nothing(store: StoreKit, session_id: str) -> None:
    """Whatever rows it had; and its id makes a new session."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    await work.keep_live("x")
    await work.settle(work.failed(max_continuations=3))
    await store.admit(session_id, "pending")
    with pytest.raises(ClaimRefusedError, match="interrupt it"):
        await store.do(sessions.delete, session_id)
    full = await store.everything(session_id)
    assert {name for name, rows in full.items() if not rows} == {"todo", "live_part"}
    await store.expire(session_id)
    await store.do(sessions.delete, session_id)

    assert all(rows == [] for rows in (await store.everything(session_id)).values())
    with pytest.raises(NotFoundError):
        await store.do(sessions.delete, session_id)
    with pytest.raises(OwnershipLostError):
        await work.publish(events.TextStarted(**work.about, text_id="t1"))
    made = await store.do(sessions.create, session_id, OTHER)
    assert made.title == "Another"
    async with store.database.read() as conn:
        assert await event_log.latest(conn, session_id) == 0


async def test_an_archived_session_can_be_used(store: StoreKit, session_id: str) -> None:
    """It is only out of sight; an unknown one is refused."""
    assert (await store.do(sessions.archive, session_id)).time_archived is not None
    await store.begin(session_id)
    wrong: list[Any] = [sessions.archive, sessions.delete]
    for work in wrong:
        with pytest.raises(NotFoundError, match="ses_none"):
            await store.do(work, "ses_none")
