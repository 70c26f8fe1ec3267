"""Moving a session: what was begun for the old place is stale in the same transaction, and is owed at the new one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from fencepost.domain import events
from fencepost.domain.errors import InvalidInputError, NotFoundError, OwnershipLostError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.messages import AssistantMessage, FailedTool, SyntheticMessage, ToolPart
from fencepost.domain.ownership import OwnerRun
from fencepost.domain.projection import INTERRUPTED
from fencepost.store import moves, ownership, sessions, status, steps, tables
from fencepost.store.claims import AskAgainError, Seen
from fencepost.store.moves import Move
from fencepost.store.sessions import NewSession
from tests.store.kit import LEASE, USER_STOP, StoreKit, token_of

THERE = Location(directory="/there", workspace_id="far")


async def _move(
    store: StoreKit, session_id: str, location: Location = THERE, owner_run: OwnerRun | None = "open"
) -> Move:
    async with store.database.read() as conn:
        owner = await ownership.owner_of(conn, session_id)
    seen = Seen(owner, owner_run) if owner is not None and owner_run is not None else None
    return await store.do(moves.move, session_id, location, seen)


async def test_an_idle_session_is_moved_once(store: StoreKit, session_id: str) -> None:
    """One event; the same place again is none."""
    first, second = await _move(store, session_id), await _move(store, session_id)

    assert (first.moved, first.fenced, first.owed) == (True, None, False)
    assert (second.moved, second.session) == (False, first.session)
    assert await store.types(session_id) == ["moved"]
    assert first.session.location == THERE
    assert (await store.events(session_id))[-1].location == THERE


async def test_a_location_without_a_workspace_takes_it_away(store: StoreKit, session_id: str) -> None:
    """A location is replaced as a whole."""
    await _move(store, session_id)
    back = await _move(store, session_id, Location(directory="/there"))

    assert back.moved
    assert (await store.row(tables.session, session_id))["workspace_id"] is None


@pytest.mark.conformance("MOV-03")
@pytest.mark.parametrize(
    ("directory", "path"),
    [("/repo/app/web", "app/web"), ("/repo", None), ("/reposhop", None), ("/", None), ("/repo/../etc", None)],
)
async def test_the_path_is_seen_from_the_root_of_the_project(store: StoreKit, directory: str, path: str | None) -> None:
    """A nested directory is named from the project's root; the root itself, and what is outside, have none."""
    session_id = fresh_id("ses")
    await store.do(sessions.create, session_id, NewSession(Location(directory="/repo")))
    await _move(store, session_id)
    await _move(store, session_id, Location(directory=directory))

    row = await store.row(tables.session, session_id)
    assert (row["directory"], row["path"]) == (directory, path)
    assert "subdirectory" not in (await store.events(session_id))[-1].data or path is not None


@pytest.mark.conformance("RUN-09")
async def test_a_step_that_was_planned_for_the_old_place_makes_no_request(store: StoreKit, session_id: str) -> None:
    """What came since waits in the inbox, and is promoted by a step of the new place."""
    await store.admit(session_id, "first")
    token = token_of(session_id)
    await store.claim(token)
    await store.prepare(token)
    await store.admit(session_id, "second")
    moved = await _move(store, session_id)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError):
        await store.do(steps.request, token, 1, 1, LEASE)
    assert await store.everything(session_id) == before
    assert (moved.fenced, moved.owed) == (token.execution_id, True)
    assert [row["promoted_seq"] is None for row in await store.rows(tables.session_input, session_id)].count(True) == 1
    again = token_of(session_id, ordinal=2)
    assert (await store.claim(again)).held
    prepared = await store.prepare(again)
    assert (prepared.promoted, prepared.continued) == (1, True)
    assert [kind for kind in await store.types(session_id) if kind != "context.updated"] == [
        "prompt.admitted", "prompted", "prompt.admitted", "step.interrupted", "moved", "synthetic", "prompted",
    ]  # fmt: skip
    [told] = [m for m in await store.messages(session_id) if isinstance(m, SyntheticMessage)]
    assert "moved to another directory" in told.text


async def test_a_claim_without_a_step_in_hand_is_left_alone(store: StoreKit, session_id: str) -> None:
    """It has been told no place yet: its first step is planned for the new one."""
    await store.admit(session_id)
    token = token_of(session_id)
    await store.claim(token)
    moved = await _move(store, session_id, owner_run=None)

    assert (moved.moved, moved.fenced) == (True, None)
    await store.request(token)
    assert await store.types(session_id) == ["prompt.admitted", "moved", "prompted"]


