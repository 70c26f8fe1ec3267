"""Turns of two steps with one tool call: how long one takes, how many fit into a second, and what Temporal stores."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client
from temporalio.worker import Worker

from bench.floor import Floor, floor_worker
from fencepost.domain.contracts import SESSION_TURN
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location, Prompt
from fencepost.services import Services
from fencepost.store import inbox, sessions
from fencepost.store.sessions import NewSession
from worker import build_workers

PROMPT = 'tool: read {"path": "note.txt"}\nthen:\nsay: The note says heron.'
WARM_UP = 5


@dataclass(frozen=True)
class Bench:
    """What every measurement uses."""

    client: Client
    services: Services
    location: Location

    @property
    def queue(self) -> str:
        """Give the product's task queue."""
        return self.services.settings.task_queue


@asynccontextmanager
async def serving(workers: list[Worker]) -> AsyncIterator[None]:
    """Run workers for as long as the body runs."""
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        await asyncio.gather(*(worker.shutdown() for worker in workers))
        await asyncio.gather(*running)


async def floor_turn(bench: Bench, session_id: str, queue: str) -> None:
    """Run one floor workflow."""
    await bench.client.execute_workflow(Floor.run, id=session_id, task_queue=queue)


async def product_turn(bench: Bench, session_id: str, queue: str) -> None:
    """Run one turn of a session as a plain client does."""
    given = {"session": {"location": bench.location.to_wire()}, "prompt": {"text": PROMPT}}
    result = await bench.client.execute_workflow(SESSION_TURN, given, id=session_id, task_queue=queue, result_type=dict)
    if result["outcome"] != "done":
        raise RuntimeError(f"a turn of the benchmark ended as {result}")


RunTurn = Callable[[Bench, str, str], Awaitable[None]]


async def one_session(bench: Bench, turn: RunTurn, queue: str, turns: int) -> list[float]:
    """Give the milliseconds of each of so many turns, one after the other in one session, after a warm-up."""
    session_id, taken = fresh_id("ses"), []
    for number in range(WARM_UP + turns):
        began = time.perf_counter()
        await turn(bench, session_id, queue)
        if number >= WARM_UP:
            taken.append((time.perf_counter() - began) * 1000)
    return taken


async def many_sessions(bench: Bench, turn: RunTurn, queue: str, count: int, turns: int) -> float:
    """Give the turns per second of so many sessions at once, each with its turns one after the other."""

    async def session() -> None:
        session_id = fresh_id("ses")
        for _ in range(turns):
            await turn(bench, session_id, queue)

    began = time.perf_counter()
    await asyncio.gather(*(session() for _ in range(count)))
    return count * turns / (time.perf_counter() - began)


async def history(bench: Bench, messages: int) -> dict[str, int]:
    """Give the events and bytes that Temporal stores of one turn of a session with so many messages before it."""
    session_id = fresh_id("ses")

    async def fill(conn: AsyncConnection) -> None:
        await sessions.create(conn, session_id, NewSession(location=bench.location))
        for number in range(messages):
            await inbox.admit(
                conn,
                session_id,
                fresh_id("msg"),
                Prompt(text=f"message {number}"),
                "steer",
                resume=False,
            )

    await bench.services.database.transact(fill)
    await product_turn(bench, session_id, bench.queue)
    await product_turn(bench, session_id, bench.queue)
    described = await bench.client.get_workflow_handle(session_id).describe()
    info = described.raw_description.workflow_execution_info
    return {"messages": messages, "events": info.history_length, "bytes": info.history_size_bytes}


async def measure(bench: Bench, *, turns: int, sessions: int, say: Callable[[str], None]) -> dict[str, object]:
    """Measure the floor and the product in turn, in one process on one server."""
    queue = f"floor-{secrets.token_hex(4)}"
    async with serving([floor_worker(bench.client, queue), *build_workers(bench.services)]):
        say("one session ...")
        floor_ms = await one_session(bench, floor_turn, queue, turns)
        product_ms = await one_session(bench, product_turn, bench.queue, turns)
        say(f"{sessions} sessions at once ...")
        floor_rate = await many_sessions(bench, floor_turn, queue, sessions, 3)
        product_rate = await many_sessions(bench, product_turn, bench.queue, sessions, 3)
        say("history ...")
        stored = [await history(bench, count) for count in (10, 500)]
    floor_median, product_median = statistics.median(floor_ms), statistics.median(product_ms)
    return {
        "turn_ms": {"floor": floor_median, "fencepost": product_median, "ratio": product_median / floor_median},
        "turns_per_s": {"floor": floor_rate, "fencepost": product_rate, "ratio": product_rate / floor_rate},
        "history": stored,
        "turns": turns,
        "sessions": sessions,
    }
