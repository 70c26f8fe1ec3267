"""The session's context epoch: begun and advanced in the transaction that prepares a step, read with the history.

The row is no part of the projection, since the log does not hold the baseline: it says what the model was told.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import context
from fencepost.domain.context import Update
from fencepost.domain.errors import ContextSnapshotDecodeError
from fencepost.store import tables
from fencepost.store.event_log import Head
from fencepost.store.sessions import Session, session_of
from fencepost.store.statement import Statement

_epoch, _session = tables.session_context_epoch, tables.session
_LOOK = Statement(
    select(_session, _epoch.c.snapshot, _epoch.c.baseline_seq)
    .select_from(_session.outerjoin(_epoch, _epoch.c.session_id == _session.c.id))
    .where(_session.c.id == bindparam("session_id"))
)
_new = upsert(_epoch).values({column.name: bindparam(column.name) for column in _epoch.c})
_BEGIN = Statement(
    _new.on_conflict_do_update(
        index_elements=["session_id"],
        set_={name: _new.excluded[name] for name in ("baseline", "snapshot", "baseline_seq")},
    )
)
_ADVANCE = Statement(
    update(_epoch).where(_epoch.c.session_id == bindparam("named")).values(snapshot=bindparam("snapshot"))
)


@dataclass(frozen=True, slots=True)
class Current:
    """The session as the step begins, and what of its context has changed for the model, None when nothing has."""

    session: Session
    update: str | None


async def advance(conn: AsyncConnection, head: Head) -> Current:
    """Begin the epoch of the session whose log is locked, or bring it up to date. The caller appends the update.

    Raises ContextError when the step cannot have its context: nothing of the caller's transaction may stay then.
    """
    row = await _LOOK.first(conn, session_id=head.session_id)
    assert row is not None, "a step's ledger goes with its session"
    session = session_of(row._asdict())
    sources = context.session_sources(session.location, head.now)
    if row.baseline_seq is None:
        found: context.Epoch | Update | None = context.initialize(sources)
    else:
        try:
            found = context.reconcile(row.snapshot, sources)
        except ContextSnapshotDecodeError as error:
            raise ContextSnapshotDecodeError(
                f"what the model of {head.session_id} was told of its context cannot be read ({error.message}): "
                "delete the session's row of session_context_epoch, and the next prompt tells it anew"
            ) from error
    if found is None:
        return Current(session, None)
    if isinstance(found, Update):
        await _ADVANCE.run(conn, named=head.session_id, snapshot=found.snapshot)
        return Current(session, found.text)
    await _BEGIN.run(
        conn,
        session_id=head.session_id,
        baseline=found.baseline,
        snapshot=found.snapshot,
        baseline_seq=head.seq,
    )
    return Current(session, None)
