"""More input than Temporal takes as signals or updates of one run, sent to a session that is at work."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client as TemporalClient

from fencepost.client import open_client
from fencepost.providers.script import Gate, Pause, Say
from fencepost.store import tables
from tests.house_kit import House, open_house

MANY = 20_000
BY_CLIENT = 100
"""So many of them are sent one by one, as every one of them could be."""

_SENT = (
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED,
)
# What admitting one input after the other leaves, in three statements.
_ADMITTED = (
    """
    INSERT INTO event (id, aggregate_id, seq, type, data)
    SELECT 'evt_many_' || n, :id, head + n, 'session.next.prompt.admitted.1', jsonb_build_object(
        'timestamp', 1, 'sessionID', CAST(:id AS text), 'messageID', 'msg_many_' || n, 'delivery', 'steer',
        'prompt', jsonb_build_object('text', 'Number ' || n)
    )
    FROM (SELECT seq AS head FROM event_sequence WHERE aggregate_id = :id FOR UPDATE) AS h,
        generate_series(1, :many) AS n
    """,
    """
    INSERT INTO session_input (id, session_id, prompt, delivery, admitted_seq, wake_pending, time_created)
    SELECT 'msg_many_' || n, :id, jsonb_build_object('text', 'Number ' || n), 'steer', seq + n, TRUE, 1
    FROM (SELECT seq FROM event_sequence WHERE aggregate_id = :id) AS h, generate_series(1, :many) AS n
    """,
    "UPDATE event_sequence SET seq = seq + :many WHERE aggregate_id = :id",
)


async def admit_many(house: House, session_id: str, many: int) -> None:
    """Admit so many inputs in one transaction, for the sake of time."""
    async with house.services.database.begin() as conn:
        for statement in _ADMITTED:
            given = {"id": session_id, "many": many}
            await conn.execute(text(statement), given)


async def promoted(house: House, session_id: str) -> tuple[int, int]:
    """Give how many inputs there are, and how many of them the model has seen."""
    inbox = tables.session_input
    counts = select(func.count(), func.count(inbox.c.promoted_seq)).where(inbox.c.session_id == session_id)
    async with house.services.database.read() as conn:
        found, seen = (await conn.execute(counts)).one()
        return found, seen


@pytest.mark.conformance("COO-16")
@pytest.mark.timeout(150)
async def test_twenty_thousand_inputs_to_a_busy_session(
    database_url: str, temporal_client: TemporalClient, task_queue: str, tmp_path: Path
) -> None:
    """The session looks for them by itself, so nobody has to be told: the run hears of none. All of them are answered,
    some thousands at a time."""
    gate = Gate()
    answer = [[Say("Seen.")] for _ in range(10)]
    async with (
        open_house(
            database_url, temporal_client, task_queue, tmp_path, [[Pause(gate), Say("Wait.")], *answer]
        ) as house,
        open_client(house.services.settings, house.services.environ) as client,
    ):
        session_id = house.new_id()
        await house.start(session_id, "Go.")
        await gate.reached()
        await admit_many(house, session_id, MANY - BY_CLIENT)
        receipts = [await client.prompt(session_id, f"Last {n}.") for n in range(BY_CLIENT)]
        gate.release()
        await house.ended(session_id)
        runs = [run async for run in house.client.list_workflows(f"WorkflowId = '{session_id}'")]
        histories = [
            await house.client.get_workflow_handle(session_id, run_id=run.run_id).fetch_history() for run in runs
        ]

        assert len({receipt.id for receipt in receipts}) == BY_CLIENT
        assert await promoted(house, session_id) == (MANY + 1, MANY + 1)
        asked = [m["content"] for m in house.provider.requests[-1]["messages"] if m["role"] == "user"]
        assert (len(asked), len(set(asked))) == (MANY + 1, MANY + 1)
        assert len(house.provider.requests) <= 6
        assert [e for history in histories for e in history.events if e.event_type in _SENT] == []
        assert sum(run.history_length for run in runs) < 200
