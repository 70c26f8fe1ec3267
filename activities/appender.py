"""Appending a stream's durable events: in order, in the background, as many in one transaction as have gathered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.contracts import StreamInput
from fencepost.domain.events import DurableEvent
from fencepost.services import Services
from fencepost.store import steps
from fencepost.store.live import Notice
from fencepost.store.steps import LivePart, Producer

_GATHER_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class _Waiting:
    event: DurableEvent
    durable: Callable[[], None] | None


class StreamAppender:
    """Takes events without waiting. While one transaction runs the next one's events gather, so that a stream never
    waits for the database, and a fast one costs few transactions.

    `proved` is called after each commit, `failed` once, as soon as something cannot be appended; `error` says what.
    """

    def __init__(
        self, services: Services, given: StreamInput, *, proved: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        self._services = services
        self._given = given
        self._proved = proved
        self._failed = failed
        self._waiting: list[_Waiting] = []
        self._parts: Callable[[], Iterable[LivePart]] | None = None
        self._ordinal = 0
        self._kept = False
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.seq = -1
        self.error: Exception | None = None

    def put(self, event: DurableEvent, durable: Callable[[], None] | None = None) -> None:
        """Hand over one event; `durable` is called once it is. Raises what an earlier one failed with."""
        if self.error is not None:
            raise self.error
        self._waiting.append(_Waiting(event, durable))
        self._go_on()

    def keep(self, parts: Callable[[], Iterable[LivePart]]) -> None:
        """Keep the text so far of what `parts` then gives, with the next transaction."""
        self._parts = parts
        self._go_on()

    async def drain(self) -> None:
        """Wait until everything that was handed over is durable. Raises what it failed with."""
        self._hurry.set()
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self.error is not None:
            raise self.error

    def _go_on(self) -> None:
        # A task of its own: a cancellation of the stream must not leave it unknown what has been appended.
        if self.error is None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # What a provider sends at almost the same time shares a transaction: a short answer costs one.
        with suppress(TimeoutError):
            async with asyncio.timeout(_GATHER_SECONDS):
                await self._hurry.wait()
        self._hurry.clear()
        while self._waiting or self._parts is not None:
            batch, self._waiting = self._waiting, []
            parts, self._parts = self._parts, None
            try:
                await self._append([one.event for one in batch], list(parts()) if parts is not None else [])
            except Exception as error:
                self.error = error
                self._waiting.clear()
                self._failed()
                return
            for one in batch:
                if one.durable is not None:
                    one.durable()

    async def _append(self, batch: list[DurableEvent], parts: list[LivePart]) -> None:
        given, lease = self._given, self._services.lease
        producer = Producer(given.step, given.attempt, "stream")

        async def work(conn: AsyncConnection) -> list[int]:
            seqs = []
            if batch:
                seqs = await steps.publish(conn, given.token, producer, self._ordinal, batch, lease, kept=self._kept)
            for part in parts:
                await steps.keep_live(conn, given.token, part)
            return seqs

        # What is kept of a part has its durable beginning, so no earlier attempt of this step has kept anything.
        seqs = await self._services.database.transact(work)
        self._ordinal += len(batch)
        self._kept = self._kept or bool(parts)
        self._proved()
        if seqs:
            self.seq = seqs[-1]
            self._services.announcer.send(given.token.session_id, Notice(self.seq))
