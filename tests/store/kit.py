"""The store by hand: sessions, claims and steps as running work would make them, and what they leave in the tables."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import asyncpg
from sqlalchemy import select, update
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.events import DurableEvent
from fencepost.domain.ids import derived_id, fresh_id
from fencepost.domain.inbox import Delivery, Location, Prompt
from fencepost.domain.messages import AssistantMessage, Message, MessageError, Tokens
from fencepost.domain.models import ModelRef
from fencepost.domain.ownership import OwnerRun, TakeoverReason, Token
from fencepost.domain.tools import TextItem
from fencepost.store import claims, event_log, inbox, ownership, readers, sessions, steps, tables, tool_calls
from fencepost.store.claims import Claimed, Released, Seen, Wanted
from fencepost.store.engine import Database
from fencepost.store.event_log import Entry, StoredEvent
from fencepost.store.inbox import Admission
from fencepost.store.ownership import Lease
from fencepost.store.sessions import NewSession
from fencepost.store.steps import Interruption, LivePart, Prepared, Producer, Settlement
from fencepost.store.tool_calls import PlannedCall

Given = ParamSpec("Given")
Result = TypeVar("Result")

LEASE = Lease()
MODEL = ModelRef(id="test-model", provider_id="scripted")
USER_STOP = Settlement(Interruption("user", interrupt_id="int_1", note="enough"))


def token_of(session_id: str, run: str = "run-1", ordinal: int = 1) -> Token:
    """Give the token that a run's claim of this ordinal has."""
    return Token(session_id=session_id, execution_id=derived_id("exe", session_id, run, ordinal), owner_id=run)


