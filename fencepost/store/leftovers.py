"""What an ended or dead hand left open in an assistant message, and the events that close it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.events import DurableEvent
from fencepost.domain.messages import MessageError, decode_message
from fencepost.domain.projection import INTERRUPTED, is_open
from fencepost.store import tables
from fencepost.store.event_log import Head


@dataclass(frozen=True, slots=True)
class Row:
    """A message's row, undecoded, as the projection functions take it."""

    id: str
    type: str
    seq: int
    data: dict[str, Any]


async def newest_assistant(conn: AsyncConnection, session_id: str) -> Row | None:
    """Give the session's newest assistant message."""
    return await newest(conn, session_id, ("assistant",))


async def newest(conn: AsyncConnection, session_id: str, types: tuple[str, ...]) -> Row | None:
    """Give the session's newest message of these types. Raises MessageDecodeError for an assistant message whose row
    cannot be read."""
    messages = tables.session_message
    row = (
        await conn.execute(
            select(messages.c.id, messages.c.type, messages.c.seq, messages.c.data)
            .where(messages.c.session_id == session_id, messages.c.type.in_(types))
            .order_by(messages.c.seq.desc())
            .limit(1)
        )
    ).first()
    if row is None:
        return None
    if row.type == "assistant":
        decode_message(row.id, row.type, row.data)  # so that its parts are what they are taken for
    return Row(row.id, row.type, row.seq, row.data)


async def close_open_parts(
    conn: AsyncConnection, head: Head, message_id: str, data: dict[str, Any], *, tools_only: bool = False
) -> list[DurableEvent]:
    """Give the events that end open text and reasoning with what is known of them, and fail open tools.

    What is known of an open part is its text so far as kept for readers, at most about a second old. A part that has
    its durable text keeps it, whatever was kept of it before.
    """
    live = tables.live_part
    rows = await conn.execute(select(live).where(live.c.assistant_message_id == message_id))
    kept = {(row.kind, row.part_id): row.text for row in rows}
    about = {"timestamp": head.now, "session_id": head.session_id, "assistant_message_id": message_id}
    made: list[DurableEvent] = []
    for part in data["content"]:
        text = kept.get((part["type"], part["id"]), "")
        if part["type"] == "text" and text and not part["text"] and not tools_only:
            made.append(events.TextEnded(**about, text_id=part["id"], text=text))
        elif part["type"] == "reasoning" and "completed" not in part.get("time", {}) and not tools_only:
            made.append(events.ReasoningEnded(**about, reasoning_id=part["id"], text=text))
        elif is_open(part):
            if part["state"]["status"] == "pending" and text and not part["state"]["input"]:
                made.append(events.ToolInputEnded(**about, call_id=part["id"], text=text))
            executed = bool((part.get("provider") or {}).get("executed"))
            made.append(
                events.ToolFailed(
                    **about,
                    call_id=part["id"],
                    error=MessageError(message=INTERRUPTED),
                    provider=events.ToolProviderInfo(executed=executed),
                )
            )
    return made


async def close_books(conn: AsyncConnection, session_id: str) -> None:
    """When a step is over, however it ended: no planned tool may start any more, and no part is live."""
    calls, live = tables.tool_call, tables.live_part
    mine = (calls.c.session_id == session_id) & text("status <> 'settled'")  # as the partial index says it
    await conn.execute(update(calls).where(mine).values(status="settled"))
    await conn.execute(delete(live).where(live.c.session_id == session_id))
