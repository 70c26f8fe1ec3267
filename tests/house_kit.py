"""A whole house for one test: real PostgreSQL, real Temporal, a real HTTP provider, and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client, WithStartWorkflowOperation, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy

from fencepost.config import Settings
from fencepost.domain.contracts import SESSION_TURN, UPDATE_PROMPT, TurnResult
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Receipt
from fencepost.domain.messages import Message
from fencepost.domain.tools import Invocation, TextItem, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.providers.script import Action
from fencepost.providers.scripted import ScriptedProvider
from fencepost.services import Services, open_services
from fencepost.store import event_log, readers, tables
from fencepost.store.engine import Database
from fencepost.store.event_log import Entry, StoredEvent
from fencepost.tools.builtin import builtin_tools
from fencepost.tools.registry import Registry, Tool, ToolContext
from worker import build_workers

MODEL = "scripted/test-model"


def house_settings(database_url: str, task_queue: str, directory: Path, base_url: str, **changes: Any) -> Settings:
    """Give settings for a test: the scripted model, and times short enough to see a worker's loss."""
    limits = {"heartbeat_timeout_seconds": 2, "heartbeat_seconds": 0.5, "drain_grace_seconds": 2}
    return Settings(
        **{
            "database_url": database_url,
            "task_queue": task_queue,
            "default_model": MODEL,
            "providers": {"scripted": {"base_url": base_url, "any_model": True}},
            "workspace": {"directory": directory},
            "tool_output": {"directory": directory.parent / f"{directory.name}-tool-output"},
            "limits": {**limits, **changes.pop("limits", {})},
            **changes,
        }
    )


