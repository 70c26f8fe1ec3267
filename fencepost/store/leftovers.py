"""What an ended or dead hand left open in an assistant message, and the events that close it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Text, bindparam, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.events import DurableEvent
from fencepost.domain.messages import MessageError, decode_message
from fencepost.domain.projection import INTERRUPTED, is_open
from fencepost.store import tables
from fencepost.store.event_log import Head
from fencepost.store.statement import Statement


@dataclass(frozen=True, slots=True)
class Row:
    """A message's row, undecoded, as the projection functions take it."""

    id: str
    type: str
    seq: int
    data: dict[str, Any]


_messages, _live = tables.session_message, tables.live_part
_NEWEST = Statement(
    select(_messages.c.id, _messages.c.type, _messages.c.seq, _messages.c.data)
    .where(
        _messages.c.session_id == bindparam("session_id"),
        _messages.c.type == func.any(bindparam("types", type_=ARRAY(Text))),
    )
    .order_by(_messages.c.seq.desc())
    .limit(1)
)
_LIVE = Statement(select(_live).where(_live.c.assistant_message_id == bindparam("message_id")))
_calls = tables.tool_call
_closed: BindParameter[str] = bindparam("closed_session")
# The condition on the status is written as the partial index says it.
_no_calls = update(_calls).where(_calls.c.session_id == _closed, text("status <> 'settled'")).values(status="settled")
_no_parts = delete(_live).where(_live.c.session_id == _closed)
_CLOSE_BOOKS = Statement(_no_parts.add_cte(_no_calls.cte("calls")))
CLOSING = (_no_calls.cte("calls"), _no_parts.cte("parts"))
"""What `close_books` does to `:closed_session`, for a statement that does more."""


async def newest_assistant(conn: AsyncConnection, session_id: str) -> Row | None:
    """Give the session's newest assistant message."""
    return await newest(conn, session_id, ("assistant",))


async def newest(conn: AsyncConnection, session_id: str, types: tuple[str, ...]) -> Row | None:
    """Give the session's newest message of these types. Raises MessageDecodeError for an assistant message whose row
    cannot be read."""
    row = await _NEWEST.first(conn, session_id=session_id, types=list(types))
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
    if not any(_needs_closing(part) for part in data["content"]):
        return []
    rows = await _LIVE.all(conn, message_id=message_id)
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


def _needs_closing(part: dict[str, Any]) -> bool:
    if part["type"] == "text":
        return not part["text"]
    return "completed" not in part.get("time", {}) if part["type"] == "reasoning" else is_open(part)


async def close_books(conn: AsyncConnection, session_id: str) -> None:
    """When a step is over, however it ended: no planned tool may start any more, and no part is live."""
    await _CLOSE_BOOKS.run(conn, closed_session=session_id)
