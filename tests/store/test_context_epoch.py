"""The context epoch in the transaction that prepares a step: all of it happens, or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asyncpg import PostgresError
from sqlalchemy import text

from fencepost.domain import events
from fencepost.domain.errors import ContextSnapshotDecodeError, EventConflictError, OwnershipLostError
from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Location
from fencepost.domain.messages import SystemMessage
from fencepost.domain.ownership import Token
from fencepost.store import readers, rebuild, steps, tables
from fencepost.store.steps import Prepared
from tests.store.kit import LEASE, StoreKit, Work, token_of

EPOCH = tables.session_context_epoch
YESTERDAY = '{"value": "2020-02-29"}'


async def execute(store: StoreKit, statement: str, **values: Any) -> None:
    async with store.database.begin() as conn:
        await conn.execute(text(statement), values)


async def set_snapshot(store: StoreKit, session_id: str, snapshot: str) -> None:
    """Store this as what the model was told last."""
    statement = "UPDATE session_context_epoch SET snapshot = CAST(:snapshot AS jsonb) WHERE session_id = :id"
    await execute(store, statement, snapshot=snapshot, id=session_id)


async def let_a_day_pass(store: StoreKit, session_id: str) -> None:
    """Let the session have been told the date on an earlier day."""
    snapshot = (await store.row(EPOCH, session_id))["snapshot"]
    assert "session/date" in snapshot
    statement = """
        UPDATE session_context_epoch SET snapshot = jsonb_set(snapshot, '{session/date}', CAST(:entry AS jsonb))
        WHERE session_id = :id
    """
    await execute(store, statement, entry=YESTERDAY, id=session_id)


async def told(store: StoreKit, session_id: str) -> list[str]:
    """Give what the model was told of changes."""
    return [message.text for message in await store.messages(session_id) if isinstance(message, SystemMessage)]


async def a_turn_later(store: StoreKit, session_id: str) -> Work:
    """A turn is over, another input waits, and the lease has aged so that what comes next renews it."""
    work = await store.begin(session_id)
    await work.settle()
    await store.admit(session_id, "and then?")
    await execute(
        store, "UPDATE session_execution SET expires_at = expires_at - 30000 WHERE session_id = :id", id=session_id
    )
    return work


async def test_the_first_step_begins_the_epoch_and_says_nothing_else(store: StoreKit, session_id: str) -> None:
    """The baseline is all that the model is told, and the step's input comes after it."""
    admitted = (await store.admit(session_id)).receipt
    await store.claim_and_prepare(session_id)
    row = await store.row(EPOCH, session_id)

    assert row["baseline"].startswith("Working directory: /work\n\nToday's date: ")
    assert row["baseline_seq"] == admitted.admitted_seq
    assert row["snapshot"].keys() == {"session/environment", "session/date"}
    assert await store.types(session_id) == ["prompt.admitted", "prompted"]


async def test_a_step_that_is_not_due_begins_no_epoch(store: StoreKit, session_id: str) -> None:
    """Unless it is required: what is made of a tool's result has a context too."""
    token = token_of(session_id)
    await store.claim(token, force=True)
    await store.prepare(token)
    assert await store.rows(EPOCH, session_id) == []

    prepared = await store.do(steps.prepare, token, 2, queued=False, lease=LEASE, required=True)
    assert prepared.promoted == 0
    assert prepared.session is not None
    assert len(await store.rows(EPOCH, session_id)) == 1


async def test_an_unchanged_context_writes_nothing(store: StoreKit, session_id: str) -> None:
    work = await a_turn_later(store, session_id)
    before = await store.row(EPOCH, session_id)
    await store.prepare(work.token, 2)

    assert await store.row(EPOCH, session_id) == before
    assert await told(store, session_id) == []


async def test_a_change_comes_after_the_input_and_leaves_the_baseline(store: StoreKit, session_id: str) -> None:
    """One message for all that changed; the twin of its step and the step after it say nothing more."""
    work = await a_turn_later(store, session_id)
    before = await store.row(EPOCH, session_id)
    await let_a_day_pass(store, session_id)
    there = Location(directory="/there")
    await store.append(session_id, events.Moved(timestamp=7, session_id=session_id, location=there))
    await store.prepare(work.token, 2)
    await store.prepare(work.token, 2)
    after = await store.row(EPOCH, session_id)

    assert (await store.types(session_id))[-3:] == ["moved", "prompted", "context.updated"]
    assert (after["baseline"], after["baseline_seq"]) == (before["baseline"], before["baseline_seq"])
    assert after["snapshot"]["session/environment"] == {"value": {"directory": "/there"}}
    [text] = await told(store, session_id)
    assert text.startswith("The working directory has changed from /work to /there.\n\nToday's date is now ")
    await store.do(steps.prepare, work.token, 3, queued=False, lease=LEASE, required=True)
    assert await told(store, session_id) == [text]
    assert await store.do(rebuild.differences, session_id) == []


