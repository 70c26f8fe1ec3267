"""What Temporal stores of a step with one tool call, whatever the length of the session and of the stream."""

from __future__ import annotations

from dataclasses import dataclass

from bench.figures import Figure
from bench.house import ANSWER, TOOL_STEP, House, say
from bench.turns import LONG, SHORT, filled

EVENTS, BYTES, ANNOUNCED = 16, 6000, 3
CHUNKS = 5000
FEW, MANY = 1, 5
# The tool call is whole as soon as other text begins, and the stream goes on for longer than announcing waits.
ANNOUNCED_STEP = TOOL_STEP.replace("then:", "delay_ms: 60\nsay: And now I wait.\ndelay_ms: 0\nthen:")
STREAMED_STEP = f"words: {CHUNKS}\n{TOOL_STEP}"


@dataclass(frozen=True, slots=True)
class Stored:
    """Events and bytes of a history."""

    events: float
    size: float


async def stored(house: House, queue: str, session_id: str, prompt: str) -> Stored:
    """Give what Temporal stores of the run of one turn."""
    await house.turn(session_id, prompt, queue)
    described = await house.client.temporal.get_workflow_handle(session_id).describe()
    info = described.raw_description.workflow_execution_info
    return Stored(info.history_length, info.history_size_bytes)


async def each_step(house: House, queue: str, session_id: str, step: str) -> Stored:
    """Give what each step with one tool call adds to a history: the difference of turns with few and many of them."""
    few = await stored(house, queue, session_id, step * FEW + ANSWER)
    many = await stored(house, queue, session_id, step * MANY + ANSWER)
    return Stored((many.events - few.events) / (MANY - FEW), (many.size - few.size) / (MANY - FEW))


async def measure(house: House) -> list[Figure]:
    """Measure histories of short and long sessions, of calls that are announced early, and of a long stream."""
    figures = []
    async with house.serving() as queue:
        for messages in (SHORT, LONG):
            say(f"history: a session of {messages} messages ...")
            session_id = await filled(house, messages)
            await house.turn(session_id, ANSWER, queue)
            for name, step, events in (("", TOOL_STEP, EVENTS), (", announced", ANNOUNCED_STEP, EVENTS + ANNOUNCED)):
                found = await each_step(house, queue, session_id, step)
                where = f"a step at {messages} messages{name}"
                figures.append(Figure("history", where, found.events, events, "events"))
                figures.append(Figure("history", where, found.size, BYTES, "bytes"))
        say(f"history: a stream of {CHUNKS} chunks ...")
        found = await each_step(house, queue, await house.session(), STREAMED_STEP)
        where = f"a step that streams {CHUNKS} chunks"
        # A call at the end of a stream is announced when the end takes its time.
        figures.append(Figure("history", where, found.events, EVENTS + ANNOUNCED, "events"))
        figures.append(Figure("history", where, found.size, BYTES, "bytes"))
    return figures
