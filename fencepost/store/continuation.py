"""The continuation of an abandoned turn: recorded once, checked before it is believed, promoted once.

A row of `session_recovery` is one continuation. It carries no part of an answer: the message that it becomes is
synthetic, and the assistant message that it names is the one that was cut off, never a new one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.events import Synthetic
from fencepost.domain.ids import derived_id, is_message_id
from fencepost.store import ledger, tables
from fencepost.store.event_log import Entry, Head
from fencepost.store.statement import Statement

CONTINUE = (
    "The previous answer was cut off before it was complete ({reason}). Go on from where it stopped, without repeating "
    "what was said. Tool calls marked as interrupted may or may not have taken effect: check before doing them again."
)

_LOST = "its worker was lost or it failed on the way"
_MOVED = "the session was moved to another directory, where tools work from now on"

_recovery, _messages, _inbox = tables.session_recovery, tables.session_message, tables.session_input
_PENDING = Statement(
    select(_recovery)
    .where(
        _recovery.c.session_id == bindparam("session_id"),
        _recovery.c.phase == "pending",
        _recovery.c.recovery_error.is_(None),
    )
    .order_by(_recovery.c.time_created, _recovery.c.execution_id)
    .limit(1)
    .with_for_update()
)
_PROMOTE = Statement(
    update(_recovery).where(_recovery.c.execution_id == bindparam("named")).values(phase="promoted", wake_pending=False)
)
_QUARANTINE = Statement(
    update(_recovery)
    .where(_recovery.c.execution_id == bindparam("named"), _recovery.c.recovery_error.is_(None))
    .values(recovery_error=bindparam("error"), wake_pending=False)
)
_MESSAGE = Statement(select(_messages.c.session_id, _messages.c.type).where(_messages.c.id == bindparam("id")))
_SESSION = Statement(select(tables.session.c.id).where(tables.session.c.id == bindparam("id")))
_INPUT = Statement(select(_inbox.c.session_id).where(_inbox.c.id == bindparam("id")))
_LEDGER_SESSION = Statement(
    select(tables.execution_ledger.c.session_id).where(tables.execution_ledger.c.execution_id == bindparam("named"))
)
_NEWEST_ASSISTANT = Statement(
    select(_messages.c.id, _messages.c.time_created)
    .where(_messages.c.session_id == bindparam("session_id"), _messages.c.type == "assistant")
    .order_by(_messages.c.seq.desc())
    .limit(1)
)


async def record(
    conn: AsyncConnection,
    session_id: str,
    execution_id: str,
    assistant_message_id: str | None,
    now: int,
    *,
    refused: str | None = None,
) -> None:
    """Record the one input with which an abandoned execution goes on. Once per execution, however often asked.

    With `refused` it is put aside from the beginning, with this as its error: the turn does not go on.
    """
    await conn.execute(
        upsert(_recovery)
        .values(
            session_id=session_id,
            execution_id=execution_id,
            assistant_message_id=assistant_message_id,
            continuation_message_id=derived_id("msg", "continuation", execution_id),
            phase="pending" if refused is None else "stopped",
            wake_pending=refused is None,
            recovery_error=refused,
            time_created=now,
        )
        .on_conflict_do_nothing(index_elements=["execution_id"])
    )


async def promote(conn: AsyncConnection, head: Head) -> tuple[list[Entry], int]:
    """Give the event of the session's pending continuation, none without one, and how many this turn then has had.

    The head is locked, and the caller appends. A row that cannot be believed is put aside instead, with its error: it
    is looked at here too, since it may have become so after the scan looked.
    """
    while (row := await _PENDING.first(conn, session_id=head.session_id)) is not None:
        wrong = await fault(conn, row)
        if wrong is not None:
            await quarantine(conn, row.execution_id, wrong)
            continue
        await _PROMOTE.run(conn, named=row.execution_id)
        ended = await ledger.find(conn, row.execution_id)
        event = Synthetic(
            timestamp=head.now,
            session_id=head.session_id,
            message_id=row.continuation_message_id,
            text=CONTINUE.format(reason=_MOVED if ended is not None and ended.results.get("moved") else _LOST),
        )
        had = ended.continuations if ended is not None else 0
        return [Entry(derived_id("evt", "continued", row.execution_id), event)], had + 1
    return [], 0


async def quarantine(conn: AsyncConnection, execution_id: str, error: str) -> None:
    """Put a continuation aside with its error: it is neither woken nor promoted any more, and stays to be seen."""
    await _QUARANTINE.run(conn, named=execution_id, error=error)


async def fault(conn: AsyncConnection, row: Any) -> str | None:
    """Say what is wrong with a continuation's row, None when it may be promoted.

    None of these faults goes away again, so a look without the log's lock may miss one, but not make one up.
    """
    if row.phase != "pending":
        return f"malformed recovery: a wake in phase {row.phase!r}"
    if not row.execution_id:
        return "malformed recovery: it names no execution"
    if await _SESSION.first(conn, id=row.session_id) is None:
        return f"malformed recovery: there is no session {row.session_id!r}"
    if not is_message_id(row.continuation_message_id):
        return f"malformed recovery: {row.continuation_message_id!r} is no message id"
    executed = await _LEDGER_SESSION.first(conn, named=row.execution_id)
    if executed is not None and executed.session_id != row.session_id:
        return f"execution {row.execution_id} belongs to another session, {executed.session_id}"
    named = row.continuation_message_id
    for taken in (await _MESSAGE.first(conn, id=named), await _INPUT.first(conn, id=named)):
        if taken is not None and taken.session_id != row.session_id:
            return f"continuation {named} belongs to another session, {taken.session_id}"
        if taken is not None:
            return f"continuation {named} is something else in this session already"
    if row.assistant_message_id is not None:
        wrong = await fault_of_assistant(conn, row.session_id, row.assistant_message_id)
        if wrong is not None:
            return wrong
    if await is_overtaken(conn, row.session_id, row.assistant_message_id, row.time_created):
        return "overtaken: a newer answer is there"
    return None


async def fault_of_assistant(conn: AsyncConnection, session_id: str, message_id: str) -> str | None:
    """Say why this cannot be an assistant message of the session, None when it is one."""
    found = await _MESSAGE.first(conn, id=message_id)
    if found is None:
        return f"there is no assistant message {message_id}"
    if found.session_id != session_id:
        return f"assistant message {message_id} belongs to another session, {found.session_id}"
    if found.type != "assistant":
        return f"message {message_id} is no assistant message but of type {found.type}"
    return None


async def is_overtaken(conn: AsyncConnection, session_id: str, message_id: str | None, since: int) -> bool:
    """Say whether the session has a newer assistant message than this one of its own or, without one, than that time
    (in milliseconds)."""
    newest = await _NEWEST_ASSISTANT.first(conn, session_id=session_id)
    if newest is None:
        return False
    return bool(newest.time_created > since) if message_id is None else bool(newest.id != message_id)
