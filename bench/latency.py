"""How long the first chunk of an answer is on its way, from the provider's socket to a reader in another process."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence

from bench.figures import Figure
from bench.house import House, MeteredWorker, say, together

WARM_UP = 3
DELAY = 0.05
ALONE = json.dumps({"chunks": 5, "delay": DELAY, "stamp": True})
# As long as answers of a model are, so that all sessions stream at the same time although each began at its own.
ANSWER_SECONDS = 8.0
CROWD = json.dumps({"chunks": int(ANSWER_SECONDS / DELAY), "delay": DELAY, "stamp": True})


async def first_chunks(
    house: House, worker: MeteredWorker, session_ids: Sequence[str], prompt: str, turns: int, apart: float = 0
) -> list[float]:
    """Give the milliseconds of the first chunk of each turn of these sessions, begun so many seconds apart."""

    async def session(number: int, session_id: str) -> None:
        await asyncio.sleep(number * apart)
        for _ in range(turns):
            await house.turn(session_id, prompt, worker.queue)

    async with house.reading(session_ids, turns) as readers:
        await together(session(*one) for one in enumerate(session_ids))
        said = [await readers.next() for _ in range(len(session_ids) * turns)]
    taken = [one["first_ms"] for one in said if one["first_ms"] is not None]
    if len(taken) < 2:
        raise RuntimeError("no reader has seen when the first chunk was sent")
    return taken


async def measure(house: House, *, turns: int = 20, sessions: int = 50) -> list[Figure]:
    """Measure one session, and many at once, with the worker and the readers in processes of their own."""
    async with house.metered() as worker:
        say("latency: one session ...")
        alone = (await first_chunks(house, worker, [await house.session()], ALONE, turns + WARM_UP))[WARM_UP:]
        say(f"latency: {sessions} sessions at once ...")
        apart = ANSWER_SECONDS / sessions
        crowd = await first_chunks(house, worker, await house.sessions(sessions), CROWD, 2, apart)
        say(f"latency: {sessions} sessions in one instant ...")
        burst = await first_chunks(house, worker, await house.sessions(sessions), ALONE, 1)
    many = {"begun in one instant": statistics.median(burst)}
    figures = []
    for name, taken, bound, more in (("one session", alone, 15, {}), (f"{sessions} sessions at once", crowd, 60, many)):
        detail = {
            "90th percentile": statistics.quantiles(taken, n=10)[-1],
            "most": max(taken),
            "turns": len(taken),
            **more,
        }
        what = f"first chunk to a reader, {name}: median"
        figures.append(Figure("latency", what, statistics.median(taken), bound, "ms", detail=detail))
    return figures
