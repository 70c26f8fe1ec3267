"""How soon a turn goes on when its worker goes, how soon it stops when its user says so, and how long a scan takes.

Real workers in processes of their own. These are times by the clock, and most of what they hold is time-outs: so the
worst of them stands beside an aim, and there are no ratios. It takes minutes.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text

from bench.children import PATIENCE, Child, child
from bench.figures import Figure
from bench.house import House, fresh_queue, say
from bench.scans import scan_figure
from fencepost.domain.contracts import SESSION_TURN
from fencepost.domain.events import StepInterrupted
from fencepost.providers.script import Action, CallTool, Finish, Gate, Hang, Pause, Say, text_of, words
from fencepost.providers.scripted import ScriptedProvider
from fencepost.services import pollers
from fencepost.store.engine import Database

HEARTBEAT_SECONDS = 10.0
LOST_MS, SOON_MS = 2000, 1000
"""Aims: what comes upon the heartbeat time-out after a kill, and what everything else takes."""
_LOOK_SECONDS = 0.005
_BEGIN = Say("It begins. ")
_LONG = Say(words(20_000), delay=0.05)  # longer than a worker takes to start


@dataclass
class Scene:
    """One session's turn: what its first request is answered with, and when its requests came."""

    session_id: str
    first: Sequence[Action]
    gate: Gate = field(default_factory=Gate)
    asked: list[float] = field(default_factory=list)
    again: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt(self) -> str:
        """What the provider knows the session by."""
        return f"Work on {self.session_id}."

    def answer(self) -> Sequence[Action]:
        """Note a request, and give its answer."""
        self.asked.append(time.perf_counter())
        if len(self.asked) == 1:
            return self.first
        self.again.set()
        return [Say("It goes on."), Finish()]


class Scenes:
    """The workers' surroundings: one task queue, and a provider that plays scenes."""

    def __init__(self, house: House, heartbeat: float) -> None:
        self._house = house
        self._queue = fresh_queue("recovery")
        self._played: dict[str, Scene] = {}
        self.provider = ScriptedProvider(self._answer)
        self._limits = {
            "FENCEPOST_LIMITS__HEARTBEAT_TIMEOUT_SECONDS": str(heartbeat),
            "FENCEPOST_TASK_QUEUE": self._queue,
        }

    def _answer(self, body: dict[str, Any]) -> Sequence[Action]:
        said = (text_of(message) for message in body["messages"] if message["role"] == "user")
        return next(self._played[prompt] for prompt in said if prompt in self._played).answer()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Child]:
        """Run one more worker. It has asked for work when the body begins."""
        provider = {"FENCEPOST_PROVIDERS__SCRIPTED__BASE_URL": self.provider.base_url}
        async with child("metered", environ={**self._house.environ, **self._limits, **provider}) as process:
            async with asyncio.timeout(PATIENCE):
                while not await self._polls(f"{process.process.pid}@"):
                    process.check()
                    await asyncio.sleep(0.05)
            yield process

    async def _polls(self, name: str) -> bool:
        temporal = self._house.client.temporal
        both = [await pollers(temporal, self._queue, workflows=workflows) for workflows in (True, False)]
        return all(any(one.startswith(name) for one in found) for found in both)

    async def play(self, *actions: Action) -> Scene:
        """Begin a turn whose first answer begins, passes the scene's gate and goes on with these actions."""
        scene = Scene(await self._house.session(), ())
        scene.first = [_BEGIN, Pause(scene.gate), *actions]
        scene.gate.release()
        self._played[scene.prompt] = scene
        given = {"session": {"location": self._house.location.to_wire()}, "prompt": {"text": scene.prompt}}
        await self._house.client.temporal.start_workflow(
            SESSION_TURN, given, id=scene.session_id, task_queue=self._queue
        )
        return scene

    async def ended(self, scene: Scene, outcome: str) -> None:
        """Wait for the end of a scene. Raises RuntimeError when it is another one than the outcome."""
        result = await asyncio.wait_for(self._house.client.result(scene.session_id), PATIENCE)
        if result.outcome != outcome:
            raise RuntimeError(f"a turn of the benchmark ended as {result.outcome}, not {outcome}")


