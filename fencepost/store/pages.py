"""Pages: of a session's messages, of its events, and of sessions. Cursors are opaque texts for clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.cursor import Cursor, Order, checked_limit, starting
from fencepost.domain.errors import MessageNotFoundError
from fencepost.domain.events import MANIFEST, SessionCreated
from fencepost.domain.messages import Message, decode_message
from fencepost.store import event_log, sessions, tables
from fencepost.store.event_log import StoredEvent
from fencepost.store.sessions import Session

MESSAGES_AT_MOST = 200
EVENTS_AT_MOST = 100
SESSIONS_AT_MOST = 200

# The creation is a row of the session for its readers; in its history it is not shown, and leaves a legal gap.
_VISIBLE = frozenset(MANIFEST) - {SessionCreated.stored_type()}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Items in the page's order, and the cursors of the pages on either side.

    A cursor is None when there is nothing on that side. On the side of what comes new there always is a cursor, unless
    the page is empty: asked again later, it may give more.
    """

    items: tuple[Item, ...]
    previous: str | None
    next: str | None


@dataclass(frozen=True, slots=True)
class History:
    """Durable events in order; `has_more` says whether there were more at the time of the read."""

    events: tuple[StoredEvent, ...]
    has_more: bool


async def history(conn: AsyncConnection, session_id: str, after: int | None = None, limit: int = 50) -> History:
    """Give up to `limit` (1 to 100) durable events of a session with a sequence above `after`, from the first by
    default. The creation is left out, so sequences may have gaps.

    Raises NotFoundError for an unknown session and InvalidInputError for a bad limit.
    """
    checked_limit(limit, EVENTS_AT_MOST)
    await sessions.get(conn, session_id)
    found = await event_log.read_after(conn, session_id, -1 if after is None else after, limit + 1, _VISIBLE)
    return History(tuple(found[:limit]), len(found) > limit)


async def message(conn: AsyncConnection, session_id: str, message_id: str) -> Message:
    """Give one message. Raises NotFoundError for an unknown session and MessageNotFoundError for a message that the
    session does not have, though another one may; MessageDecodeError when it cannot be read."""
    await sessions.get(conn, session_id)
    messages = tables.session_message
    named = select(messages).where(messages.c.id == message_id, messages.c.session_id == session_id)
    row = (await conn.execute(named)).first()
    if row is None:
        raise MessageNotFoundError(f"no message {message_id} in session {session_id}")
    return decode_message(row.id, row.type, row.data)


async def messages(
    conn: AsyncConnection, session_id: str, *, limit: int = 50, order: Order | None = None, cursor: str | None = None
) -> Page[Message]:
    """Give a page of up to `limit` (1 to 200) messages, newest first unless the order is `asc`.

    The page of a cursor whose message is gone is empty. Raises NotFoundError, InvalidInputError for a bad limit or
    for an order beside a cursor, InvalidCursorError, and MessageDecodeError.
    """
    checked_limit(limit, MESSAGES_AT_MOST)
    order, at = starting(cursor, order, "desc")
    await sessions.get(conn, session_id)
    log = tables.session_message
    statement = select(log).where(log.c.session_id == session_id)
    if at is not None:
        anchor = select(log.c.seq).where(log.c.id == at.id, log.c.session_id == session_id).scalar_subquery()
        statement = statement.where(log.c.seq > anchor if at.ascending else log.c.seq < anchor)
    ascending = order == "asc" if at is None else at.ascending
    statement = statement.order_by(log.c.seq if ascending else log.c.seq.desc()).limit(limit + 1)
    rows = (await conn.execute(statement)).all()
    return _page(
        rows,
        limit,
        order,
        at,
        lambda row: decode_message(row.id, row.type, row.data),
        lambda row, direction: Cursor(id=row.id, order=order, direction=direction),
    )


async def session_list(
    conn: AsyncConnection,
    *,
    limit: int = 50,
    order: Order | None = None,
    cursor: str | None = None,
    search: str | None = None,
    directory: str | None = None,
    workspace: str | None = None,
    archived: bool = False,
) -> Page[Session]:
    """Give a page of up to `limit` (1 to 200) sessions, by creation time, newest first unless the order is `asc`.

    `search` is a part of the title, whatever its case; `directory` and `workspace` (an id) are where a session is.
    Archived sessions are left out, or with `archived` the only ones. A cursor goes with the same filters as its page.
    Raises InvalidInputError and InvalidCursorError as `messages` does.
    """
    checked_limit(limit, SESSIONS_AT_MOST)
    order, at = starting(cursor, order, "desc")
    rows = tables.session.c
    statement = select(tables.session).where(
        rows.time_archived.is_not(None) if archived else rows.time_archived.is_(None)
    )
    if search is not None:
        statement = statement.where(rows.title.icontains(search, autoescape=True))
    if directory is not None:
        statement = statement.where(rows.directory == directory)
    if workspace is not None:
        statement = statement.where(rows.workspace_id == workspace)
    key = tuple_(rows.time_created, rows.id)
    if at is not None:
        anchor = tuple_(at.time or 0, at.id)
        statement = statement.where(key > anchor if at.ascending else key < anchor)
    ascending = order == "asc" if at is None else at.ascending
    columns = [rows.time_created, rows.id]
    statement = statement.order_by(*(columns if ascending else [column.desc() for column in columns]))
    return _page(
        (await conn.execute(statement.limit(limit + 1))).mappings().all(),
        limit,
        order,
        at,
        sessions.session_of,
        lambda row, direction: Cursor(id=row["id"], order=order, direction=direction, time=row["time_created"]),
    )


def _page(
    rows: Sequence[Any],
    limit: int,
    order: Order,
    at: Cursor | None,
    read: Callable[[Any], Item],
    beside: Callable[[Any, Any], Cursor],
) -> Page[Item]:
    """Make a page of rows that were read away from the cursor's item, one more than the limit if there were more."""
    more, rows = len(rows) > limit, list(rows[:limit])
    if not rows:
        return Page((), None, None)
    backwards = at is not None and at.direction == "previous"
    if backwards:
        rows.reverse()
    has_previous = more if backwards else at is not None
    has_next = True if backwards else more
    # What is new comes at one end, and may come any time.
    has_previous, has_next = has_previous or order == "desc", has_next or order == "asc"
    return Page(
        tuple(read(row) for row in rows),
        beside(rows[0], "previous").encode() if has_previous else None,
        beside(rows[-1], "next").encode() if has_next else None,
    )
