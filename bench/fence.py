"""What the fence and the ledger cost: the product's transactions, beside bare appends of the same events.

Only the database takes part. The bounds hold what was measured; they are no goal in themselves.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from bench.figures import Figure
from bench.house import House, say
from fencepost.domain import events
from fencepost.domain.events import DurableEvent
from fencepost.domain.ids import derived_id, fresh_id
from fencepost.domain.inbox import Prompt
from fencepost.domain.messages import Tokens
from fencepost.domain.models import ModelRef
from fencepost.domain.ownership import Token
from fencepost.store import claims, event_log, inbox, steps
from fencepost.store.claims import Wanted
from fencepost.store.engine import Database
from fencepost.store.event_log import Entry
from fencepost.store.ownership import Lease
from fencepost.store.statement import driver_of
from fencepost.store.steps import Producer, Settlement

APPEND, STEP = 1.5, 2.0
BLOCK, WARM_UP = 10, 10
LEASE = Lease()
MODEL = ModelRef.parse("scripted/bench")

Deed = Callable[[], Awaitable[None]]


class Fenced:
    """A session that is claimed, and whose steps go through the store's doors."""

    def __init__(self, database: Database, session_id: str) -> None:
        self._database = database
        self._token = Token(session_id=session_id, execution_id=fresh_id("exe"), owner_id="bench")
        self._step = 0
        self._ordinal = 0

    async def _do(self, work: Callable[..., Awaitable[Any]], *args: Any, **kw: Any) -> Any:
        return await self._database.transact(lambda conn: work(conn, *args, **kw))

    async def claim(self) -> None:
        """Claim the session."""
        await self._do(claims.claim, Wanted(self._token, force=True), None, LEASE)

    async def begin(self) -> None:
        """Prepare a step and record its request."""
        self._step, self._ordinal = self._step + 1, 0
        await self._do(steps.prepare, self._token, self._step, queued=True, lease=LEASE)
        # As the product does it: alone. Bare, a request leaves nothing.
        await self._database.transact(lambda conn: steps.request(conn, self._token, self._step, 1, LEASE), alone=True)

    async def append(self, *made: DurableEvent) -> None:
        """Publish events of the step."""
        producer = Producer(self._step, 1, "stream")
        await self._do(steps.publish, self._token, producer, self._ordinal, made, LEASE, kept=False)
        self._ordinal += len(made)

    async def end(self, ended: events.StepEnded) -> None:
        """Settle the step."""
        await self._do(steps.settle, self._token, self._step, Settlement(ended), LEASE)

    @property
    def message_id(self) -> str:
        """The assistant message of the step."""
        return derived_id("msg", self._token.execution_id, self._step)


class Bare:
    """A session whose events are appended by whoever comes."""

    def __init__(self, database: Database, session_id: str) -> None:
        self._database = database
        self._session_id = session_id
        self.message_id = ""

    async def begin(self) -> None:
        """Promote the input that waits."""
        self.message_id = fresh_id("msg")

        async def promote(conn: AsyncConnection) -> None:
            head = await event_log.lock(conn, self._session_id)
            await event_log.append(conn, head, await inbox.promote(conn, head, queued=True))

        await self._database.transact(promote)

    async def append(self, *made: DurableEvent) -> None:
        """Append events."""

        async def add(conn: AsyncConnection) -> None:
            head = await event_log.lock(conn, self._session_id)
            stamped = [event.model_copy(update={"timestamp": head.now}) for event in made]
            await event_log.append(conn, head, [Entry(fresh_id("evt"), event) for event in stamped])

        await self._database.transact(add)

    async def end(self, ended: events.StepEnded) -> None:
        """Append the step's last event."""
        await self.append(ended)


class Session:
    """The same steps for either of the two."""

    def __init__(self, database: Database, session_id: str, hand: Fenced | Bare) -> None:
        self._database = database
        self._id = session_id
        self._hand = hand
        self._parts = itertools.count()

    @property
    def _about(self) -> dict[str, Any]:
        return {"timestamp": 0, "session_id": self._id, "assistant_message_id": self._hand.message_id}

    async def admit(self) -> None:
        """Have input wait, as the turn would find it."""
        prompt = Prompt(text="What does the note say?")
        await self._database.transact(
            lambda conn: inbox.admit(conn, self._id, fresh_id("msg"), prompt, "steer", resume=False)
        )

    async def part(self) -> None:
        """Append one part of an answer."""
        name = f"text-{next(self._parts)}"
        text = "The note says heron."
        started = events.TextStarted(**self._about, text_id=name)
        await self._hand.append(started, events.TextEnded(**self._about, text_id=name, text=text))

    async def begin(self) -> None:
        """Begin a step, up to its first event."""
        await self._hand.begin()
        await self._hand.append(events.StepStarted(**self._about, agent="build", model=MODEL))

    async def step(self) -> None:
        """Make a whole step of one part."""
        await self.begin()
        await self.part()
        await self.end()

    async def end(self) -> None:
        """End the step."""
        await self._hand.end(events.StepEnded(**self._about, finish="stop", cost=0, tokens=Tokens()))


async def alternated(pairs: tuple[Deed, Deed], before: tuple[Deed, Deed], count: int) -> tuple[float, float]:
    """Give the median milliseconds of each deed, done in blocks by turns; what is done `before` each is not counted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(0, count + WARM_UP, BLOCK):
        for which in (0, 1):
            for _ in range(BLOCK):
                await before[which]()
                began = time.perf_counter()
                await pairs[which]()
                taken[which].append((time.perf_counter() - began) * 1000)
    return statistics.median(taken[0][WARM_UP:]), statistics.median(taken[1][WARM_UP:])


async def nothing() -> None:
    """Do nothing."""


async def statements(database: Database, deed: Deed) -> int:
    """Give how many statements a deed sends, the beginnings and ends of its transactions among them."""
    sent: list[object] = []
    async with database.read() as conn:
        driver = driver_of(conn)  # the only one there is
    driver.add_query_logger(sent.append)
    try:
        await deed()
    finally:
        driver.remove_query_logger(sent.append)
    return len(sent)


async def measure(house: House, *, count: int = 100) -> list[Figure]:
    """Measure appends of one part, and whole steps."""
    assert house.settings.database_url is not None
    database = Database(house.settings.database_url, pool_size=1)
    try:
        say("fence: appends and steps ...")
        fenced_id, bare_id = await house.sessions(2)
        hand = Fenced(database, fenced_id)
        await hand.claim()
        fenced, bare = Session(database, fenced_id, hand), Session(database, bare_id, Bare(database, bare_id))
        step_ms = await alternated((fenced.step, bare.step), (fenced.admit, bare.admit), count)
        sent = []
        for session in (fenced, bare):
            await session.admit()
            sent.append(await statements(database, session.step))
        for session in (fenced, bare):
            await session.begin()
        part_ms = await alternated((fenced.part, bare.part), (nothing, nothing), count)
        sent_for_parts = [await statements(database, session.part) for session in (fenced, bare)]
    finally:
        await database.close()
    return [
        _figure("an append of one part, to a bare one", part_ms, sent_for_parts, APPEND),
        _figure("a step in the database, to bare appends", step_ms, sent, STEP),
    ]


def _figure(name: str, taken: tuple[float, float], sent: list[int], bound: float) -> Figure:
    fenced, bare = taken
    detail = {
        "fenced ms": fenced,
        "bare ms": bare,
        "extra ms": fenced - bare,
        "fenced statements": sent[0],
        "bare statements": sent[1],
    }
    return Figure("fence", name, fenced / bare, bound, detail=detail)