async def gone_on(scenes: Scenes, number: signal.Signals, times: int) -> list[float]:
    """Give the milliseconds from a signal to the worker that streams, to the session's next request by another one."""
    taken = []
    async with AsyncExitStack() as workers:
        streaming = await workers.enter_async_context(scenes.worker())
        for _ in range(times):
            scene = await scenes.play(_LONG)
            await asyncio.wait_for(scene.gate.reached(), PATIENCE)
            other = await workers.enter_async_context(scenes.worker())
            began = time.perf_counter()
            streaming.process.send_signal(number)
            await asyncio.wait_for(scene.again.wait(), PATIENCE)
            taken.append((scene.asked[1] - began) * 1000)
            await scenes.ended(scene, "done")
            streaming = other
    return taken


async def silent(scenes: Scenes) -> Scene:
    """Give a scene whose stream has fallen silent."""
    scene = await scenes.play(Hang())
    await scene.gate.reached()
    return scene


async def in_a_tool(scenes: Scenes, directory: Path) -> Scene:
    """Give a scene whose command runs."""
    file = directory / f"runs-{secrets.token_hex(4)}"
    scene = await scenes.play(CallTool("bash", {"command": f"touch {file}; sleep 600"}), Finish())
    while not await asyncio.to_thread(file.exists):  # noqa: ASYNC110 - a file tells nobody that it is there
        await asyncio.sleep(_LOOK_SECONDS)
    return scene


_SETTLED = text("SELECT EXISTS (SELECT FROM event WHERE aggregate_id = :session_id AND type = :type)")


async def stopped(house: House, scenes: Scenes, begin: Callable[[], Awaitable[Scene]], times: int) -> list[float]:
    """Give the milliseconds from an interrupt until the log says that the step was interrupted."""
    taken = []
    assert house.settings.database_url is not None
    database = Database(house.settings.database_url, pool_size=1)
    try:
        async with database.read() as conn:
            for _ in range(times):
                scene = await asyncio.wait_for(begin(), PATIENCE)
                given = {"session_id": scene.session_id, "type": StepInterrupted.stored_type()}
                began = time.perf_counter()
                await house.client.interrupt(scene.session_id)
                async with asyncio.timeout(PATIENCE):
                    # Looked for, not listened for: what is measured is when it is there, not when it is told.
                    while not (await conn.execute(_SETTLED, given)).scalar():  # noqa: ASYNC110
                        await asyncio.sleep(_LOOK_SECONDS)
                taken.append((time.perf_counter() - began) * 1000)
                await scenes.ended(scene, "interrupted")
    finally:
        await database.close()
    return taken


async def measure(
    house: House,
    *,
    times: int = 5,
    heartbeat: float = HEARTBEAT_SECONDS,
    rows: int = 1_000_000,
    waiting: int = 10_000,
) -> list[Figure]:
    """Measure everything so many times. Of settled rows a scan meets `rows`, of each kind of work `waiting`."""
    figures = []
    scenes = Scenes(house, heartbeat)
    async with scenes.provider:
        for number, aim in ((signal.SIGKILL, heartbeat * 1000 + LOST_MS), (signal.SIGTERM, SOON_MS)):
            say(f"recovery: {number.name}, {times} times ...")
            taken = await gone_on(scenes, number, times)
            figures.append(_figure(f"{number.name} of the worker to the next request", taken, aim))
        kinds: dict[str, Callable[[], Awaitable[Scene]]] = {
            "a tool that runs": lambda: in_a_tool(scenes, Path(house.location.directory)),
            "a silent stream": lambda: silent(scenes),
        }
        async with scenes.worker():
            for name, begin in kinds.items():
                say(f"recovery: an interrupt of {name}, {times} times ...")
                taken = await stopped(house, scenes, begin, times)
                figures.append(_figure(f"an interrupt of {name}, to the log", taken, SOON_MS))
    return [*figures, await scan_figure(house, times, rows, waiting)]


def _figure(name: str, taken: Sequence[float], aim: float) -> Figure:
    detail = {"median": statistics.median(taken), "times": len(taken)}
    return Figure("recovery", f"{name}: worst", max(taken), aim, "ms", detail=detail)