async def test_a_model_is_sent_the_baseline_and_what_changed_after_it(store: StoreKit, session_id: str) -> None:
    """Updates that the baseline has in it are left out, a compaction before or after them or none."""

    async def sent() -> tuple[bool, list[str]]:
        async with store.database.read() as conn:
            found = await readers.sent(conn, session_id)
            history = await readers.history(conn, session_id)
        assert [message.id for message in history] == [name for name, _ in found.messages]
        return found.baseline is not None, [message.type for message in history]

    def about(name: str) -> dict[str, Any]:
        return {"timestamp": 1, "session_id": session_id, "message_id": derived_id("msg", session_id, name)}

    def updated(name: str) -> events.ContextUpdated:
        return events.ContextUpdated(**about(name), text=name)

    assert await sent() == (False, [])
    await store.append(session_id, updated("early"))
    assert await sent() == (False, ["system"])
    work = await a_turn_later(store, session_id)
    assert await sent() == (True, ["user", "assistant"])
    await let_a_day_pass(store, session_id)
    await store.prepare(work.token, 2)
    assert await sent() == (True, ["user", "assistant", "user", "system"])
    await store.append(
        session_id, events.CompactionEnded(**about("sum"), reason="auto", text="so far", recent=""), updated("late")
    )
    assert await sent() == (True, ["system", "compaction", "system"])
    await execute(store, "DELETE FROM session_context_epoch WHERE session_id = :id", id=session_id)
    assert await sent() == (False, ["compaction", "system"])


async def test_a_value_that_its_source_cannot_read_begins_a_new_epoch(store: StoreKit, session_id: str) -> None:
    """What was told before is in the new baseline, so that its messages are not sent any more."""
    work = await a_turn_later(store, session_id)
    await let_a_day_pass(store, session_id)
    await store.prepare(work.token, 2)
    first = await store.row(EPOCH, session_id)
    await set_snapshot(store, session_id, '{"session/environment": {"value": 7}}')
    head = (await store.events(session_id))[-1].seq
    await store.do(steps.prepare, work.token, 3, queued=False, lease=LEASE, required=True)

    assert await store.row(EPOCH, session_id) == {**first, "baseline_seq": head}
    async with store.database.read() as conn:
        assert (await readers.history(conn, session_id))[-1].type == "user"
    assert len(await told(store, session_id)) == 1


async def test_a_rebuild_keeps_what_the_model_was_told(store: StoreKit, session_id: str) -> None:
    """The log does not hold it, so that it is neither compared nor replaced."""
    await a_turn_later(store, session_id)
    await let_a_day_pass(store, session_id)
    before = await store.row(EPOCH, session_id)
    await execute(store, "UPDATE session SET title = 'forged' WHERE id = :id", id=session_id)

    assert [one.table for one in await store.do(rebuild.rebuild, session_id)] == ["session"]
    assert await store.row(EPOCH, session_id) == before


# Ownership

FIRST, CHANGED = "begins", "changes"


async def _before_a_step(store: StoreKit, session_id: str, kind: str) -> tuple[Token, int]:
    """Give the token and number of a step that will promote input, and begin the epoch or change it."""
    if kind == FIRST:
        await store.admit(session_id)
        await store.claim(token_of(session_id))
        return token_of(session_id), 1
    work = await a_turn_later(store, session_id)
    await let_a_day_pass(store, session_id)
    return work.token, 2


@pytest.mark.conformance("REC-21", "REC-22")
@pytest.mark.parametrize("kind", [FIRST, CHANGED])
async def test_a_takeover_while_the_step_is_prepared_undoes_promotion_and_epoch(
    store: StoreKit, session_id: str, kind: str
) -> None:
    """The former owner waits for the row that is just being taken over, and finds that it has lost."""
    token, step = await _before_a_step(store, session_id, kind)
    await store.expire(session_id)
    successor = token_of(session_id, "run-2")
    async with store.database.begin() as conn:
        await conn.execute(
            text("UPDATE session_execution SET id = :execution, owner_id = :owner WHERE session_id = :id"),
            {"execution": successor.execution_id, "owner": successor.owner_id, "id": session_id},
        )
        stale = asyncio.create_task(store.prepare(token, step))
        await store.waiting(1)
        before = await store.everything(session_id)
    with pytest.raises(OwnershipLostError):
        await stale
    after = await store.everything(session_id)

    assert {name for name in after if after[name] != before[name]} == {"session_execution"}
    assert bool(after[EPOCH.name]) == (kind == CHANGED)
    assert [row["promoted_seq"] is None for row in after["session_input"]].count(True) == 1


