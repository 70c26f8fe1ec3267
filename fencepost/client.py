"""A client of sessions: admits input, follows what happens, waits for how it ends. Needs no worker's code.

Turns are asked for through Temporal, everything else is read from and written to the database. Outages of Temporal are
waited out; every request carries an id of its own, so that one sent twice counts once.

One client serves a whole process, a web server's too: it has one pool of connections and one that listens, for any
number of readers, and all its methods may be called at the same time. Times are in milliseconds since the epoch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, TypeAlias, TypeVar

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client as TemporalClient

from fencepost.config import Settings
from fencepost.domain import contracts
from fencepost.domain.attachments import is_large
from fencepost.domain.contracts import InterruptInput, PromptInput, SessionInput, StartInput, Status, TurnResult
from fencepost.domain.cursor import Order
from fencepost.domain.errors import ClaimRefusedError, ConfigurationError, InvalidInputError
from fencepost.domain.ids import check_session_id, fresh_id
from fencepost.domain.inbox import AgentAttachment, Delivery, FileAttachment, Location, Receipt
from fencepost.domain.messages import Message
from fencepost.domain.models import ModelRef
from fencepost.domain.status import Activity
from fencepost.domain.wire import misunderstood
from fencepost.relocations import relocate
from fencepost.runs import Runs
from fencepost.services import connect_temporal, temporal_when_asked
from fencepost.store import event_log, inbox, migrate, pages, readers, sessions, status, watching
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Announcer, Listener, Notice
from fencepost.store.moves import Move
from fencepost.store.ownership import owner_of
from fencepost.store.pages import History, Page
from fencepost.store.readers import Delta
from fencepost.store.sessions import NewSession, Session

Result = TypeVar("Result")
Service: TypeAlias = Literal["PostgreSQL", "Temporal"]
Messages: TypeAlias = list[Message]
Receipts: TypeAlias = list[Receipt]

_PAGE = 200


class Client:
    """Sessions as a program sees them. Made by `open_client`; one per process is enough."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        temporal: TemporalClient,
        listener: Listener,
        announcer: Announcer,
    ) -> None:
        self.settings = settings
        self.temporal = temporal
        self._runs = Runs(temporal)
        self._database = database
        self._listener = listener
        self._announcer = announcer
        self._stopped: deque[str] = deque(maxlen=1_000)

    # Sessions

    async def create(self, new: NewSession, session_id: str | None = None) -> Session:
        """Create a session, or give the existing one of this id unchanged. Raises InvalidInputError for a bad id."""
        session_id = fresh_id("ses") if session_id is None else session_id
        check_session_id(session_id)
        wanted = session_id
        return await self._write(wanted, lambda conn: sessions.create(conn, wanted, new))

    async def get(self, session_id: str) -> Session:
        """Give a session. Raises NotFoundError."""
        return await self._read(lambda conn: sessions.get(conn, session_id))

    async def list(
        self,
        *,
        limit: int = 50,
        order: Order | None = None,
        cursor: str | None = None,
        search: str | None = None,
        directory: str | None = None,
        archived: bool = False,
    ) -> Page[Session]:
        """Give a page of up to `limit` (1 to 200) sessions, newest first unless the order is `asc`.

        `search` is a part of the title. Archived sessions are left out, or with `archived` the only ones. A cursor
        goes with the filters of its page and without `order`. Raises InvalidInputError and InvalidCursorError.
        """
        return await self._read(
            lambda conn: pages.session_list(
                conn, limit=limit, order=order, cursor=cursor, search=search, directory=directory, archived=archived
            )
        )

    async def activities(self, session_ids: Sequence[str]) -> dict[str, Activity]:
        """Give what each of these sessions does, as the database has it: true without a worker and without Temporal."""
        return await self._read(lambda conn: status.activities(conn, session_ids))

    async def active(self) -> Sequence[str]:
        """Give the ids of the sessions that somebody is at work on: those with a live claim, oldest claim first."""
        return await self._read(status.active)

    async def switch_agent(self, session_id: str, agent: str) -> Session:
        """Let another agent take the session's next steps. Raises NotFoundError; a worker refuses an unknown agent."""
        return await self._write(session_id, lambda conn: sessions.switch_agent(conn, session_id, agent))

    async def switch_model(self, session_id: str, model: ModelRef) -> Session:
        """Let another model answer the session's next steps; the present one changes nothing, and no variant is the
        variant `default`. Raises NotFoundError; a worker refuses an unknown model."""
        return await self._write(session_id, lambda conn: sessions.switch_model(conn, session_id, model))

    async def move(self, session_id: str, location: Location) -> Move:
        """Let the session work elsewhere from now on; where it is already changes nothing, and files stay where they
        are. A turn that runs is interrupted, and goes on at the new place. Raises NotFoundError, and InvalidInputError
        for what cannot be a location."""
        move = await relocate(self._database, self._runs, session_id, location, self.settings.task_queue)
        self._announcer.send(session_id, Notice.look())
        return move

    async def archive(self, session_id: str, *, archived: bool = True) -> Session:
        """Put a session away, or take it back; it can be used all the same. Raises NotFoundError."""
        return await self._write(session_id, lambda conn: sessions.archive(conn, session_id, archived=archived))

    async def delete(self, session_id: str) -> None:
        """Delete a session with its log and messages, for good.

        Raises NotFoundError, and ClaimRefusedError while a run of it is open: interrupt it and wait for its result.
        """
        await self.get(session_id)
        if await self._runs.open_queue(session_id) is not None:
            raise ClaimRefusedError(f"session {session_id} is at work: interrupt it, and delete it then")
        await self._database.transact(lambda conn: sessions.delete(conn, session_id))

    # Messages and events

    async def messages(self, session_id: str) -> Messages:
        """Give all of the session's messages, oldest first. Raises NotFoundError and MessageDecodeError."""
        await self.get(session_id)
        found: Messages = []
        after = -1
        while True:
            seen = after
            page = await self._read(lambda conn: readers.page(conn, session_id, limit=_PAGE, after=seen))  # noqa: B023
            if not page:
                return found
            found += [message for _, message in page]
            after = page[-1][0]

    async def message_page(
        self, session_id: str, *, limit: int = 50, order: Order | None = None, cursor: str | None = None
    ) -> Page[Message]:
        """Give a page of up to `limit` (1 to 200) messages, newest first unless the order is `asc`.

        `cursor` is one that a page gave; it has its order. Raises NotFoundError, InvalidInputError,
        InvalidCursorError and MessageDecodeError.
        """
        return await self._read(lambda conn: pages.messages(conn, session_id, limit=limit, order=order, cursor=cursor))

    async def message(self, session_id: str, message_id: str) -> Message:
        """Give one message. Raises NotFoundError, and MessageNotFoundError also for another session's message."""
        return await self._read(lambda conn: pages.message(conn, session_id, message_id))

    async def context(self, session_id: str) -> Messages:
        """Give the messages that a model would be sent: those since the last compaction, oldest first.

        Raises NotFoundError and MessageDecodeError.
        """
        await self.get(session_id)
        return await self._read(lambda conn: readers.history(conn, session_id))

    async def history(self, session_id: str, after: int | None = None, limit: int = 50) -> History:
        """Give up to `limit` (1 to 100) durable events after a sequence, from the first by default, and whether there
        are more. The creation is not shown. Raises NotFoundError and InvalidInputError."""
        return await self._read(lambda conn: pages.history(conn, session_id, after, limit))

    def events(
        self, session_id: str, after: int = -1, *, capacity: int | None = None
    ) -> AsyncGenerator[StoredEvent | Delta]:
        """Follow a session: its durable events after a sequence, then what happens, text as it streams, for ever.

        A reader that is slow catches up from the database; with a `capacity`, in notices, it is ended with
        SubscriberOverflowError instead. See `readers.follow`.
        """
        return readers.follow(self._database, self._listener, session_id, after, capacity=capacity)

    def watch(
        self,
        session_id: str | None = None,
        after: int | None = None,
        *,
        types: Collection[str] | None = None,
        capacity: int | None = None,
    ) -> AsyncGenerator[StoredEvent]:
        """Follow durable events only: of one session, or of all from now on; of all types, or some, such as
        `session.next.step.ended`. Raises InvalidInputError for an unknown type. See `watching.watch`."""
        return watching.watch(self._database, self._listener, session_id, after, types=types, capacity=capacity)

    async def pending(self, session_id: str) -> Receipts:
        """Give the input that was admitted and not yet seen, oldest first. Raises NotFoundError."""
        await self.get(session_id)
        return await self._read(lambda conn: inbox.pending(conn, session_id))

    async def head(self, session_id: str) -> int:
        """Give the sequence of the session's last event, -1 when there is none."""
        return await self._read(lambda conn: event_log.latest(conn, session_id))

    # Input and turns

    async def prompt(
        self,
        session_id: str,
        text: str,
        *,
        files: Sequence[FileAttachment] = (),
        agents: Sequence[AgentAttachment] = (),
        id: str | None = None,  # noqa: A002 - the name of the field
        delivery: Delivery = "steer",
        resume: bool = True,
        session: SessionInput | None = None,
    ) -> Receipt:
        """Admit input, starting a run where none is open; `session` are the attributes of a new session.

        With `resume` false it is recorded and waits for the next call. Raises NotFoundError for an unknown session
        without attributes, InvalidInputError for what cannot be understood or is too large, PromptConflictError when
        the id stands for something else, and what a worker refuses a session for. Waits while no worker is there, or
        Temporal is away; input for an existing session that is too large for Temporal, or only to be recorded, is
        admitted without either, and so is what a turn that runs will find: a run takes a limited number of messages.
        """
        if session is None:
            await self.get(session_id)
        check_session_id(session_id)
        try:
            given = PromptInput(
                id=id or fresh_id("msg"),
                text=text,
                files=tuple(files) or None,
                agents=tuple(agents) or None,
                delivery=delivery,
                resume=resume,
            )
        except ValidationError as error:
            raise misunderstood("prompt", error) from None
        at_once = session is None and (not resume or await self._needs_no_run(session_id, id))
        if is_large(given, self.settings.limits.prompt_bytes) or at_once:
            return await self._admit_here(session_id, given, session)
        start = StartInput(session=session).to_wire()
        # Temporal answers an update id that it knows by itself, also after its run: each call wakes anew under one of
        # its own. That the input counts once is the inbox's doing.
        receipt = await self._update(
            session_id, contracts.UPDATE_PROMPT, [given.to_wire()], fresh_id("int"), start, Receipt
        )
        while session_id in self._stopped:
            self._stopped.remove(session_id)
        return receipt

    async def steer(self, session_id: str, text: str, *, id: str | None = None) -> Receipt:  # noqa: A002
        """Admit input that is seen at the next boundary between two steps. Raises what `prompt` raises."""
        return await self.prompt(session_id, text, id=id, delivery="steer")

    async def queue(self, session_id: str, text: str, *, id: str | None = None) -> Receipt:  # noqa: A002
        """Admit input that is seen when the session would become idle. Raises what `prompt` raises."""
        return await self.prompt(session_id, text, id=id, delivery="queue")

    async def resume(self, session_id: str) -> TurnResult:
        """Join the turn that runs or force one step, and give how it ended. Raises NotFoundError."""
        await self.get(session_id)
        return await self._update(session_id, contracts.UPDATE_RESUME, [], fresh_id("int"), {}, TurnResult)

    async def interrupt(self, session_id: str, reason: str | None = None, *, after: int | None = None) -> bool:
        """Stop the turn that runs; False when the session is idle, which changes nothing. `after` is the last sequence
        that was seen. Raises NotFoundError for an unknown session, InvalidInputError for a reason that is too long."""
        try:
            given = InterruptInput(id=fresh_id("int"), reason=reason, after=after)
        except ValidationError as error:
            raise misunderstood("interrupt", error) from None
        self._stopped.append(session_id)
        if await self._runs.signal(session_id, contracts.SIGNAL_INTERRUPT, given.to_wire()):
            return True
        await self.get(session_id)
        return False

    async def result(self, session_id: str) -> TurnResult:
        """Wait until the session's open run has ended, and give how; of an idle session, how its last run ended.

        Raises NotFoundError for an unknown session, and what a worker refused the run for.
        """
        result = await self._runs.result(session_id)
        if result is None:
            await self.get(session_id)
            return TurnResult(session_id=session_id, outcome="idle")
        return result

    async def status(self, session_id: str) -> Status:
        """Give what the session's open run does now; of an idle session, that it is idle.

        Raises UnavailableError when no worker answers in time, or Temporal is away.
        """
        return await self._runs.status(session_id)

    async def open_queue(self, session_id: str) -> str | None:
        """Give the task queue of the session's open run, None when it is idle."""
        return await self._runs.open_queue(session_id)

    async def is_served(self, task_queue: str | None = None) -> bool:
        """Say whether a worker has asked for work on the task queue within the last minute."""
        return await self._runs.is_served(task_queue or self.settings.task_queue)

    async def check(self, service: Service) -> None:
        """Ask a service for a sign of life. Raises UnavailableError."""
        await (self._database.ping() if service == "PostgreSQL" else self._runs.ping())

    async def _needs_no_run(self, session_id: str, input_id: str | None) -> bool:
        """Say whether an open run will look into the inbox by itself, since the session is claimed, or the input is
        answered: a run for it would do nothing, and its end would hide how the turn ended. Not after an interrupt:
        what follows it has to come behind it on the same way, or would be stopped with the rest."""
        if session_id in self._stopped:
            return False
        if input_id is not None and await self._read(lambda conn: inbox.is_answered(conn, session_id, input_id)):
            return True
        owner = await self._read(lambda conn: owner_of(conn, session_id))
        return owner is not None and not owner.expired and await self._runs.open_queue(session_id) is not None

    async def _admit_here(self, session_id: str, given: PromptInput, session: SessionInput | None) -> Receipt:
        """Admit without Temporal, which is told only that there is something to look at."""
        if session is not None:
            if session.location is None:
                raise InvalidInputError("a new session with a prompt as large as this one needs a directory: name it")
            new = NewSession(session.location, session.agent, session.model, session.title)
            await self.create(new, session_id)
        message_id = given.id or fresh_id("msg")
        admission = await self._write(
            session_id,
            lambda conn: inbox.admit(conn, session_id, message_id, given.prompt(), given.delivery, resume=given.resume),
        )
        if given.resume and not admission.claimed and not await self._needs_no_run(session_id, message_id):
            await self._runs.wake(session_id, self.settings.task_queue)
        return admission.receipt

    async def _update(
        self,
        session_id: str,
        name: str,
        arguments: Sequence[object],
        update_id: str,
        start: Mapping[str, object],
        result_type: type[Result],
    ) -> Result:
        queue = self.settings.task_queue
        return await self._runs.update(session_id, queue, name, [*arguments], update_id, dict(start), result_type)

    async def _read(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        async with self._database.read() as conn:
            return await work(conn)

    async def _write(self, session_id: str, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """Write in one transaction, and tell those who follow the session."""
        result = await self._database.transact(work)
        self._announcer.send(session_id, Notice.look())
        return result


@asynccontextmanager
async def open_client(
    settings: Settings, environ: Mapping[str, str] | None = None, *, reading: bool = False
) -> AsyncIterator[Client]:
    """Connect to both services. Raises ConfigurationError, UnavailableError or SchemaVersionError.

    `environ` is where Temporal's own settings are read from, the process's environment when it is None. With `reading`
    Temporal need not be there: a client that only reads and writes the database never asks for it.
    """
    if settings.database_url is None:
        raise ConfigurationError("no database: set FENCEPOST_DATABASE_URL, or use `fencepost dev` for a local one")
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, pool_size=5)
        stack.push_async_callback(database.close)
        await migrate.check(database)
        environ = os.environ if environ is None else environ
        temporal = await (temporal_when_asked(environ) if reading else connect_temporal(environ))
        listener = Listener(database)
        stack.push_async_callback(listener.close)
        announcer = Announcer(database)
        await announcer.start()
        stack.push_async_callback(announcer.close)
        yield Client(settings, database, temporal, listener, announcer)
