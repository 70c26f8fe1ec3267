"""One tool call: started once, by compare-and-set before its effect, and settled once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, column, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
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

_calls, _messages = tables.tool_call, tables.session_message
_mine = (
    (_calls.c.assistant_message_id == bindparam("message_id"))
    & (_calls.c.call_id == bindparam("named"))
    & (_calls.c.execution_id == bindparam("execution"))
)
_START = Statement(
    text(
        "SELECT * FROM fencepost_start_tool"
        "(:session_id, :execution_id, :owner_id, :message_id, :call_id, :lease_length, :renew_after)"
    ).columns(*ownership.LOCKED, column("done"), column("effect_key"), column("data", JSONB), column("directory"))
)
_settled = (
    update(_calls)
    .where(_mine, _calls.c.status != "settled")
    .values(status="settled", time_updated=bindparam("time_updated"))
    .returning(_calls.c.call_id)
    .cte("settled")
)
_SETTLE = Statement(
    select(_messages.c.data).select_from(_settled).join(_messages, _messages.c.id == bindparam("message_id"))
)
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
    """Take a planned call from `called` to `started`, in one statement: it may be run alone. Its effect may begin only
    after this has committed.

    Raises OwnershipLostError when the token does not hold, the lease ran out, or the call was started already.
    """
    call_id = clean_text(call_id)
    found = await _START.first(
        conn,
        session_id=token.session_id,
        execution_id=token.execution_id,
        owner_id=token.owner_id,
        message_id=message_id,
        call_id=call_id,
        lease_length=lease.length,
        renew_after=lease.renew_after,
    )
    if not found.done:
        await ownership.hold(conn, token, unexpired=True, found=found)
        raise OwnershipLostError(f"tool call {call_id} is not to be started by execution {token.execution_id}")
    parts = reversed(found.data["content"])
    part = next(part for part in parts if part["type"] == "tool" and part["id"] == call_id)
    return PlannedCall(part["name"], part["state"]["input"], found.effect_key, found.data["agent"], found.directory)


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
