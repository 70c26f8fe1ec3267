"""`fencepost session create, list, show, messages, archive, delete`: what only the database has to be there for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fencepost.cli import arguments, listing, terminal
from fencepost.cli import choice as choices
from fencepost.cli.entry import OK
from fencepost.cli.stack import open_place
from fencepost.cli.terminal import Notices
from fencepost.client import Client, open_client
from fencepost.config import Settings, external_services, load_settings
from fencepost.domain.errors import InvalidInputError, NotFoundError, UnavailableError
from fencepost.domain.inbox import Location
from fencepost.domain.messages import Message
from fencepost.domain.status import Activity
from fencepost.local import LocalStack
from fencepost.local.state import StateFile
from fencepost.local.temporal import TemporalServer
from fencepost.store import migrate
from fencepost.store.sessions import NewSession

_PAGE = 200


@dataclass(frozen=True, slots=True)
class Records:
    """A client for what is in the database. `has_temporal` says whether Temporal may be asked too, and `home` is
    where PostgreSQL was started if it is ours to look after."""

    client: Client
    has_temporal: bool
    home: Path | None


@asynccontextmanager
async def open_records(config: Path | None) -> AsyncIterator[Records]:
    """Open the configured database, or the local one, started for the time of the block if it does not run.

    Raises ConfigurationError, UnavailableError or SchemaVersionError.
    """
    settings, environ = load_settings(config), dict(os.environ)
    given = external_services(settings, environ)
    async with AsyncExitStack() as stack:
        home, has_temporal = None, given.temporal
        if not given.postgresql:
            say = Notices()
            home = settings.home
            local = await stack.enter_async_context(LocalStack(home, temporal=False, progress=say))
            settings = settings.model_copy(update={"database_url": local.database_url})
            await migrate.upgrade(local.database_url, say=say)
        if not given.temporal:
            address = await asyncio.to_thread(_local_temporal, settings)
            has_temporal = address is not None
            environ = {name: value for name, value in environ.items() if not name.startswith("TEMPORAL_")}
            environ |= {"TEMPORAL_CONFIG_FILE": os.devnull} | ({} if address is None else {"TEMPORAL_ADDRESS": address})
        client = await stack.enter_async_context(open_client(settings, environ, reading=True))
        yield Records(client, has_temporal, home)


def _local_temporal(settings: Settings) -> str | None:
    """Give the address of this machine's Temporal if somebody has it running."""
    if not settings.home.is_dir():
        return None
    with StateFile(settings.home).locked(lambda: None):
        running = TemporalServer(settings.home).running()
    return None if running is None else f"127.0.0.1:{running[0]}"


@dataclass(frozen=True, slots=True)
class Attributes:
    """What `create` is given."""

    session_id: str | None = None
    title: str | None = None
    agent: str | None = None
    model: str | None = None
    directory: Path | None = None


async def create(given: Attributes, *, as_json: bool, config: Path | None) -> int:
    """Create a session and print its id."""
    settings = load_settings(config)
    wanted_id = None if given.session_id is None else arguments.session_id(given.session_id, "--id")
    choice = choices.choose(settings, dict(os.environ), model=given.model, agent=given.agent, base_url=None)
    if choices.is_local(choice):
        choices.check_names(choice)
    directory = arguments.directory(given.directory)
    new = NewSession(Location(directory=directory), given.agent, choice.model, given.title)
    say = Notices()
    async with open_records(config) as records:
        try:
            session = await records.client.get(wanted_id or "")
            say(f"session {session.id} was there already, and stays as it is")
        except NotFoundError:
            session = await records.client.create(new, wanted_id)
            say(f'`fencepost session prompt {session.id} "..."` sends it input')
    listing.put_json(listing.session_json(session)) if as_json else terminal.out(session.id)
    return OK


@dataclass(frozen=True, slots=True)
class Selection:
    """Which sessions `list` shows."""

    limit: int = 20
    search: str | None = None
    directory: Path | None = None
    archived: bool = False
    everything: bool = False
    cursor: str | None = None