@dataclass
class StoreKit:
    """A database with the current schema. Every test uses sessions of its own in it."""

    database: Database

    async def do(
        self,
        work: Callable[Concatenate[AsyncConnection, Given], Awaitable[Result]],
        *args: Given.args,
        **kw: Given.kwargs,
    ) -> Result:
        """Run one function of the store in a transaction of its own."""
        return await self.database.transact(lambda conn: work(conn, *args, **kw))

    # Sessions and input

    async def new_session(self, session_id: str | None = None) -> str:
        """Create a session and give its id."""
        session_id = session_id or fresh_id("ses")
        await self.do(sessions.create, session_id, NewSession(Location(directory="/work")))
        return session_id

    async def admit(
        self,
        session_id: str,
        text: str = "hello",
        *,
        input_id: str | None = None,
        delivery: Delivery = "steer",
        resume: bool = True,
    ) -> Admission:
        """Admit one input."""
        return await self.do(
            inbox.admit, session_id, input_id or fresh_id("msg"), Prompt(text=text), delivery, resume=resume
        )

    async def append(self, session_id: str, *made: DurableEvent, ids: list[str] | None = None) -> list[int]:
        """Append events to a log as no running work would."""

        async def work(conn: AsyncConnection) -> list[int]:
            head = await event_log.lock(conn, session_id)
            names = ids or [fresh_id("evt") for _ in made]
            return await event_log.append(conn, head, [Entry(*pair) for pair in zip(names, made, strict=True)])

        return await self.database.transact(work)

    # Ownership

    async def claim(
        self,
        token: Token,
        *,
        force: bool = False,
        owner_run: OwnerRun | None = None,
        reason: TakeoverReason = "lost",
        max_continuations: int = 3,
        carried: bool = False,
    ) -> Claimed:
        """Claim for the token. `owner_run` is what Temporal says of the present owner's run."""
        async with self.database.read() as conn:
            owner = await ownership.owner_of(conn, token.session_id)
        seen = Seen(owner, owner_run) if owner is not None and owner_run is not None else None
        wanted = Wanted(token, force=force, reason=reason, max_continuations=max_continuations, carried=carried)
        return await self.do(claims.claim, wanted, seen, LEASE)

    async def release(self, token: Token, step: int | None = None, *, interrupted: bool = False) -> Released:
        """Release the session after this step, or after the one in hand."""
        if step is None:
            step = (await self.row_of_ledger(token))["step"]
        return await self.do(claims.release, token, step, interrupted=interrupted)

    async def prepare(self, token: Token, step: int = 1, *, queued: bool = True) -> Prepared:
        """Prepare a step."""
        return await self.do(steps.prepare, token, step, queued=queued, lease=LEASE)

    async def begin(self, session_id: str, text: str | None = "hello", *, run: str = "run-1", ordinal: int = 1) -> Work:
        """Admit a prompt, claim, prepare and request step 1; give the work in hand."""
        if text is not None:
            await self.admit(session_id, text)
        token = token_of(session_id, run, ordinal)
        assert (await self.claim(token, force=True)).held
        return await self.request(token)

    async def claim_and_prepare(self, session_id: str, *, queued: bool = True) -> Prepared:
        """Claim for the first run and prepare its first step."""
        token = token_of(session_id)
        await self.claim(token)
        return await self.prepare(token, queued=queued)

    async def request(self, token: Token, step: int = 1) -> Work:
        """Prepare and request a step under a held token."""
        prepared = await self.prepare(token, step)
        await self.do(steps.request, token, step, 1, LEASE)
        return Work(self, token, step, prepared.assistant_message_id)

    async def expire(self, session_id: str) -> None:
        """Let the lease run out."""
        execution = tables.session_execution
        await self.do(_update_expiry, update(execution).where(execution.c.session_id == session_id))

    # What is there

    async def events(self, session_id: str) -> list[StoredEvent]:
        """Give the whole log of a session."""
        async with self.database.read() as conn:
            return await event_log.read_after(conn, session_id, -1, 10_000)

    async def types(self, session_id: str) -> list[str]:
        """Give the short names of a session's events, without its creation: `prompted`, `step.started`."""
        log = await self.events(session_id)
        return [stored.type.removeprefix("session.next.").rsplit(".", 1)[0] for stored in log[1:]]

    async def messages(self, session_id: str) -> list[Message]:
        """Give the messages of a session in order."""
        async with self.database.read() as conn:
            return [message for _, message in await readers.page(conn, session_id, limit=1_000)]

    async def assistant(self, session_id: str) -> AssistantMessage:
        """Give the newest assistant message."""
        found = [message for message in await self.messages(session_id) if isinstance(message, AssistantMessage)]
        return found[-1]

    async def rows(self, table: Any, session_id: str) -> list[dict[str, Any]]:
        """Give a session's rows of one table."""
        async with self.database.read() as conn:
            return await _rows(conn, table, session_id)

    async def row(self, table: Any, session_id: str) -> dict[str, Any]:
        """Give a session's only row of one table."""
        [row] = await self.rows(table, session_id)
        return row

    async def row_of_ledger(self, token: Token) -> dict[str, Any]:
        """Give an execution's ledger row."""
        rows = await self.rows(tables.execution_ledger, token.session_id)
        [row] = [row for row in rows if row["execution_id"] == token.execution_id]
        return row

    async def waiting(self, count: int) -> None:
        """Wait until so many connections to this database wait for a lock."""
        statement = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        found = 0
        while found < count:
            async with self.database.read() as conn:
                found = (await conn.exec_driver_sql(statement)).scalar_one()

    async def everything(self, session_id: str) -> dict[str, list[dict[str, Any]]]:
        """Give every row of every table that belongs to the session."""
        async with self.database.read() as conn:
            return {
                table.name: await _rows(conn, table, session_id)
                for table in tables.metadata.sorted_tables
                if _owner_column(table) is not None
            }


@asynccontextmanager
async def open_store(postgres_url: str, template_database: str) -> AsyncIterator[StoreKit]:
    """Make a database from the template, with connections enough for races; it goes away with the body."""
    name = f"fencepost_store_{secrets.token_hex(4)}"
    administrator = await asyncpg.connect(postgres_url.replace("+asyncpg", "", 1))
    await administrator.execute(f"CREATE DATABASE {name} TEMPLATE {template_database} STRATEGY FILE_COPY")
    database = Database(make_url(postgres_url).set(database=name).render_as_string(hide_password=False), pool_size=12)
    try:
        yield StoreKit(database)
    finally:
        await database.close()
        await administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await administrator.close()


