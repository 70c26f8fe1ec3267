"""What goes wrong with workers and servers while the sessions of a chaos run go on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine

from tests.chaos.arena import Arena, Worker

# Longer than the heartbeat time-out, so that the session is taken over meanwhile; or shorter.
_PAUSES = (0.5, 3.0, 4.5, 7.0)
# The longest is more than renewals are trusted for.
_CUTS = (0.5, 3.0, 7.0, 25.0)
_SPACES = (0.4, 2.5)
_LOOK_SECONDS = 0.5

Deed = Callable[[Arena, random.Random], Coroutine[object, object, None]]


async def trouble(arena: Arena) -> None:
    """Do one fault after another, several at a time, until cancelled; then everything is whole again."""
    chance = arena.chance("faults")
    deeds: list[Deed] = [*_WEIGHTS]
    doing: set[asyncio.Task[None]] = set()
    try:
        while True:
            await asyncio.sleep(chance.uniform(*_SPACES))
            deed = chance.choice(deeds)
            task = asyncio.create_task(deed(arena, random.Random(chance.random())))
            doing.add(task)
            task.add_done_callback(doing.discard)
            if deed in (_restart_postgresql, _restart_temporal):
                await task  # one server at a time, or nothing would ever go on
    finally:
        await asyncio.gather(*doing)


async def supervise(arena: Arena) -> None:
    """Start a worker again that ended by itself, such as one that found no database, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for worker in arena.workers:
            if not worker.busy and worker.process.returncode is not None:
                worker.process = await arena.new_process(worker.environ)


def _any_worker(arena: Arena, chance: random.Random) -> Worker | None:
    free = [worker for worker in arena.workers if not worker.busy]
    # One worker is always left alone: a run in which nobody works shows nothing.
    return chance.choice(free) if len(free) > 1 else None


async def _replace(arena: Arena, chance: random.Random, kind: str, number: signal.Signals) -> None:
    worker = _any_worker(arena, chance)
    if worker is None:
        return
    worker.busy = True
    arena.fault(kind, str(worker.process.pid))
    if worker.process.returncode is None:
        worker.process.send_signal(number)
    await worker.process.wait()
    worker.process = await arena.new_process(worker.environ)
    worker.busy = False


async def _kill(arena: Arena, chance: random.Random) -> None:
    await _replace(arena, chance, "worker killed", signal.SIGKILL)


async def _drain(arena: Arena, chance: random.Random) -> None:
    await _replace(arena, chance, "worker drained", signal.SIGTERM)


async def _pause(arena: Arena, chance: random.Random) -> None:
    worker = _any_worker(arena, chance)
    if worker is None or worker.process.returncode is not None:
        return
    worker.busy = True
    arena.fault("worker paused", str(worker.process.pid))
    worker.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(chance.choice(_PAUSES))
    finally:
        worker.process.send_signal(signal.SIGCONT)
        worker.busy = False


async def _cut_off(arena: Arena, chance: random.Random) -> None:
    """Cut a worker off from a server; then what was held back arrives late, or its connections are lost."""
    worker = _any_worker(arena, chance)
    if worker is None:
        return
    worker.busy = True
    name, cable = chance.choice(worker.cables)
    arena.fault(f"cut off from {name}", str(worker.process.pid))
    cable.cut()
    try:
        await asyncio.sleep(chance.choice(_CUTS))
    finally:
        if chance.random() < 0.5:
            cable.drop()
        cable.mend()
        worker.busy = False


async def _restart_postgresql(arena: Arena, chance: random.Random) -> None:
    crash = chance.random() < 0.5
    arena.fault("PostgreSQL crashed" if crash else "PostgreSQL restarted")
    await arena.restart_postgresql(crash=crash)


async def _restart_temporal(arena: Arena, chance: random.Random) -> None:
    del chance
    arena.fault("Temporal restarted")
    await arena.restart_temporal()


_WEIGHTS: tuple[Deed, ...] = (
    *[_kill] * 6,
    *[_pause] * 6,
    *[_drain] * 3,
    *[_cut_off] * 3,
    _restart_postgresql,
    _restart_temporal,
)