async def list_sessions(wanted: Selection, *, as_json: bool, config: Path | None) -> int:
    """Show a page of sessions, or all pages."""
    directory = None if wanted.directory is None else arguments.directory(wanted.directory, exists=False)
    cursor, shown = wanted.cursor, 0
    async with open_records(config) as records:
        while True:
            page = await records.client.list(
                limit=_PAGE if wanted.everything else wanted.limit,
                cursor=cursor,
                search=wanted.search,
                directory=directory,
                archived=wanted.archived,
            )
            does = await records.client.activities([session.id for session in page.items])
            for session in page.items:
                shown += 1
                activity = does.get(session.id, Activity("idle"))  # deleted between the two questions
                if as_json:
                    listing.put_json(listing.session_json(session, activity))
                    continue
                for line in listing.session_lines(session, activity):
                    terminal.out(line)
            cursor = page.next
            if cursor is None or not wanted.everything:
                break
    say = Notices()
    if cursor is not None:
        say(f"there are more: the same again with --cursor {cursor}, or with --all")
    elif not shown:
        say("no sessions" if wanted == Selection() else "no sessions that fit")
    return OK


async def show(session_id: str, *, as_json: bool, config: Path | None) -> int:
    """Show a session, what waits in its inbox, what it does as the database has it, and what its run says."""
    arguments.session_id(session_id)
    async with open_records(config) as records:
        session = await records.client.get(session_id)
        pending = await records.client.pending(session_id)
        activity = (await records.client.activities([session_id])).get(session_id, Activity("idle"))
        run, doing, status = await _doing(records, session_id)
    if as_json:
        value = {
            **listing.session_json(session, activity),
            "run": run,
            "pending": [receipt.to_wire() for receipt in pending],
        }
        listing.put_json(value | ({} if status is None else {"status": status}))
        return OK
    for line in listing.detail_lines(session, pending, activity, doing):
        terminal.out(line)
    return OK


async def _doing(records: Records, session_id: str) -> tuple[str, str, dict[str, object] | None]:
    """Give whether a run is open (open, none, unknown), what it does in words, and its status as a worker has it."""
    if not records.has_temporal:
        return "unknown", "not at work: Temporal does not run on this machine now", None
    try:
        await records.client.check("Temporal")
        if await records.client.open_queue(session_id) is None:
            return "none", "none is open", None
    except UnavailableError as error:
        return "unknown", f"unknown: {error.message}", None
    try:
        status = await records.client.status(session_id)
    except UnavailableError:
        return "open", "a run is open, and no worker says what it does", None
    if status.phase == "idle":  # ended between the two questions
        return "none", "none is open", None
    return "open", listing.status_text(status), status.to_wire()


async def messages(session_id: str, most: int | None, *, as_json: bool, config: Path | None) -> int:
    """Show the newest messages, at most so many, or all; oldest first."""
    arguments.session_id(session_id)
    async with open_records(config) as records:
        if most is None:
            found, more = await records.client.messages(session_id), False
        else:
            page = await records.client.message_page(session_id, limit=most)
            found, more = list(reversed(page.items)), page.next is not None
    if more:
        Notices()(f"only the newest {len(found)} messages: --all shows every one")
    _put_messages(found, as_json=as_json)
    return OK


def _put_messages(found: list[Message], *, as_json: bool) -> None:
    for number, message in enumerate(found):
        if as_json:
            listing.put_json(message.to_wire())
            continue
        if number and message.type == "user":
            terminal.out("")
        for line in listing.message_lines(message):
            terminal.out(line)


async def archive(session_id: str, *, undo: bool, as_json: bool, config: Path | None) -> int:
    """Put a session away, or take it back."""
    arguments.session_id(session_id)
    async with open_records(config) as records:
        session = await records.client.archive(session_id, archived=not undo)
    if as_json:
        listing.put_json(listing.session_json(session))
    else:
        terminal.out(f"{session.id} {'is back in the list' if undo else 'is archived'}")
    return OK


async def delete(session_id: str, *, sure: bool, as_json: bool, config: Path | None) -> int:
    """Delete a session for good. Temporal is asked first whether a run of it is open."""
    arguments.session_id(session_id)
    if not sure:
        raise InvalidInputError(f"nobody can be asked here: `fencepost session delete {session_id} --yes` deletes it")
    settings, environ = load_settings(config), dict(os.environ)
    async with (
        open_place(settings, environ, Notices()) as place,
        open_client(place.settings, place.environ) as client,
    ):
        await client.delete(session_id)
    if as_json:
        listing.put_json({"id": session_id, "deleted": True})
    else:
        terminal.out(f"{session_id} is deleted")
    return OK
