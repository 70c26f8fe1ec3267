"""`fencepost session events`: what is in a session's log, and what comes into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fencepost.cli import arguments, listing, terminal
from fencepost.cli.entry import OK
from fencepost.cli.records import Records, open_records
from fencepost.cli.terminal import Notices
from fencepost.domain.errors import FencepostError, UnavailableError
from fencepost.local import LocalStack
from fencepost.store.event_log import StoredEvent

Putting: TypeAlias = Callable[[StoredEvent], None]

_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Range:
    """Which events are wanted: those after a sequence, and with `follow` those to come."""

    session_id: str
    after: int = -1
    follow: bool = False


async def events(wanted: Range, *, as_json: bool, config: Path | None) -> int:
    """Show the events. Following ends only by a signal, or when nobody reads any more."""
    arguments.session_id(wanted.session_id)

    def put(event: StoredEvent) -> None:
        if as_json:
            listing.put_json(listing.event_json(event))
        else:
            terminal.out(listing.event_line(event))

    async with open_records(config) as records:
        await records.client.get(wanted.session_id)
        if wanted.follow:
            async with _looked_after(records):
                await _follow(records, wanted, put)
            return OK
        head = await records.client.head(wanted.session_id)
        if wanted.after < head:
            await _put_all(records, wanted, put, head)
    return OK


async def _follow(records: Records, wanted: Range, put: Putting) -> None:
    reading = asyncio.create_task(_put_all(records, wanted, put))
    leaving = asyncio.create_task(_reader_gone())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise BrokenPipeError
        await reading
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)


async def _put_all(records: Records, wanted: Range, put: Putting, last: int | None = None) -> None:
    """Put every event, the creation too, up to the last one or for ever."""
    async with aclosing(records.client.watch(wanted.session_id, wanted.after)) as watched:
        async for event in watched:
            put(event)
            if event.seq == last:
                return


async def _reader_gone() -> None:
    """Wait until nobody reads standard output: a quiet session would never find out by writing."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if not terminal.is_read():
            return


@asynccontextmanager
async def _looked_after(records: Records) -> AsyncIterator[None]:
    """Say for the time of the block when PostgreSQL goes and when it is back; start it again where it is local."""
    looking = asyncio.create_task(_look(records, Notices()))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait({looking})


async def _look(records: Records, say: Notices) -> None:
    away = False
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            await records.client.check("PostgreSQL")
        except UnavailableError as error:
            if not away:
                say(f"{error.message}; waiting for it")
            away = True
            if records.home is not None:
                await _revive(records.home, say)
        else:
            if away:
                say("PostgreSQL is back")
            away = False


async def _revive(home: Path, say: Notices) -> None:
    def start_and_leave() -> None:
        with LocalStack(home, temporal=False):
            pass  # this command uses the stack, so nothing ends with this second use of it

    reviving = asyncio.ensure_future(asyncio.to_thread(start_and_leave))
    try:
        await asyncio.shield(reviving)
    except FencepostError as error:
        say(error.message)
    except asyncio.CancelledError:
        await asyncio.wait({reviving})  # the thread goes on, and holds the lock that the clean-up needs
        raise
