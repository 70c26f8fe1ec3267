"""What sessions are doing, in one query of the tables that a turn writes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Integer, Text, bindparam, column, literal_column, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.events import StepEnded, StepFailed, StepInterrupted
from fencepost.domain.status import Activity, Claim, Facts, activity
from fencepost.store import tables
from fencepost.store.event_log import CLOCK
from fencepost.store.statement import Statement

_ENDS: dict[str, Literal["ended", "failed", "interrupted"]] = {
    StepEnded.stored_type(): "ended",
    StepFailed.stored_type(): "failed",
    StepInterrupted.stored_type(): "interrupted",
}

_FACTS = Statement(
    text(
        """
        SELECT s.id, x.id AS execution_id, x.owner_id, x.phase, x.assistant_message_id, x.recovery_error,
            t.now - x.time_created AS age, x.expires_at - t.now AS lease_left,
            s.workspace_id, CASE WHEN s.workspace_id IS NOT NULL THEN (
                SELECT t.now - min(time_updated) FROM tool_call
                WHERE session_id = s.id AND status <> 'settled' AND status = 'called' AND execution_id = x.id
            ) END AS untaken,
            l.stage, l.attempt, CAST(l.result ->> 'failed_attempt' AS int) AS failed_attempt,
            (
                SELECT count(*) FROM session_input
                WHERE session_id = s.id AND promoted_seq IS NULL AND wake_pending
            ) + (
                SELECT count(*) FROM session_recovery
                WHERE session_id = s.id AND phase = 'pending' AND wake_pending AND recovery_error IS NULL
            ) AS wakes,
            e.type AS ended, e.data ->> 'reason' AS interruption, e.data -> 'error' ->> 'message' AS error
        FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now) AS t
        CROSS JOIN session AS s
        LEFT JOIN session_execution AS x ON x.session_id = s.id
        LEFT JOIN execution_ledger AS l ON l.execution_id = x.id
        LEFT JOIN LATERAL (
            SELECT last.type, last.data FROM unnest(:ends) AS k(type) CROSS JOIN LATERAL (
                SELECT type, seq, data FROM event
                WHERE aggregate_id = s.id AND event.type = k.type ORDER BY seq DESC LIMIT 1
            ) AS last ORDER BY last.seq DESC LIMIT 1
        ) AS e ON TRUE
        WHERE s.id = ANY(:ids)
        """
    )
    .bindparams(bindparam("ends", type_=ARRAY(Text)), bindparam("ids", type_=ARRAY(Text)))
    .columns(
        *(
            column(name)
            for name in ("id", "execution_id", "owner_id", "phase", "assistant_message_id", "recovery_error")
        ),
        *(column(name, Integer) for name in ("age", "lease_left")),
        column("workspace_id"),
        column("untaken", Integer),
        column("stage"),
        *(column(name, Integer) for name in ("attempt", "failed_attempt", "wakes")),
        *(column(name) for name in ("ended", "interruption", "error")),
    )
)
_execution = tables.session_execution
_ACTIVE = Statement(
    select(_execution.c.session_id)
    .where(_execution.c.expires_at > literal_column(CLOCK))
    .order_by(_execution.c.time_created, _execution.c.session_id)
)


async def activities(conn: AsyncConnection, session_ids: Sequence[str]) -> dict[str, Activity]:
    """Give what each of these sessions is doing; those that do not exist are left out."""
    rows = await _FACTS.all(conn, ids=list(session_ids), ends=list(_ENDS))
    return {row.id: activity(_facts(row)) for row in rows}


async def active(conn: AsyncConnection) -> list[str]:
    """Give the ids of exactly the sessions with a live claim, the oldest claim first."""
    return [row.session_id for row in await _ACTIVE.all(conn)]


def _facts(row: Any) -> Facts:
    claim = None
    if row.execution_id is not None:
        claim = Claim(
            execution_id=row.execution_id,
            run_id=row.owner_id,
            phase=row.phase,
            age=row.age,
            left=row.lease_left,
            stage=row.stage,
            attempt=row.attempt or 0,
            failed_attempt=row.failed_attempt or 0,
            answering=row.assistant_message_id is not None,
            untaken=row.untaken,
            workspace=row.workspace_id,
            put_aside=row.recovery_error,
        )
    ended = _ENDS.get(row.ended)
    return Facts(
        claim,
        row.wakes,
        ended,
        row.interruption if ended == "interrupted" else None,
        row.error if ended == "failed" else None,
    )