@pytest.mark.conformance("MOV-01")
async def test_a_step_in_hand_is_settled_and_its_hands_write_nothing(store: StoreKit, session_id: str) -> None:
    """Its text stays, its tools fail as interrupted, one interruption says why, and one continuation is owed."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("started"), *work.called("planned"))
    await work.start_tool("started")
    await _move(store, session_id)
    before = await store.everything(session_id)

    for stale in (
        work.say("late"),
        work.start_tool("planned"),
        work.settle_tool("started"),
        work.settle(),
        work.keep_live("late"),
    ):
        with pytest.raises(OwnershipLostError):
            await stale
    assert await store.everything(session_id) == before
    message = await store.assistant(session_id)
    parts = [part.state for part in message.content if isinstance(part, ToolPart)]
    assert [state.error.message for state in parts if isinstance(state, FailedTool)] == [INTERRUPTED, INTERRUPTED]
    [stopped] = [e for e in await store.events(session_id) if e.type == events.StepInterrupted.stored_type()]
    assert (stopped.data["reason"], stopped.data["assistantMessageID"]) == ("moved", work.message_id)
    assert stopped.location == Location(directory="/work")
    [owed] = await store.rows(tables.session_recovery, session_id)
    assert (owed["phase"], owed["wake_pending"]) == ("pending", True)
    assert await store.rows(tables.session_execution, session_id) == []


async def test_moves_never_give_a_turn_up(store: StoreKit, session_id: str) -> None:
    """However often, each of them goes on."""
    await store.begin(session_id)
    for ordinal in range(2, 8):
        assert (await _move(store, session_id, Location(directory=f"/there/{ordinal}"))).owed
        token = token_of(session_id, ordinal=ordinal)
        assert (await store.claim(token)).held
        await store.request(token)


@pytest.mark.parametrize("owner_run", ["terminated", "cancelled"])
async def test_a_turn_that_was_stopped_at_temporal_stays_stopped(
    store: StoreKit, session_id: str, owner_run: OwnerRun
) -> None:
    """The move settles it, as the next claim would have."""
    await store.begin(session_id)
    moved = await _move(store, session_id, owner_run=owner_run)

    assert (moved.moved, moved.owed) == (True, False)
    assert await store.rows(tables.session_recovery, session_id) == []


async def test_a_turn_that_its_user_has_stopped_stays_stopped(store: StoreKit, session_id: str) -> None:
    """Between the interruption and the release there is nothing to fence, and nothing is owed."""
    work = await store.begin(session_id)
    await work.settle(USER_STOP)
    moved = await _move(store, session_id, owner_run=None)

    assert (moved.fenced, moved.owed) == (None, False)
    assert await store.release(work.token, interrupted=True) == "done"


async def test_of_a_session_at_work_temporal_has_to_be_asked_about_the_very_owner(
    store: StoreKit, session_id: str
) -> None:
    """An answer about another one, or none, changes nothing."""
    await store.begin(session_id)
    async with store.database.read() as conn:
        owner = await ownership.owner_of(conn, session_id)
    assert owner is not None
    await store.do(_rename_owner, session_id)
    for seen in (None, Seen(owner, "open")):
        with pytest.raises(AskAgainError):
            await store.do(moves.move, session_id, THERE, seen)
    assert "moved" not in await store.types(session_id)


async def _rename_owner(conn: Any, session_id: str) -> None:
    execution = tables.session_execution
    await conn.execute(update(execution).where(execution.c.session_id == session_id).values(owner_id="run-9"))


async def test_a_move_and_the_old_places_work_at_once(store: StoreKit) -> None:
    """Whoever is second: the step's settlement is there once, and so is the move."""
    for _ in range(10):
        session_id = await store.new_session()
        work = await store.begin(session_id)
        await work.say("Hello.")
        outcomes = await asyncio.gather(
            _move(store, session_id), work.settle(), work.publish(*work.called("c")), return_exceptions=True
        )
        assert not isinstance(outcomes[0], BaseException) or isinstance(outcomes[0], AskAgainError)
        ends = [t for t in await store.types(session_id) if t in ("step.ended", "step.interrupted")]
        assert len(ends) == 1
        message = await store.assistant(session_id)
        assert isinstance(message, AssistantMessage)
        assert message.time.completed is not None


async def test_what_cannot_be_moved(store: StoreKit) -> None:
    """An unknown session, and no location at all."""
    with pytest.raises(NotFoundError, match="no session ses_none"):
        await store.do(moves.move, "ses_none", THERE, None)
    for directory, workspace in (
        ("here", None),
        ("", None),
        ("/a\0b", None),
        ("/a\ud800", None),
        ("/a", "b\nc"),
        ("/a", ""),
    ):
        with pytest.raises(InvalidInputError) as caught:
            moves.checked(Location(directory=directory, workspace_id=workspace))
        assert "\n" not in caught.value.message


def test_a_location_has_one_spelling() -> None:
    """A slash too many is not another place; a line break in a name is a name."""
    for given in ("/repo/app/", "//repo/app", "/repo/./app", "/repo//app"):
        assert moves.checked(Location(directory=given)).directory == "/repo/app"
    assert moves.checked(Location(directory="/a\nb")).directory == "/a\nb"


async def test_a_call_that_no_worker_takes_is_seen_in_the_database(store: StoreKit, session_id: str) -> None:
    """After half a minute, and only where a workspace's workers are wanted."""
    await _move(store, session_id)
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("c"))

    async def doing() -> tuple[str, str | None]:
        async with store.database.read() as conn:
            found = (await status.activities(conn, [session_id]))[session_id]
        return found.state, found.reason

    assert await doing() == ("busy", None)
    await store.do(_age_calls, session_id)
    state, reason = await doing()
    assert state == "waiting"
    assert reason is not None
    assert reason.startswith("a tool call has waited 4")
    assert "workspace far" in reason
    await work.start_tool("c")
    assert await doing() == ("busy", None)


async def _age_calls(conn: Any, session_id: str) -> None:
    calls = tables.tool_call
    await conn.execute(
        update(calls).where(calls.c.session_id == session_id).values(time_updated=calls.c.time_updated - 40_000)
    )
