"""One session of a chaos run: its user, who also resets, terminates and cancels; and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import select
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import TemporalError
from temporalio.service import RPCError, RPCStatusCode

from fencepost.domain.contracts import SESSION_TURN, SIGNAL_WAKE
from fencepost.domain.errors import FencepostError
from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Prompt
from fencepost.store import inbox, tables
from fencepost.store.readers import follow
from fencepost.store.sessions import NewSession
from tests.chaos.arena import QUEUE, Arena
from tests.checker import Evidence

Result = TypeVar("Result")

_TURN_SECONDS = 20.0
_REST_SECONDS = 120.0
_AGAIN = 0.3


class Player:
    """Plays one session: a few turns with what comes in between, then waits for rest."""

    def __init__(self, arena: Arena, number: int) -> None:
        self._arena = arena
        self._number = number
        self._chance = arena.chance("session", number)
        self.session_id = derived_id("ses", "chaos", arena.seed, number)
        self.evidence = Evidence()
        self.turns = 0
        self.rested = False
        self.cut_off: str | None = None
        self._reading: asyncio.Task[None] | None = None

    async def play(self) -> None:
        """Play all turns. Nothing that fails for now is an answer: whoever sends an input sends it until it is in."""
        new = NewSession(self._arena.location)
        await self._until_done(lambda: self._arena.client.create(new, self.session_id))
        self._reading = asyncio.create_task(self._read())
        for _ in range(self._chance.randint(1, 3)):
            self.turns += 1
            await self._prompt()
            for _ in range(self._chance.choice((0, 1, 1, 2, 3))):
                await asyncio.sleep(self._chance.uniform(0, 1.5))
                with suppress(FencepostError, TemporalError, OSError, RuntimeError):
                    await self._chance.choice(_DEEDS)(self)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TURN_SECONDS):
                    while await self._is_open():  # noqa: ASYNC110 - it runs elsewhere
                        await asyncio.sleep(_AGAIN)

    async def rest(self) -> None:
        """Wait until nothing is left to do: recovery sees to lost wakes and lost runs by itself, what a user stopped
        goes on with the next call."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_SECONDS):
                while not self.rested:
                    if await self._is_open() or await self._until_done(self._goes_on):
                        await asyncio.sleep(_AGAIN)
                    elif await self._until_done(self._has_input):
                        await self._until_done(self._wake)
                    else:
                        self.rested = True

    async def close(self) -> None:
        """End the reader, and collect the effects."""
        if self._reading is not None:
            self._reading.cancel()
            try:
                await self._reading
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self.cut_off = f"{type(error).__name__}: {error}"
        effects = self._arena.model.effects_of(self._number)
        if await asyncio.to_thread(effects.exists):
            self.evidence.effects = (await asyncio.to_thread(effects.read_text)).split()

    async def _read(self) -> None:
        client = self._arena.client
        async for item in follow(client._database, client._listener, self.session_id):
            self.evidence.shown.append(item)

    async def _until_done(self, call: Callable[[], Awaitable[Result]]) -> Result:
        while True:
            try:
                return await call()
            except (FencepostError, TemporalError, OSError, RuntimeError):
                await asyncio.sleep(_AGAIN)

    # Input

    def _text(self) -> tuple[str, str]:
        text = f"input {len(self.evidence.inputs)} of {self._number}"
        self.evidence.inputs.append(text)
        return text, derived_id("msg", self.session_id, text)

    async def _prompt(self) -> None:
        text, name = self._text()
        if self._chance.random() < 0.15:
            await self._admit_without_wake(text, name)
        else:
            delivery = self._chance.choice(("steer", "queue"))
            await self._until_done(
                lambda: self._arena.client.prompt(self.session_id, text, id=name, delivery=delivery)  # type: ignore[arg-type]
            )

    async def _admit_without_wake(self, text: str, name: str) -> None:
        """A client admits a large input by itself, and dies before it sends the wake."""
        self._arena.fault("wake lost", self.session_id)
        await self._until_done(
            lambda: self._arena.client._database.transact(
                lambda conn: inbox.admit(conn, self.session_id, name, Prompt(text=text), "steer")
            )
        )

    async def steer(self) -> None:
        """Steer in the middle of a turn."""
        text, name = self._text()
        await self._until_done(lambda: self._arena.client.prompt(self.session_id, text, id=name))

    async def queue(self) -> None:
        """Queue an input for after the turn."""
        text, name = self._text()
        await self._until_done(lambda: self._arena.client.queue(self.session_id, text, id=name))

    async def lose_wake(self) -> None:
        """Admit an input of which nobody hears."""
        await self._admit_without_wake(*self._text())

    async def interrupt(self) -> None:
        """Stop the turn as a user does."""
        await self._arena.client.interrupt(self.session_id, "chaos")

    # What people do in the Temporal UI

    async def terminate(self) -> None:
        """End the run under its activities."""
        await self._arena.client.temporal.get_workflow_handle(self.session_id).terminate("chaos")
        self._arena.fault("terminated", self.session_id)

    async def cancel(self) -> None:
        """Cancel the run."""
        await self._arena.client.temporal.get_workflow_handle(self.session_id).cancel()
        self._arena.fault("cancelled", self.session_id)

    async def reset(self) -> None:
        """Reset the newest run to one of its first events, with its activities still running."""
        temporal = self._arena.client.temporal
        handle = temporal.get_workflow_handle(self.session_id)
        history = await handle.fetch_history()
        completed = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        tasks = [event.event_id for event in history.events if event.event_type == completed]
        if not tasks:
            return
        await temporal.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=temporal.namespace,
                workflow_execution=WorkflowExecution(workflow_id=self.session_id),
                reason="chaos",
                request_id=f"{self.session_id}-{len(tasks)}-{self._chance.random()}",
                workflow_task_finish_event_id=self._chance.choice(tasks[:3]),
            )
        )
        self._arena.fault("reset", self.session_id)

    # Rest

    async def _is_open(self) -> bool:
        handle = self._arena.client.temporal.get_workflow_handle(self.session_id)
        try:
            return (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
        except RPCError as error:
            return error.status != RPCStatusCode.NOT_FOUND

    async def _goes_on(self) -> bool:
        """Say whether somebody has to go on with the session without being asked again."""
        execution = tables.session_execution
        async with self._arena.client._database.read() as conn:
            mine = select(execution.c.id).where(execution.c.session_id == self.session_id)
            claimed = (await conn.execute(mine)).first() is not None
            return claimed or await inbox.has_pending(conn, self.session_id, waking_only=True)

    async def _has_input(self) -> bool:
        async with self._arena.client._database.read() as conn:
            return bool(await inbox.pending(conn, self.session_id))

    async def _wake(self) -> None:
        await self._arena.client.temporal.start_workflow(
            SESSION_TURN, {}, id=self.session_id, task_queue=QUEUE, start_signal=SIGNAL_WAKE
        )


_DEEDS: tuple[Callable[[Player], Awaitable[None]], ...] = (
    *[Player.steer] * 5,
    *[Player.queue] * 3,
    *[Player.interrupt] * 3,
    *[Player.reset] * 2,
    Player.terminate,
    Player.cancel,
    Player.lose_wake,
)
