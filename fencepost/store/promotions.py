"""Projecting promoted input: any number of them in three statements, since thousands may have gathered in the inbox."""

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
        UPDATE session_input SET promoted_seq = p.seq, wake_pending = FALSE
        FROM unnest(CAST(:ids AS text[]), CAST(:seqs AS bigint[])) AS p(id, seq) WHERE session_input.id = p.id
        """
    )
)
_SHOW = Statement(
    text(
        """
        INSERT INTO session_message (id, session_id, type, seq, time_created, time_updated, data)
        SELECT id, :session_id, 'user', seq, time, time, data
        FROM unnest(
            CAST(:ids AS text[]), CAST(:seqs AS bigint[]), CAST(:times AS bigint[]), CAST(:data AS jsonb[])
        ) AS m(id, seq, time, data)
        ON CONFLICT (id) DO NOTHING RETURNING id
        """
    ).columns(column("id"))
)


async def project(conn: AsyncConnection, promoted: Sequence[tuple[Prompted, int]]) -> None:
    """Mark inputs of one session, each with an id of its own, as promoted at their sequences, and show their messages.

    Raises LifecycleConflictError, which rolls all of them back.
    """
    rows = {row.id: row for row in await _INPUTS.all(conn, ids=[event.message_id for event, _ in promoted])}
    marked: list[tuple[str, int]] = []
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
            same = (row.session_id, row.prompt, row.delivery, row.time_created)
            if same != (event.session_id, prompt, event.delivery, event.timestamp):
                raise LifecycleConflictError(f"input {event.message_id} was admitted with other content")
            marked.append((event.message_id, seq))
    if marked:
        await _PROMOTE.run(conn, ids=[one for one, _ in marked], seqs=[seq for _, seq in marked])
    shown = await _SHOW.all(
        conn,
        session_id=promoted[0][0].session_id,
        ids=[event.message_id for event, _ in promoted],
        seqs=[seq for _, seq in promoted],
        times=[event.timestamp for event, _ in promoted],
        data=[
            to_json({**event.prompt.to_wire(), "time": {"created": event.timestamp}}).decode() for event, _ in promoted
        ],
    )
    if len(shown) < len(promoted):
        known = {event.message_id for event, _ in promoted} - {row.id for row in shown}
        raise LifecycleConflictError(f"there is a message {min(known)} already: {Prompted.type} cannot make another")
