"""One tool call: started once, by compare-and-set before its effect, and settled once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.clean import clean_text
from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.events import ToolFailed, ToolSuccess
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import Token
from fencepost.store import ownership, tables
from fencepost.store.event_log import Entry
from fencepost.store.ownership import Lease
from fencepost.store.statement import Statement

_calls, _messages, _sessions = tables.tool_call, tables.session_message, tables.session
_mine = (
    (_calls.c.assistant_message_id == bindparam("message_id"))
    & (_calls.c.call_id == bindparam("named"))
    & (_calls.c.execution_id == bindparam("execution"))
)
_started = (
    update(_calls)
    .where(_mine, _calls.c.status == "called")
    .values(status="started", time_updated=bindparam("time_updated"))
    .returning(_calls.c.effect_key)
    .cte("started")
)
_message = _messages.c.id == bindparam("message_id")
_START = Statement(
    select(_started.c.effect_key, _messages.c.data, _sessions.c.directory)
    .select_from(_started)
    .join(_messages, _message)
    .join(_sessions, _sessions.c.id == _messages.c.session_id)
)
_settled = (
    update(_calls)
    .where(_mine, _calls.c.status != "settled")
    .values(status="settled", time_updated=bindparam("time_updated"))
    .returning(_calls.c.call_id)
    .cte("settled")
)
_SETTLE = Statement(select(_messages.c.data).select_from(_settled).join(_messages, _message))
_REFUSE = Statement(
    update(_calls)
    .where(_mine, _calls.c.status == "called")
    .values(status="settled", time_updated=bindparam("time_updated"))
)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call as the log records it: the tool's name, its input, and the key that its effect carries."""

    name: str
    input: dict[str, Any]
    effect_key: str
    agent: str
    directory: str


async def start(conn: AsyncConnection, token: Token, message_id: str, call_id: str, lease: Lease) -> PlannedCall:
    """Take a planned call from `called` to `started`. Its effect may begin only after this has committed.

    Raises OwnershipLostError when the token does not hold, the lease ran out, or the call was started already.
    """
    held = await ownership.hold(conn, token, unexpired=True)
    call_id = clean_text(call_id)
    started = await _START.first(
        conn, message_id=message_id, named=call_id, execution=token.execution_id, time_updated=held.head.now
    )
    if started is None:
        raise OwnershipLostError(f"tool call {call_id} is not to be started by execution {token.execution_id}")
    await ownership.keep(conn, held, lease)
    for part in reversed(started.data["content"]):
        if part["type"] == "tool" and part["id"] == call_id:
            return PlannedCall(
                part["name"], part["state"]["input"], started.effect_key, started.data["agent"], started.directory
            )
    raise OwnershipLostError(f"tool call {call_id} is not in message {message_id}")


async def settle(
    conn: AsyncConnection, token: Token, message_id: str, call_id: str, outcome: ToolSuccess | ToolFailed, lease: Lease
) -> None:
    """Record how a call ended. Raises OwnershipLostError when the token does not hold or the call is settled."""
    held = await ownership.hold(conn, token)
    call_id = clean_text(call_id)
    settled = await _SETTLE.first(
        conn, message_id=message_id, named=call_id, execution=token.execution_id, time_updated=held.head.now
    )
    if settled is None:
        raise OwnershipLostError(f"tool call {call_id} is settled already")
    event = outcome.model_copy(update={"timestamp": held.head.now})
    entry = Entry(derived_id("evt", token.execution_id, message_id, "tool", call_id), event)
    await ownership.append(conn, held, [entry], lease, message=(message_id, settled.data))


async def refuse(conn: AsyncConnection, token: Token, outcome: ToolFailed, lease: Lease) -> bool:
    """Settle a call as failed that no worker has taken; from then on none can start it. False when it has been started
    or settled, which is left as it is. Raises OwnershipLostError."""
    held = await ownership.hold(conn, token)
    message_id, call_id = outcome.assistant_message_id, clean_text(outcome.call_id)
    moved = await _REFUSE.run(
        conn, message_id=message_id, named=call_id, execution=token.execution_id, time_updated=held.head.now
    )
    if moved != 1:
        return False
    event = outcome.model_copy(update={"timestamp": held.head.now})
    entry = Entry(derived_id("evt", token.execution_id, message_id, "tool", call_id), event)
    await ownership.append(conn, held, [entry], lease)
    return True
