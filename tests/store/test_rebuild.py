"""The projection worked out anew: the same when nothing is wrong, named and repaired when something is."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import NotFoundError
from fencepost.store import rebuild, sessions, tables
from fencepost.store.engine import Database
from fencepost.store.rebuild import Difference
from tests.store.kit import StoreKit
from tests.store.test_replay import _reverts, _surroundings, _turns


@pytest.fixture
async def lived(store: StoreKit, session_id: str) -> str:
    """A session to which everything has happened, with pending input, archived, and worked on."""
    await _surroundings(store, session_id)
    await _turns(store, session_id)
    await _reverts(store, session_id)
    await store.admit(session_id, "pending")
    await store.do(sessions.archive, session_id)
    await store.admit(session_id, "waits for its turn")
    return session_id


async def test_a_sound_projection_differs_in_nothing_and_is_left_alone(store: StoreKit, lived: str) -> None:
    """Looking changes nothing, however often one connection does it; rebuilding has nothing to do."""
    before = await store.everything(lived)

    async def twice(conn: AsyncConnection) -> list[Difference]:
        return [*await rebuild.differences(conn, lived), *await rebuild.differences(conn, lived)]

    assert await store.do(twice) == []
    assert await store.do(rebuild.rebuild, lived) == []
    assert await store.everything(lived) == before
    assert (await store.row(tables.session, lived))["time_archived"] is not None


async def _damage(conn: AsyncConnection, session_id: str, removed: str, changed: str) -> None:
    messages, inbox, session = tables.session_message, tables.session_input, tables.session
    await conn.execute(delete(messages).where(messages.c.id == removed))
    await conn.execute(update(messages).where(messages.c.id == changed).values(data={"text": "forged"}))
    await conn.execute(
        insert(messages).values(
            id=f"msg_extra{session_id[-20:]}", session_id=session_id, type="system", seq=9_999,
            time_created=1, time_updated=1, data={},
        )
    )  # fmt: skip
    await conn.execute(update(session).where(session.c.id == session_id).values(title="forged", cost=99))
    pending = (inbox.c.session_id == session_id) & inbox.c.promoted_seq.is_(None)
    await conn.execute(update(inbox).where(pending).values(delivery="queue", wake_attempts=7))


async def test_what_is_wrong_is_named_and_repaired_in_place(store: StoreKit, lived: str) -> None:
    """Wakes and their attempts, archiving, ownership, ledger and log stay as they are."""
    sound = await store.everything(lived)
    messages = await store.messages(lived)
    await store.do(_damage, lived, messages[0].id, messages[1].id)
    damaged = await store.everything(lived)

    found = await store.do(rebuild.differences, lived)
    named = {(one.table, one.column) for one in found}
    assert named == {
        ("session", "title"),
        ("session", "cost"),
        ("session_message", None),
        ("session_message", "data"),
        ("session_input", "delivery"),
    }
    [title] = [one for one in found if one.column == "title"]
    assert (title.id, title.stored) == (lived, "forged")
    missing = [one for one in found if one.stored is None and one.column is None]
    assert [one.id for one in missing] == [messages[0].id]
    assert await store.everything(lived) == damaged

    assert await store.do(rebuild.rebuild, lived) == found
    assert await store.do(rebuild.differences, lived) == []
    for rows in sound["session_input"]:
        if rows["promoted_seq"] is None:
            rows["wake_attempts"] = 7
    assert await store.everything(lived) == {name: sorted(rows, key=repr) for name, rows in sound.items()}
    assert await store.messages(lived) == messages


async def test_a_session_whose_rows_are_gone_is_made_again(store: StoreKit, session_id: str) -> None:
    """The log alone is enough, also for its project."""
    await store.admit(session_id)
    await store.do(lambda conn: conn.execute(delete(tables.session).where(tables.session.c.id == session_id)))
    assert await store.rows(tables.session_input, session_id) == []

    await store.do(rebuild.rebuild, session_id)
    assert (await store.row(tables.session, session_id))["directory"] == "/work"
    row = await store.row(tables.session_input, session_id)
    assert (row["promoted_seq"], row["wake_pending"]) == (None, False)


async def test_every_session_can_be_rebuilt(database_url: str) -> None:
    """Each is told with what was wrong, however many there are."""
    database = Database(database_url, pool_size=2)
    store = StoreKit(database)
    made = [await store.new_session() for _ in range(45)]
    bad = made[30]
    titled = update(tables.session).where(tables.session.c.id == bad).values(title="forged")
    await store.do(lambda conn: conn.execute(titled))

    found: dict[str, list[str | None]] = {}
    async for session_id, differences in rebuild.rebuild_all(database):
        found[session_id] = [one.column for one in differences]
    assert found == {session_id: ["title"] if session_id == bad else [] for session_id in made}
    assert await store.do(rebuild.differences, bad) == []
    await database.close()


async def test_appends_wait_while_a_session_is_rebuilt(store: StoreKit, session_id: str) -> None:
    """So that nothing is lost that comes at the same time."""
    await store.admit(session_id, "first")
    async with store.database.begin() as conn:
        await rebuild.rebuild(conn, session_id)
        coming = asyncio.create_task(store.admit(session_id, "second"))
        await store.waiting(1)
    await coming

    assert len(await store.rows(tables.session_input, session_id)) == 2
    assert await store.do(rebuild.differences, session_id) == []


async def test_an_unknown_session_has_nothing_to_rebuild(store: StoreKit) -> None:
    """It is refused like everywhere."""
    for work in (rebuild.rebuild, rebuild.differences):
        with pytest.raises(NotFoundError, match="ses_unknown"):
            await store.do(work, "ses_unknown")
