"""One prompt from admission to its turn's end, shown as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fencepost.cli.entry import FAILED, INTERRUPTED, OK, Signals
from fencepost.cli.render import JsonLines, Screen
from fencepost.client import Client
from fencepost.domain.contracts import TurnResult
from fencepost.domain.errors import NotFoundError, UnavailableError
from fencepost.domain.events import StepEnded, StepFailed, StepInterrupted
from fencepost.store.event_log import StoredEvent

_AGAIN_SECONDS = 1.0
_STATUS_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_INTERRUPT_SECONDS = 3.0
_SETTLEMENTS = frozenset(kind.stored_type() for kind in (StepEnded, StepFailed, StepInterrupted))


class TurnView:
    """Shows a session while a turn of it runs."""

    def __init__(self, client: Client, session_id: str, shown: JsonLines | Screen, say: Callable[[str], None]) -> None:
        self._client = client
        self._session_id = session_id
        self._shown = shown
        self._say = say
        self._seen = -1
        self._moved = asyncio.Event()
        self._settled: StoredEvent | None = None
        self._interrupting: asyncio.Task[None] | None = None

    async def run(
        self, work: Callable[[], Awaitable[TurnResult]], signals: Signals, *, is_new: bool = False
    ) -> TurnResult:
        """Do the work, which begins or joins a turn, and give how that ended, everything shown.

        Ctrl-C interrupts the turn, once. `is_new` says that the work makes the session too. Raises BrokenPipeError
        when nobody reads the output any more.
        """
        signals.unread = INTERRUPTED
        self._seen = -1 if is_new else await self._client.head(self._session_id)
        printing = asyncio.create_task(self._print())
        watching = asyncio.create_task(self._watch_status())
        working = asyncio.ensure_future(work())
        try:
            with signals.softened(self._interrupt):
                await asyncio.wait({printing, working}, return_when=asyncio.FIRST_COMPLETED)
                if printing.done():
                    await self._unread(printing, working)
                result = await working
            await self._shown_up_to(printing)
            result = self._completed(result)
            self._shown.finish(result)
            return result
        finally:
            begun = (printing, watching, working, self._interrupting)
            tasks: list[asyncio.Future[Any]] = [each for each in begun if each is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _print(self) -> None:
        async for item in self._client.events(self._session_id, self._seen):
            if not isinstance(item, StoredEvent):
                self._shown.show(item)
                continue
            if item.type in _SETTLEMENTS:
                self._settled = item
            self._shown.show(item)
            self._seen = item.seq
            self._moved.set()

    def _completed(self, result: TurnResult) -> TurnResult:
        """Give the result, with how the last step was settled where the run itself had nothing to do.

        So it is when the answer to the prompt was lost on its way, and the repeated request found the turn over.
        """
        if result.outcome != "idle" or self._settled is None:
            return result
        match self._settled.decode():
            case StepInterrupted():
                return result.model_copy(update={"outcome": "interrupted"})
            case StepFailed() as failed:
                return result.model_copy(update={"outcome": "failed", "error": failed.error.message})
            case _:
                return result.model_copy(update={"outcome": "done"})

    async def _shown_up_to(self, printing: asyncio.Task[None]) -> None:
        """Wait until everything that is in the log is shown."""
        head = await self._head()
        while self._seen < head and not printing.done():
            self._moved.clear()
            moving = asyncio.create_task(self._moved.wait())
            await asyncio.wait({moving, printing}, return_when=asyncio.FIRST_COMPLETED)
            moving.cancel()
        if printing.done():
            await printing

    async def _head(self) -> int:
        while True:
            try:
                return await self._client.head(self._session_id)
            except UnavailableError:
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _watch_status(self) -> None:
        """Say what the turn waits for, while nothing of it is to be seen."""
        said, seen, pause, failed = "", -2, _STATUS_SECONDS, (0, 1)
        while True:
            await asyncio.sleep(pause)
            if seen != self._seen:
                seen, pause = self._seen, _STATUS_SECONDS
                continue
            try:
                status = await self._client.status(self._session_id)
            except UnavailableError:
                continue
            text, pause = "", _STATUS_SECONDS
            if status.phase == "retrying":
                pause = _RETRY_SECONDS  # the first repetitions are quick
                told = failed[1] if failed[0] == status.step else 1
                for attempt in range(told + 1, status.attempt + 1):
                    self._say(f"attempt {attempt - 1} at the provider failed: attempt {attempt} is on its way")
                failed = (status.step, max(told, status.attempt))
            elif status.phase == "waiting" and status.waiting_for:
                text = f"waiting: {status.waiting_for}"
            if text and text != said:
                self._say(text)
            said = text

    async def _unread(self, printing: asyncio.Task[None], working: asyncio.Future[TurnResult]) -> None:
        """Nobody reads what is shown: stop the turn as Ctrl-C would, then raise why there is no output."""
        self._start_interrupting()
        await asyncio.wait({working})
        await printing

    def _interrupt(self) -> None:
        if self._interrupting is None:
            self._say("interrupting; press Ctrl-C again to leave without waiting")
            self._start_interrupting()

    def _start_interrupting(self) -> None:
        if self._interrupting is None:
            self._interrupting = asyncio.create_task(self._keep_interrupting())

    async def _keep_interrupting(self) -> None:
        # Again until it is seen: a signal that comes before the turn has begun finds nothing to stop.
        while self._settled is None or self._settled.type != StepInterrupted.stored_type():
            with suppress(NotFoundError):  # its first prompt is on the way
                await self._client.interrupt(self._session_id, "by the user", after=self._seen)
            await asyncio.sleep(_INTERRUPT_SECONDS)


@asynccontextmanager
async def told_of_waits(client: Client, session_id: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """For the time of the block, say what the session's turn waits for."""
    watching = asyncio.create_task(_tell_waits(client, session_id, say))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def _tell_waits(client: Client, session_id: str, say: Callable[[str], None]) -> None:
    said = None
    while True:
        await asyncio.sleep(_STATUS_SECONDS)
        with suppress(UnavailableError):
            reason = (await client.status(session_id)).waiting_for
            if reason is not None and reason != said:
                say(f"waiting: {reason}")
            said = reason


def exit_code(result: TurnResult, say: Callable[[str], None]) -> int:
    """Give the exit code for a turn's end, and say in one line why it is not 0."""
    if result.outcome == "failed":
        say(f"fencepost: the turn of {result.session_id} failed: {result.error or 'no reason was given'}")
        return FAILED
    if result.outcome == "interrupted":
        say(f"fencepost: the turn of {result.session_id} was interrupted{f': {result.error}' if result.error else ''}")
        return INTERRUPTED
    return OK