async def _update_expiry(conn: AsyncConnection, statement: Any) -> None:
    await conn.execute(statement.values(expires_at=1))


def _owner_column(table: Any) -> Any:
    if table is tables.session:
        return table.c.id
    return next((table.c[name] for name in ("session_id", "aggregate_id") if name in table.c), None)


async def _rows(conn: AsyncConnection, table: Any, session_id: str) -> list[dict[str, Any]]:
    found = await conn.execute(select(table).where(_owner_column(table) == session_id))
    return sorted((dict(row) for row in found.mappings()), key=repr)


@dataclass
class Work:
    """One step in hand: what a stream activity holds."""

    kit: StoreKit
    token: Token
    step: int
    message_id: str
    attempt: int = 1
    _ordinal: int = field(default=0)

    @property
    def about(self) -> dict[str, Any]:
        """Give the fields that every event of the step has."""
        return {"timestamp": 0, "session_id": self.token.session_id, "assistant_message_id": self.message_id}

    def started(self) -> events.StepStarted:
        """Give the step's first event."""
        return events.StepStarted(**self.about, agent="build", model=MODEL)

    def called(self, call_id: str, tool: str = "bash", *, executed: bool = False) -> list[DurableEvent]:
        """Give the events of one tool call."""
        return [
            events.ToolInputStarted(**self.about, call_id=call_id, name=tool),
            events.ToolInputEnded(**self.about, call_id=call_id, text='{"command": "true"}'),
            events.ToolCalled(
                **self.about,
                call_id=call_id,
                tool=tool,
                input={"command": "true"},
                provider=events.ToolProviderInfo(executed=executed),
            ),
        ]

    async def publish(self, *made: DurableEvent) -> list[int]:
        """Publish events of the stream, the next ordinals being theirs."""
        producer = Producer(self.step, self.attempt, "stream")
        seqs = await self.kit.do(steps.publish, self.token, producer, self._ordinal, made, LEASE)
        self._ordinal += len(made)
        return seqs

    async def say(self, text: str, part: str = "t1") -> None:
        """Publish a whole text part, after the step's start if nothing came before."""
        made: list[DurableEvent] = [] if self._ordinal else [self.started()]
        made.append(events.TextStarted(**self.about, text_id=part))
        await self.publish(*made, events.TextEnded(**self.about, text_id=part, text=text))

    async def keep_live(self, text: str, part: str = "t1", kind: str = "text") -> None:
        """Keep the text so far of a part."""
        await self.kit.do(steps.keep_live, self.token, LivePart(self.message_id, kind, part, self.attempt, text))

    async def start_tool(self, call_id: str) -> PlannedCall:
        """Start a planned call."""
        return await self.kit.do(tool_calls.start, self.token, self.message_id, call_id, LEASE)

    async def settle_tool(self, call_id: str, text: str = "ok") -> None:
        """Settle a call with success."""
        outcome = events.ToolSuccess(
            **self.about,
            call_id=call_id,
            structured={},
            content=(TextItem(text=text),),
            provider=events.ToolProviderInfo(executed=False),
        )
        await self.kit.do(tool_calls.settle, self.token, self.message_id, call_id, outcome, LEASE)

    def ended(self, finish: str = "stop") -> Settlement:
        """Give the settlement of an answer that is complete."""
        tokens = Tokens(input=3, output=5)
        return Settlement(events.StepEnded(**self.about, finish=finish, cost=0.5, tokens=tokens), self.started())

    def failed(self, message: str = "Provider unavailable", max_continuations: int | None = None) -> Settlement:
        """Give the settlement of a failure."""
        failure = events.StepFailed(**self.about, error=MessageError(message=message))
        return Settlement(failure, self.started(), max_continuations=max_continuations)

    async def settle(self, settlement: Settlement | None = None) -> bool:
        """Settle the step, by default as ended."""
        return await self.kit.do(steps.settle, self.token, self.step, settlement or self.ended(), LEASE)
