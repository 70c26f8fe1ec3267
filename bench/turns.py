"""Turns of two steps with one tool call: how long one takes, how many fit into a second, what a long session costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from urllib.parse import urlsplit

import httpx2
from sqlalchemy.ext.asyncio import AsyncConnection

from bench.figures import Figure
from bench.floor import Floor, floor_worker
from bench.house import ANSWER, TOOL_STEP, House, fresh_queue, say, together
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Prompt
from fencepost.store import inbox
from fencepost.store.engine import Database

PROMPT = TOOL_STEP + ANSWER
WARM_UP = 5
BLOCK = 5
SHORT, LONG = 10, 1000

Turn = Callable[[str], Coroutine[object, object, None]]


async def timed(turn: Turn, session_id: str) -> float:
    """Give the milliseconds of one turn."""
    began = time.perf_counter()
    await turn(session_id)
    return (time.perf_counter() - began) * 1000


async def alternated(first: tuple[Turn, str], second: tuple[Turn, str], turns: int) -> tuple[list[float], list[float]]:
    """Give the milliseconds of so many turns of each of two sessions, in blocks by turns: a machine that is busy with
    something else for a while is slow for both. Some turns before them warm up."""
    taken: tuple[list[float], list[float]] = ([], [])
    for session in (first, second):
        for _ in range(WARM_UP):
            await session[0](session[1])
    for begin in range(0, turns, BLOCK):
        for (turn, session_id), times in zip((first, second), taken, strict=True):
            times.extend([await timed(turn, session_id) for _ in range(min(BLOCK, turns - begin))])
    return taken


async def one_session(floor: Turn, product: Turn, turns: int) -> Figure:
    """Measure one session, its turns one after the other."""
    floor_ms, product_ms = await alternated((floor, fresh_id("ses")), (product, fresh_id("ses")), turns)
    base, median = statistics.median(floor_ms), statistics.median(product_ms)
    detail = {"fencepost ms": median, "floor ms": base}
    return Figure("turns", "one session: median of a turn, to the floor's", median / base, 1.6, detail=detail)


async def crowd(turn: Turn, count: int) -> float:
    """Give the seconds that one turn in each of so many new sessions takes, all begun at once."""
    began = time.perf_counter()
    await together(turn(fresh_id("ses")) for _ in range(count))
    return time.perf_counter() - began


async def many_sessions(floor: Turn, product: Turn, count: int, rounds: int) -> Figure:
    """Measure many sessions at once, the floor and the product by turns."""
    floor_s = product_s = 0.0
    await crowd(floor, count)
    for _ in range(rounds):
        floor_s += await crowd(floor, count)
        product_s += await crowd(product, count)
    floor_rate, rate = count * rounds / floor_s, count * rounds / product_s
    detail = {"fencepost/s": rate, "floor/s": floor_rate}
    name = f"{count} sessions at once: turns/s, to the floor's"
    return Figure("turns", name, rate / floor_rate, 0.6, at_least=True, detail=detail)


async def filled(house: House, messages: int) -> str:
    """Give a session that has so many messages; the next turn shows them to the model."""
    session_id = await house.session()

    async def fill(conn: AsyncConnection) -> None:
        for number in range(messages):
            prompt = Prompt(text=f"message {number}")
            await inbox.admit(conn, session_id, fresh_id("msg"), prompt, "steer", resume=False)

    assert house.settings.database_url is not None
    database = Database(house.settings.database_url, pool_size=1)
    await database.transact(fill)
    await database.close()
    return session_id


async def replayed(base_url: str, times: int = 5) -> float:
    """Give the milliseconds that the provider itself takes for the two requests of a turn: those it had last, sent
    again as they are over a bare connection."""
    async with httpx2.AsyncClient(timeout=60) as client:
        bodies = (await client.post(f"{base_url}/chat/completions", json={"bodies": 2})).json()
    where = urlsplit(base_url)
    total = 0.0
    for body in bodies:
        content = httpx2.Request("POST", base_url, json=body).content
        head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(content)}"
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            writer.write(f"{head}\r\n\r\n".encode() + content)
            await reader.readuntil(b"0\r\n\r\n")
            taken.append((time.perf_counter() - began) * 1000)
        writer.close()
        total += statistics.median(taken)
    return total


async def long_session(house: House, product: Turn, turns: int) -> Figure:
    """Measure a turn of a long session against one of a short session, without the provider's own time."""
    short, long = await filled(house, SHORT), await filled(house, LONG)
    short_ms, long_ms = await alternated((product, short), (product, long), turns)
    await product(short)
    short_own = await replayed(house.base_url)
    await product(long)
    long_own = await replayed(house.base_url)
    base, median = statistics.median(short_ms) - short_own, statistics.median(long_ms) - long_own
    detail = {"long ms": median, "short ms": base, "provider's ms": long_own, "and": short_own}
    return Figure("turns", f"a turn at {LONG} messages, to one at {SHORT}", median / base, 1.5, detail=detail)


async def measure(house: House, *, turns: int = 40, sessions: int = 50, rounds: int = 2) -> list[Figure]:
    """Measure the floor and the product by turns, both in this process."""
    floor_queue = fresh_queue("floor")
    temporal = house.client.temporal
    async with house.serving([floor_worker(temporal, floor_queue)]) as queue:

        async def floor(session_id: str) -> None:
            await temporal.execute_workflow(Floor.run, id=session_id, task_queue=floor_queue)

        async def product(session_id: str) -> None:
            await house.turn(session_id, PROMPT, queue)

        say("turns: one session ...")
        figures = [await one_session(floor, product, turns)]
        say(f"turns: {sessions} sessions at once ...")
        figures.append(await many_sessions(floor, product, sessions, rounds))
        say(f"turns: a session of {LONG} messages ...")
        figures.append(await long_session(house, product, max(BLOCK, turns // 2)))
    return figures
