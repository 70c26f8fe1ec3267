"""How much memory a worker needs for many sessions that stream at the same time, each with a reader."""

from __future__ import annotations

import json

from bench.figures import Figure
from bench.house import House, fresh_queue, say, together
from bench.provider import PIECE, text_after
from fencepost.domain.messages import AssistantMessage, TextPart

BOUND_MB = 350
CHUNKS = 100
DELAY = 0.1


async def answer(house: House, session_id: str) -> str:
    """Give the text that the session keeps: that of all answers, should the machine be too slow for one alone."""
    messages = [one for one in await house.client.messages(session_id) if isinstance(one, AssistantMessage)]
    parts = [part for one in messages for part in one.content if isinstance(part, TextPart)]
    return text_after("".join(part.text for part in parts))


async def measure(house: House, *, sessions: int = 200) -> list[Figure]:
    """Measure a worker in a process of its own. No stream begins before all of them are asked for."""
    gate = {"gate": fresh_queue("gate"), "of": sessions}
    prompt = json.dumps({"chunks": CHUNKS, "delay": DELAY, "stamp": True, **gate})
    session_ids = await house.sessions(sessions)
    async with house.metered() as worker, house.reading(session_ids, 1) as readers:
        say(f"memory: {sessions} sessions that stream ...")
        idle = (await worker.usage()).memory
        await together(house.turn(one, prompt, worker.queue) for one in session_ids)
        said = [await readers.next() for _ in session_ids]
        peak = (await worker.usage()).memory
        answers = {one: await answer(house, one) for one in session_ids}
    served = sum(one["text"] == answers[one["session"]] for one in said)
    uncut = sum(text == PIECE * CHUNKS for text in answers.values())
    overlap = min(one["ended"] for one in said) - max(one["began"] for one in said)
    detail = {"idle MB": idle / 2**20, "seconds that all streamed at once": overlap}
    whole = {"answers that were never cut off": float(uncut)}
    what = f"{sessions} sessions that stream at once"
    return [
        Figure("memory", f"{what}: peak of the worker", peak / 2**20, BOUND_MB, "MB", detail=detail),
        Figure("memory", f"{what}: readers that got all", served, sessions, at_least=True, detail=whole),
    ]
