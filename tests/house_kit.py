"""A whole house for one test: real PostgreSQL, real Temporal, a real HTTP provider, and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.client import Client, WithStartWorkflowOperation, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy

from fencepost.config import Settings
from fencepost.domain.contracts import SESSION_TURN, UPDATE_PROMPT, TurnResult
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Receipt
from fencepost.domain.messages import Message
from fencepost.providers.script import Action
from fencepost.providers.scripted import ScriptedProvider
from fencepost.services import Services, open_services
from fencepost.store import event_log, readers
from fencepost.store.event_log import StoredEvent
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


@asynccontextmanager
async def open_house(
    database_url: str,
    client: Client,
    task_queue: str,
    directory: Path,
    reply: Callable[[dict[str, Any]], Sequence[Action]] | Sequence[Sequence[Action]] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    serve: bool = True,
    **changes: Any,
) -> AsyncIterator[House]:
    """Open a house; `reply` decides what the model says. Workers serve until the body ends."""
    address = client.service_client.config.target_host
    environ = {"TEMPORAL_ADDRESS": address, "PATH": "/usr/bin:/bin", **(environ or {})}
    async with ScriptedProvider(reply) as provider:
        settings = house_settings(database_url, task_queue, directory, provider.base_url, **changes)
        async with open_services(settings, environ=environ) as services:
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