@pytest.mark.conformance("REC-22")
async def test_only_the_successor_tells_the_model_of_a_change(store: StoreKit, session_id: str) -> None:
    """Once: whatever the former owner still does, before the successor's step and after it."""
    token, step = await _before_a_step(store, session_id, CHANGED)
    successor = token_of(session_id, "run-2")
    assert (await store.claim(successor, owner_run="closed", force=True)).held
    for _ in range(2):
        before = await store.everything(session_id)
        with pytest.raises(OwnershipLostError):
            await store.prepare(token, step)
        assert await store.everything(session_id) == before
        await store.prepare(successor)

    assert len(await told(store, session_id)) == 1
    assert (await store.types(session_id))[-2:] == ["prompted", "context.updated"]


@pytest.mark.conformance("REC-21")
@pytest.mark.parametrize("kind", [FIRST, CHANGED])
async def test_an_owner_that_fails_after_the_epoch_was_written_leaves_nothing_of_it(
    store: StoreKit, session_id: str, kind: str
) -> None:
    """Its transaction learns that ownership is lost when everything in it is done."""
    token, step = await _before_a_step(store, session_id, kind)
    before = await store.everything(session_id)

    async def lose(conn: Any) -> Prepared:
        await steps.prepare(conn, token, step, queued=True, lease=LEASE)
        [epoch] = (await conn.execute(EPOCH.select().where(EPOCH.c.session_id == session_id))).all()
        assert [epoch._asdict()] != before[EPOCH.name]
        raise OwnershipLostError("lost at the last moment")

    with pytest.raises(OwnershipLostError, match="last moment"):
        await store.database.transact(lose)
    assert await store.everything(session_id) == before


@pytest.mark.conformance("REC-23")
async def test_a_snapshot_that_cannot_be_read_undoes_the_step_and_the_renewal(store: StoreKit, session_id: str) -> None:
    """The error says which session and what to do, and doing it helps."""
    work = await a_turn_later(store, session_id)
    await set_snapshot(store, session_id, '["nothing", "of", "ours"]')
    before = await store.everything(session_id)
    with pytest.raises(ContextSnapshotDecodeError, match=f"{session_id} was told .* delete the session's row"):
        await store.prepare(work.token, 2)
    assert await store.everything(session_id) == before

    await execute(store, "DELETE FROM session_context_epoch WHERE session_id = :id", id=session_id)
    assert (await store.prepare(work.token, 2)).promoted == 1
    [renewed] = await store.rows(tables.session_execution, session_id)
    assert renewed["expires_at"] > before["session_execution"][0]["expires_at"]


@pytest.mark.conformance("REC-23")
async def test_an_epoch_that_cannot_be_written_undoes_the_step_and_the_renewal(
    store: StoreKit, session_id: str
) -> None:
    """PostgreSQL refuses it when the transaction ends, with the claim renewed in it."""
    token, step = await _before_a_step(store, session_id, CHANGED)
    before = await store.everything(session_id)
    name = f"refuse_{session_id.lower()[-12:]}"
    await execute(
        store,
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no more epochs'; END $$",
    )
    await execute(
        store,
        f"""CREATE CONSTRAINT TRIGGER {name} AFTER UPDATE ON session_context_epoch DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.session_id = '{session_id}') EXECUTE FUNCTION {name}()""",
    )
    try:
        with pytest.raises(PostgresError, match="no more epochs"):
            await store.prepare(token, step)
        assert await store.everything(session_id) == before
    finally:
        await execute(store, f"DROP FUNCTION {name} CASCADE")

    await store.prepare(token, step)
    [renewed] = await store.rows(tables.session_execution, session_id)
    assert renewed["expires_at"] > before["session_execution"][0]["expires_at"]


@pytest.mark.conformance("REC-23")
async def test_an_update_that_cannot_be_appended_undoes_the_epoch_with_it(store: StoreKit, session_id: str) -> None:
    """Its event id is taken by something else, which shows when the epoch is written already."""
    token, step = await _before_a_step(store, session_id, CHANGED)
    other = events.Synthetic(timestamp=1, session_id=session_id, message_id=derived_id("msg", session_id), text="x")
    await store.append(session_id, other, ids=[derived_id("evt", token.execution_id, step, "context")])
    before = await store.everything(session_id)

    with pytest.raises(EventConflictError):
        await store.prepare(token, step)
    assert await store.everything(session_id) == before


async def test_a_refused_step_touches_no_epoch_and_its_twin_is_refused_as_well(
    store: StoreKit, session_id: str
) -> None:
    """So that the failure of the first one is the failure of all of them."""
    work = await a_turn_later(store, session_id)
    await set_snapshot(store, session_id, "7")
    before = await store.row(EPOCH, session_id)
    prepared = await store.do(steps.prepare, work.token, 2, queued=False, lease=LEASE, refused="cannot be read")

    assert (prepared.promoted, prepared.refused, prepared.session) == (1, "cannot be read", None)
    await execute(store, "UPDATE session_context_epoch SET snapshot = '{}' WHERE session_id = :id", id=session_id)
    assert await store.prepare(work.token, 2) == prepared
    assert await store.row(EPOCH, session_id) == {**before, "snapshot": {}}
