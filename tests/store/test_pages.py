"""Pages of messages, events and sessions: nothing twice, nothing left out, and an end that is known."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.domain import events
from fencepost.domain.cursor import Cursor
from fencepost.domain.errors import InvalidCursorError, InvalidInputError, MessageNotFoundError, NotFoundError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location
from fencepost.domain.messages import SyntheticMessage
from fencepost.store import pages, readers, sessions
from fencepost.store.event_log import StoredEvent
from fencepost.store.sessions import NewSession
from tests.store.kit import StoreKit


async def _notes(store: StoreKit, session_id: str, *words: str) -> list[str]:
    """Add one message for each word; gives their ids. Times go backwards: they order nothing."""
    ids = [fresh_id("msg") for _ in words]
    made = [
        events.Synthetic(timestamp=9_000 - n, session_id=session_id, message_id=message_id, text=word)
        for n, (message_id, word) in enumerate(zip(ids, words, strict=True))
    ]
    await store.append(session_id, *made)
    return ids


# History


async def _history(store: StoreKit, session_id: str, *args: Any) -> pages.History:
    async with store.database.read() as conn:
        return await pages.history(conn, session_id, *args)


async def _walk(
    store: StoreKit, session_id: str, limit: int, between: Callable[[], Awaitable[Any]] | None = None
) -> list[StoredEvent]:
    found: list[StoredEvent] = []
    after = None
    while True:
        page = await _history(store, session_id, after, limit)
        found += page.events
        if not page.has_more:
            return found
        after = page.events[-1].seq
        if between is not None:
            await between()


@pytest.mark.conformance("HIS-01")
async def test_a_session_without_history_has_one_finished_page(store: StoreKit, session_id: str) -> None:
    """Its creation is in the log, and not in its history."""
    assert [event.type for event in await store.events(session_id)] == ["session.created.1"]
    for after in (None, -1, 0, 100):
        assert await _history(store, session_id, after) == pages.History((), has_more=False)


@pytest.mark.conformance("HIS-02")
async def test_a_page_begins_behind_its_sequence(store: StoreKit, session_id: str) -> None:
    """Also when that is the last one, or lies before the first."""
    await _notes(store, session_id, *"abcd")

    for after, seqs in ((None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (2, [3, 4]), (3, [4]), (4, []), (99, [])):
        assert [event.seq for event in (await _history(store, session_id, after)).events] == seqs


@pytest.mark.conformance("HIS-03")
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_repeat_nothing_and_skip_nothing(store: StoreKit, session_id: str, limit: int) -> None:
    """Put together they are the log without what is not shown; other sessions do not come in between."""
    other = await store.new_session()
    for n in range(5):
        await _notes(store, session_id, str(n), "and")
        await _notes(store, other, "elsewhere")

    log = await store.events(session_id)
    assert await _walk(store, session_id, limit) == [event for event in log if event.type != "session.created.1"]


@pytest.mark.conformance("HIS-04")
async def test_what_comes_between_two_pages_is_in_the_next(store: StoreKit, session_id: str) -> None:
    """The walk goes on until there is nothing new."""
    await _notes(store, session_id, *"abc")
    more = iter(["de", "f"])

    async def between() -> None:
        await _notes(store, session_id, *next(more, ""))

    walked = await _walk(store, session_id, 2, between)
    assert [event.data["text"] for event in walked] == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.conformance("HIS-05")
async def test_the_end_is_known_at_the_limit_and_one_past_it(store: StoreKit, session_id: str) -> None:
    """As many as the limit are all; one more is not."""
    await _notes(store, session_id, *"abc")
    assert not (await _history(store, session_id, None, 3)).has_more
    await _notes(store, session_id, "d")

    page = await _history(store, session_id, None, 3)
    assert (len(page.events), page.has_more) == (3, True)
    rest = await _history(store, session_id, page.events[-1].seq, 3)
    assert ([event.data["text"] for event in rest.events], rest.has_more) == (["d"], False)


@pytest.mark.conformance("HIS-06")
async def test_an_unknown_session_has_no_pages(store: StoreKit) -> None:
    """Not even empty ones."""
    async with store.database.read() as conn:
        for ask in (pages.history(conn, "ses_none"), pages.messages(conn, "ses_none")):
            with pytest.raises(NotFoundError, match="ses_none"):
                await ask
        with pytest.raises(NotFoundError, match="ses_none"):
            await pages.message(conn, "ses_none", "msg_1")


async def test_limits_are_kept(store: StoreKit, session_id: str) -> None:
    """From 1 to 100 events, to 200 messages or sessions."""
    async with store.database.read() as conn:
        for limit in (0, -1, 101):
            with pytest.raises(InvalidInputError, match="from 1 to 100"):
                await pages.history(conn, session_id, None, limit)
        for limit in (0, 201):
            with pytest.raises(InvalidInputError, match="from 1 to 200"):
                await pages.messages(conn, session_id, limit=limit)
            with pytest.raises(InvalidInputError, match="from 1 to 200"):
                await pages.session_list(conn, limit=limit)


# Messages


async def _messages(store: StoreKit, session_id: str, **options: Any) -> tuple[str, pages.Page[Any]]:
    """Give the texts of a page as one word, and the page."""
    async with store.database.read() as conn:
        page = await pages.messages(conn, session_id, **options)
    return "".join(getattr(message, "text", "?") for message in page.items), page


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_messages_can_be_paged_there_and_back(store: StoreKit, session_id: str, order: Any) -> None:
    """The same pages in both directions, and an end where nothing new can come."""
    await _notes(store, session_id, *"abcdefg")
    words = "abcdefg" if order == "asc" else "gfedcba"

    first, page = await _messages(store, session_id, limit=3, order=order)
    second, middle = await _messages(store, session_id, limit=3, cursor=page.next)
    third, last = await _messages(store, session_id, limit=3, cursor=middle.next)
    assert (first, second, third) == (words[:3], words[3:6], words[6:])
    assert (page.previous is None, last.next is None) == (order == "asc", order == "desc")
    back, middle_again = await _messages(store, session_id, limit=3, cursor=last.previous)
    assert (back, middle_again) == (second, middle)
    assert await _messages(store, session_id, limit=3, cursor=middle_again.previous) == (first, page)


async def test_new_messages_are_found_from_the_page_before_them(store: StoreKit, session_id: str) -> None:
    """The cursor on that side gives an empty page until they come."""
    await _notes(store, session_id, *"ab")
    for order, side in (("asc", "next"), ("desc", "previous")):
        _, page = await _messages(store, session_id, order=order)
        cursor = getattr(page, side)
        assert await _messages(store, session_id, cursor=cursor) == ("", pages.Page((), None, None))
        await _notes(store, session_id, order)
        assert (await _messages(store, session_id, cursor=cursor))[0] == order


async def test_the_default_page_is_the_newest_fifty(store: StoreKit, session_id: str) -> None:
    """Newest first."""
    await _notes(store, session_id, *map(str, range(60)))

    _, page = await _messages(store, session_id)
    assert [message.text for message in page.items] == [str(n) for n in range(59, 9, -1)]


async def test_a_cursor_is_text_for_an_address_and_read_with_care(store: StoreKit, session_id: str) -> None:
    """base64url of JSON; anything else is refused, and an item that is gone gives an empty page."""
    ids = await _notes(store, session_id, *"abc")
    _, page = await _messages(store, session_id, limit=2)
    assert page.next is not None
    text = base64.urlsafe_b64decode(page.next + "=" * (-len(page.next) % 4))
    assert json.loads(text) == {"id": ids[1], "order": "desc", "direction": "next"}

    for wrong in ("", "%", "e30", "é", base64.urlsafe_b64encode(b'{"id":"x","order":"up"}').decode()):
        with pytest.raises(InvalidCursorError, match="cannot be read"):
            await _messages(store, session_id, cursor=wrong)
    with pytest.raises(InvalidInputError, match="not together with a cursor"):
        await _messages(store, session_id, cursor=page.next, order="asc")
    for gone in ("msg_gone", (await _notes(store, await store.new_session(), "x"))[0]):
        cursor = Cursor(id=gone, order="asc", direction="next").encode()
        assert await _messages(store, session_id, cursor=cursor) == ("", pages.Page((), None, None))


async def test_one_message_is_its_own_sessions(store: StoreKit, session_id: str) -> None:
    """Another session's is not found."""
    [mine] = await _notes(store, session_id, "mine")
    [foreign] = await _notes(store, await store.new_session(), "foreign")

    async with store.database.read() as conn:
        found = await pages.message(conn, session_id, mine)
        assert isinstance(found, SyntheticMessage)
        assert found.text == "mine"
        for other in (foreign, "msg_none"):
            with pytest.raises(MessageNotFoundError, match=other):
                await pages.message(conn, session_id, other)


