"""What a chunk of a stream costs the worker, beside what it costs to read and decode it at all."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from bench.children import Child, child
from bench.figures import Figure
from bench.house import House, MeteredWorker, say

CHUNKS = 20_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU a chunk."""

    worker: float
    plain: float


async def worker_cpu(house: House, worker: MeteredWorker, session_id: str, chunks: int) -> float:
    """Give the worker's seconds of CPU for a turn whose answer has so many chunks."""
    before = (await worker.usage()).cpu
    await house.turn(session_id, json.dumps({"chunks": chunks}), worker.queue)
    return (await worker.usage()).cpu - before


async def plain_cpu(plain: Child, chunks: int) -> float:
    """Give the plain reader's seconds of CPU for the same stream."""
    content = json.dumps({"chunks": chunks})
    await plain.tell({"model": "bench", "stream": True, "messages": [{"role": "user", "content": content}]})
    said = await plain.next()
    if said["chunks"] < chunks:
        raise RuntimeError(f"the plain reader has read {said['chunks']} chunks, not {chunks}")
    return float(said["cpu"])


async def measure(house: House, *, chunks: int = CHUNKS, rounds: int = 4) -> list[Figure]:
    """Measure the worker, in a process of its own, and the plain reader by turns; the first round warms up.

    What is the same for any stream, the turn around it, is taken off: it is that of a stream of one chunk.
    """
    costs = []
    async with house.metered() as worker, child("plain", house.base_url) as plain:
        for number in range(rounds + 1):
            say(f"streaming: {chunks} chunks, {number or 'to warm up'} ...")
            # New sessions: the text of an answer would be sent along with the next request.
            long = await worker_cpu(house, worker, await house.session(), chunks)
            short = await worker_cpu(house, worker, await house.session(), 1)
            floor = await plain_cpu(plain, chunks) - await plain_cpu(plain, 1)
            costs.append(Cost((long - short) / chunks * 1e6, floor / chunks * 1e6))
    costs = costs[1:]
    worker_us, plain_us = (statistics.median(getattr(cost, of) for cost in costs) for of in ("worker", "plain"))
    detail = {"worker us": worker_us, "httpx2 and JSON us": plain_us}
    name = f"CPU a chunk of {chunks}, to plain httpx2 and JSON"
    return [Figure("streaming", name, worker_us / plain_us, 2.5, detail=detail)]