@dataclass
class House:
    """What a test holds of a running house."""

    services: Services
    provider: ScriptedProvider
    client: Client
    task_queue: str
    directory: Path
    sessions: list[str] = field(default_factory=list)

    def new_id(self) -> str:
        """Give a fresh session id."""
        return fresh_id("ses")

    async def start(self, session_id: str, text: str | None = None, **session: Any) -> WorkflowHandle[Any, Any]:
        """Start a turn workflow as a plain client would, with JSON."""
        given: dict[str, Any] = {}
        if text is not None:
            given["prompt"] = {"text": text}
        if session:
            given["session"] = session
        return await self.client.start_workflow(SESSION_TURN, given, id=session_id, task_queue=self.task_queue)

    async def run(self, session_id: str, text: str, **session: Any) -> TurnResult:
        """Start a turn with a prompt and wait for its end."""
        handle = await self.start(session_id, text, **session)
        return TurnResult.model_validate(await handle.result())

    async def prompt(self, session_id: str, text: str, **fields: Any) -> Receipt:
        """Admit a prompt by update-with-start, whether or not a run is open."""
        start: WithStartWorkflowOperation[Any, Any] = WithStartWorkflowOperation(
            SESSION_TURN,
            {},
            id=session_id,
            task_queue=self.task_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        receipt: Receipt = await self.client.execute_update_with_start_workflow(
            UPDATE_PROMPT, {"text": text, **fields}, start_workflow_operation=start, result_type=Receipt
        )
        return receipt

    async def ended(self, session_id: str) -> TurnResult:
        """Wait for the end of the session's open run."""
        handle = self.client.get_workflow_handle(session_id)
        return TurnResult.model_validate(await handle.result())

    async def events(self, session_id: str) -> list[StoredEvent]:
        """Give the session's whole log."""
        async with self.services.database.read() as conn:
            return await event_log.read_after(conn, session_id, -1, 10_000)

    async def types(self, session_id: str) -> list[str]:
        """Give the stored types of the log, without the session's creation."""
        return [event.type for event in await self.events(session_id) if event.type != "session.created.1"]

    async def messages(self, session_id: str) -> list[Message]:
        """Give the session's messages in order."""
        async with self.services.database.read() as conn:
            return [message for _, message in await readers.page(conn, session_id, limit=1_000)]


class HeldTool:
    """A tool that runs until it is let go, and notes every start: `registry` has it beside the built-in ones."""

    class Input(WireModel):
        """Anything may be passed on."""

        note: str = ""

    def __init__(self, name: str = "hold") -> None:
        self.name = name
        self.invocations: list[Invocation] = []
        self.gate = asyncio.Event()
        self._started = asyncio.Condition()
        self.cancelled = 0

    async def started(self, count: int) -> None:
        """Wait until so many calls have started."""
        async with self._started:
            await self._started.wait_for(lambda: len(self.invocations) >= count)

    async def _run(self, context: ToolContext, given: Input) -> ToolOutput:
        async with self._started:
            self.invocations.append(context.invocation)
            self._started.notify_all()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ToolOutput(content=(TextItem(text=f"held {given.note}"),))

    @property
    def registry(self) -> Registry:
        """Give a registry of the built-in tools and this one."""
        tool = Tool(self.name, "holds on", self.Input, self.name, self._run, lambda directory, given: ("*",))
        return Registry([*builtin_tools(), tool])


async def projection(conn: AsyncConnection, session_id: str) -> dict[str, list[dict[str, Any]]]:
    """Give every projected row of a session; wakes and attempts are no part of the projection."""
    tables_of = {tables.session: "id", tables.session_message: "session_id", tables.session_input: "session_id"}
    rows = {}
    for table, column in tables_of.items():
        found = await conn.execute(select(table).where(table.c[column] == session_id).order_by(table.c.id))
        rows[table.name] = [
            {name: value for name, value in row.items() if not name.startswith("wake_")} for row in found.mappings()
        ]
    return rows


async def assert_equal_to_rebuild(house: House, session_id: str) -> None:
    """Replay the session's log into a database of its own, and compare every projected row and column.

    The log has to be contiguous for that, from 0.
    """
    log = await house.events(session_id)
    assert [event.seq for event in log] == list(range(len(log)))
    scratch = Database(house.services.settings.database_url or "", pool_size=1)
    try:
        async with house.services.database.read() as conn:
            live = await projection(conn, session_id)
        async with scratch.engine.connect() as conn:
            await conn.execute(text("BEGIN"))
            # A schema that goes away with the transaction stands for the empty database.
            await conn.execute(text("CREATE SCHEMA rebuild"))
            await conn.execute(text("SET LOCAL search_path TO rebuild"))
            await conn.run_sync(tables.metadata.create_all)
            head = await event_log.begin(conn, session_id)
            await event_log.append(conn, head, [Entry(event.id, event.decode()) for event in log])
            rebuilt = await projection(conn, session_id)
            await conn.execute(text("ROLLBACK"))
    finally:
        await scratch.close()
    assert rebuilt == live


@asynccontextmanager
async def open_house(
    database_url: str,
    client: Client,
    task_queue: str,
    directory: Path,
    reply: Callable[[dict[str, Any]], Sequence[Action]] | Sequence[Sequence[Action]] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    registry: Registry | None = None,
    serve: bool = True,
    **changes: Any,
) -> AsyncIterator[House]:
    """Open a house; `reply` decides what the model says. Workers serve until the body ends."""
    address = client.service_client.config.target_host
    environ = {"TEMPORAL_ADDRESS": address, "PATH": "/usr/bin:/bin", **(environ or {})}
    async with ScriptedProvider(reply) as provider:
        settings = house_settings(database_url, task_queue, directory, provider.base_url, **changes)
        async with open_services(settings, environ=environ, registry=registry) as services:
            house = House(services, provider, client, task_queue, directory)
            if not serve:
                yield house
                return
            async with served(services):
                yield house


@asynccontextmanager
async def served(services: Services) -> AsyncIterator[None]:
    """Run the workers of these services for as long as the body runs."""
    workers = build_workers(services)
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        await asyncio.gather(*(worker.shutdown() for worker in workers))
        await asyncio.gather(*running)
