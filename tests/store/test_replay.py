"""The log is the truth: applied to an empty database it gives the same projection, row by row."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain import messages as m
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.models import ModelRef
from fencepost.domain.tools import FileItem, TextItem
from fencepost.store import event_log, steps, tables
from fencepost.store.engine import Database
from fencepost.store.event_log import Entry
from tests.store.kit import LEASE, USER_STOP, StoreKit, token_of

PROJECTED = (tables.session, tables.session_message, tables.session_input)


@pytest.fixture
async def empty_store(database_url: str) -> AsyncIterator[StoreKit]:
    """A second database, with the schema and without rows."""
    database = Database(database_url, pool_size=2)
    yield StoreKit(database)
    await database.close()


async def _surroundings(store: StoreKit, session_id: str) -> None:
    """Append what clients and the surroundings say beside a turn."""

    def about(timestamp: int) -> dict[str, Any]:
        return {"timestamp": timestamp, "session_id": session_id, "message_id": fresh_id("msg")}

    await store.append(
        session_id,
        events.AgentSwitchedEvent(**about(11), agent="plan"),
        events.ModelSwitchedEvent(**about(12), model=ModelRef(id="big", provider_id="scripted", variant="slow")),
        events.Moved(timestamp=13, session_id=session_id, location=Location(directory="/there", workspace_id="wrk_1")),
        events.ContextUpdated(**about(14), text="the date changed"),
        events.Synthetic(**about(15), text="a note"),
        events.ShellStarted(**about(16), call_id="shell_1", command="date"),
        events.ShellEnded(timestamp=17, session_id=session_id, call_id="shell_1", output="monday"),
        events.CompactionStarted(**about(18), reason="manual"),
        events.CompactionEnded(**about(19), reason="manual", text="a summary", recent="the latest"),
        events.Retried(
            timestamp=20,
            session_id=session_id,
            attempt=1,
            error=events.RetryError(message="overloaded", status_code=503, is_retryable=True),
        ),
    )


async def _turns(store: StoreKit, session_id: str) -> None:
    """Run turns that end in every way."""
    await store.admit(session_id, "queued", delivery="queue")
    work = await store.begin(session_id, run="run-1")
    about: dict[str, Any] = {**work.about, "call_id": "call_2"}
    await work.say("Let me look.\x00")
    await work.publish(
        events.ReasoningStarted(**work.about, reasoning_id="r1", provider_metadata={"p": {"signature": "s"}}),
        events.ReasoningEnded(**work.about, reasoning_id="r1", text="hm", provider_metadata={"p": {"signature": "t"}}),
        *work.called("call_1"),
        *work.called("call_2", executed=True),
        events.ToolProgress(**about, structured={"percent": 50}, content=(TextItem(text="half"),)),
        events.ToolSuccess(
            **about,
            structured={},
            content=(FileItem(uri="data:image/png;base64,AA==", mime="image/png"),),
            result={"type": "json", "value": [1, None]},
            provider=events.ToolProviderInfo(executed=True, metadata={"p": {"id": 1}}),
        ),
        *work.called("call_3"),
    )
    await work.start_tool("call_1")
    await work.settle_tool("call_1")
    await work.settle(work.ended("tool-calls"))  # call_3 never started: it fails

    token = work.token
    failing = await store.request(token, 2)
    await failing.settle(failing.failed())
    await store.release(token)
    stopped = await store.begin(session_id, "stop me", run="run-2")
    await stopped.publish(stopped.started(), events.TextStarted(**stopped.about, text_id="t1"))
    await stopped.keep_live("so far")
    await stopped.settle(USER_STOP)
    await store.claim(token_of(session_id, "run-3"), owner_run="closed", force=True)
    lost = await store.request(token_of(session_id, "run-3"))
    await lost.publish(lost.started(), *lost.called("call_1"))
    await store.claim(token_of(session_id, "run-4"), owner_run="reset")
    await store.prepare(token_of(session_id, "run-4"))
    await store.do(steps.settle, token_of(session_id, "run-4"), 2, USER_STOP, LEASE)


async def _reverts(store: StoreKit, session_id: str) -> None:
    """Stage, clear, stage again and commit a way back, then go on from there."""
    boundary = (await store.messages(session_id))[4].id
    about = {"session_id": session_id}
    await store.admit(session_id, "never seen")
    await store.append(
        session_id,
        events.RevertStaged(**about, timestamp=31, revert={"messageID": boundary, "diff": "+"}),
        events.RevertCleared(**about, timestamp=32),
        events.RevertStaged(**about, timestamp=33, revert={"messageID": boundary}),
        events.RevertCommitted(**about, timestamp=34, message_id=boundary),
        events.Synthetic(**about, timestamp=35, message_id=fresh_id("msg"), text="from here"),
        events.RevertStaged(**about, timestamp=36, revert={"messageID": boundary}),
    )


async def _projection(store: StoreKit, session_id: str) -> dict[str, list[dict[str, Any]]]:
    """Give every projected row; what asks for execution is no part of it."""
    return {
        table.name: [
            {name: value for name, value in row.items() if not name.startswith("wake_")}
            for row in await store.rows(table, session_id)
        ]
        for table in PROJECTED
    }


@pytest.mark.parametrize("batch", [1, 7, 1_000])
async def test_a_replayed_log_gives_the_same_rows(store: StoreKit, empty_store: StoreKit, batch: int) -> None:
    """Every kind of event there is, in batches of any size; and a second time changes nothing."""
    session_id = await store.new_session()
    await _surroundings(store, session_id)
    await _turns(store, session_id)
    at_its_fullest = await _projection(store, session_id)
    await _reverts(store, session_id)
    log = await store.events(session_id)
    assert {event.type for event in log} == set(events.MANIFEST)
    assert [event.seq for event in log] == list(range(len(log)))

    async def replay(conn: AsyncConnection, part: list[event_log.StoredEvent]) -> list[int]:
        head = await event_log.begin(conn, session_id)
        return await event_log.append(conn, head, [Entry(event.id, event.decode()) for event in part])

    reverts = next(n for n, event in enumerate(log) if event.type == events.RevertStaged.stored_type()) - 1
    for part in (log[:reverts], log[reverts:]):
        for start in range(0, len(part), batch):
            chunk = part[start : start + batch]
            assert await empty_store.do(replay, chunk) == [event.seq for event in chunk]
        if part is not log[reverts:] and part == log[:reverts]:
            assert await _projection(empty_store, session_id) == at_its_fullest
    rebuilt = await _projection(empty_store, session_id)
    assert rebuilt == await _projection(store, session_id)
    assert await empty_store.events(session_id) == log

    assert await empty_store.do(replay, log) == [event.seq for event in log]
    assert await _projection(empty_store, session_id) == rebuilt
    assert await empty_store.events(session_id) == log


async def test_a_replay_schedules_nothing(store: StoreKit, empty_store: StoreKit) -> None:
    """Input that was pending is pending again, and asks for no execution."""
    session_id = await store.new_session()
    await store.admit(session_id)
    for event in await store.events(session_id):
        async with empty_store.database.begin() as conn:
            head = await event_log.begin(conn, session_id)
            await event_log.append(conn, head, [Entry(event.id, event.decode())])

    row = await empty_store.row(tables.session_input, session_id)
    assert (row["promoted_seq"], row["wake_pending"]) == (None, False)
    assert await empty_store.messages(session_id) == []


async def test_a_committed_revert_takes_away_what_came_later(store: StoreKit, session_id: str) -> None:
    """Messages and input after the boundary, and nothing before it."""
    await _turns(store, session_id)
    messages = await store.messages(session_id)
    await _reverts(store, session_id)

    kept = await store.messages(session_id)
    assert [message.id for message in kept[:-1]] == [message.id for message in messages[:5]]
    assert isinstance(kept[-1], m.SyntheticMessage)
    boundary = next(
        row["seq"] for row in await store.rows(tables.session_message, session_id) if row["id"] == kept[4].id
    )
    for row in await store.rows(tables.session_input, session_id):
        assert row["admitted_seq"] <= boundary
        assert row["promoted_seq"] is None or row["promoted_seq"] <= boundary
