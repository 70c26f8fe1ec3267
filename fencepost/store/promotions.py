"""Projecting promoted input: any number of them in one statement, since thousands may have gathered in the inbox."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import to_json
from sqlalchemy import Text, bindparam, column, func, insert, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import LifecycleConflictError
from fencepost.domain.events import Prompted
from fencepost.store import tables
from fencepost.store.statement import Statement

_inbox = tables.session_input
_INPUTS = Statement(
    select(_inbox).where(_inbox.c.id == func.any(bindparam("ids", type_=ARRAY(Text)))).with_for_update()
)
_PROMOTE = Statement(
    text(
        """
        WITH promoted AS (
            SELECT * FROM unnest(
                CAST(:ids AS text[]), CAST(:seqs AS bigint[]), CAST(:prompts AS jsonb[]), CAST(:deliveries AS text[]),
                CAST(:times AS bigint[])
            ) AS p(id, seq, prompt, delivery, time)
        ), marked AS (
            UPDATE session_input AS i SET promoted_seq = p.seq, wake_pending = FALSE FROM promoted AS p
            WHERE i.id = p.id AND i.promoted_seq IS NULL
              AND (i.session_id, i.prompt, i.delivery, i.time_created) = (:session_id, p.prompt, p.delivery, p.time)
            RETURNING i.id
        ), shown AS (
            INSERT INTO session_message (id, session_id, type, seq, time_created, time_updated, data)
            SELECT id, :session_id, 'user', seq, time, time,
                prompt || jsonb_build_object('time', jsonb_build_object('created', time)) FROM promoted
            ON CONFLICT (id) DO NOTHING RETURNING id
        )
        SELECT p.id, marked.id IS NOT NULL AS marked, shown.id IS NOT NULL AS shown
        FROM promoted AS p LEFT JOIN marked USING (id) LEFT JOIN shown USING (id)
        """
    ).columns(column("id"), column("marked"), column("shown"))
)


async def project(conn: AsyncConnection, promoted: Sequence[tuple[Prompted, int]]) -> None:
    """Mark inputs of one session, each with an id of its own, as promoted at their sequences, and show their messages.

    Raises LifecycleConflictError, which rolls all of them back.
    """
    done = await _PROMOTE.all(
        conn,
        session_id=promoted[0][0].session_id,
        ids=[event.message_id for event, _ in promoted],
        seqs=[seq for _, seq in promoted],
        prompts=[to_json(event.prompt.to_wire()).decode() for event, _ in promoted],
        deliveries=[event.delivery for event, _ in promoted],
        times=[event.timestamp for event, _ in promoted],
    )
    marked = {row.id for row in done if row.marked}
    if len(marked) < len(promoted):
        await _require_promoted(conn, [one for one in promoted if one[0].message_id not in marked])
    known = [row.id for row in done if not row.shown]
    if known:
        raise LifecycleConflictError(f"there is a message {min(known)} already: {Prompted.type} cannot make another")


async def _require_promoted(conn: AsyncConnection, promoted: Sequence[tuple[Prompted, int]]) -> None:
    """Accept inputs that are promoted at their sequences already, and such as were never admitted."""
    rows = {row.id: row for row in await _INPUTS.all(conn, ids=[event.message_id for event, _ in promoted])}
    for event, seq in promoted:
        prompt, row = event.prompt.to_wire(), rows.get(event.message_id)
        if row is None:
            # A log from before there was an inbox: admitted and promoted at once.
            values = {"id": event.message_id, "session_id": event.session_id, "prompt": prompt}
            places = {"admitted_seq": seq, "promoted_seq": seq, "time_created": event.timestamp}
            await conn.execute(insert(_inbox).values(**values, **places, delivery=event.delivery))
        elif row.promoted_seq is not None:
            if row.session_id != event.session_id or row.promoted_seq != seq:
                raise LifecycleConflictError(f"input {event.message_id} was promoted at {row.promoted_seq} already")
        else:
            raise LifecycleConflictError(f"input {event.message_id} was admitted with other content")