async def test_the_context_begins_at_the_last_compaction(store: StoreKit, session_id: str) -> None:
    """The summary is its first message."""
    about: dict[str, Any] = {"timestamp": 1, "session_id": session_id, "reason": "auto", "recent": ""}
    for n in range(2):
        await _notes(store, session_id, f"before {n}")
        await store.append(session_id, events.CompactionEnded(**about, message_id=fresh_id("msg"), text=f"sum {n}"))
    await _notes(store, session_id, "after")

    async with store.database.read() as conn:
        context = await readers.history(conn, session_id)
    assert [getattr(message, "summary", getattr(message, "text", "")) for message in context] == ["sum 1", "after"]


# Sessions


async def test_sessions_are_listed_by_filter_and_page(store: StoreKit) -> None:
    """By directory, workspace, part of the title, archived or not; both ways."""
    directory = f"/src/{fresh_id('ses')}"
    made = []
    for n in range(5):
        new = NewSession(Location(directory=directory, workspace_id=f"w{n % 2}"), title=f"Fix 100%_{n} Things")
        made.append(await store.do(sessions.create, fresh_id("ses"), new))
    # By creation time and then by id.
    odd = {session.id for session in made if session.location.workspace_id == "w1"}
    names = [session.id for session in sorted(made, key=lambda session: (session.time_created, session.id))]

    async def ids(**options: Any) -> tuple[list[str], pages.Page[Any]]:
        async with store.database.read() as conn:
            page = await pages.session_list(conn, directory=directory, **options)
        return [session.id for session in page.items], page

    assert (await ids())[0] == names[::-1]
    assert (await ids(order="asc"))[0] == names
    assert (await ids(workspace="w1"))[0] == [name for name in names[::-1] if name in odd]
    for search, count in (("100%_3 things", 1), ("FIX", 5), ("%_", 5), ("1__%", 0), ("", 5)):
        assert len((await ids(search=search))[0]) == count
    first, page = await ids(limit=2, order="asc")
    second, middle = await ids(limit=2, cursor=page.next)
    await store.do(sessions.delete, second[0])
    back, _ = await ids(limit=2, cursor=middle.previous)  # though the cursor's session is gone
    assert (first, second, back) == (names[:2], names[2:4], names[:2])
    archived = await store.do(sessions.archive, names[0])
    assert archived.time_archived is not None
    assert names[0] not in (await ids())[0]
    assert (await ids(archived=True))[0] == [names[0]]
    assert (await store.do(sessions.archive, names[0], archived=False)).time_archived is None
    assert names[0] in (await ids())[0]


async def test_sessions_that_were_made_at_once_are_all_listed(store: StoreKit) -> None:
    """Pages of one, though their times may be the same."""
    directory = f"/src/{fresh_id('ses')}"
    new = NewSession(Location(directory=directory))
    made = await asyncio.gather(*(store.do(sessions.create, fresh_id("ses"), new) for _ in range(8)))

    found: list[str] = []
    cursor = None
    while True:
        async with store.database.read() as conn:
            page = await pages.session_list(conn, directory=directory, limit=1, cursor=cursor)
        found += [session.id for session in page.items]
        cursor = page.next
        if cursor is None:
            break
    assert sorted(found) == sorted(session.id for session in made)
    assert len(found) == 8
