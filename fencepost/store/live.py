"""The live channel: text as it streams, over LISTEN and NOTIFY. Carries nothing that is not also kept elsewhere.

A lost notification costs a reader time, never content: readers poll as well.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import text
from sqlalchemy.engine import URL

from fencepost.domain.errors import SubscriberOverflowError, UnavailableError
from fencepost.store.engine import Database, unavailable
from fencepost.store.statement import Statement
from fencepost.telemetry import get_logger

# PostgreSQL refuses a payload of 8,000 bytes; the rest is room for the other fields.
_CHUNK_CHARACTERS = 1_500
_ANY_SEQ = 2**53  # above every sequence, and a number to any reader of JSON
_QUEUED_AT_MOST = 10_000

# A notification makes its transaction write to the log. Nobody has to wait until that is on the disk: what has to
# survive a crash of the server was committed before.
_NOTIFY = Statement(
    text(
        "WITH lazy AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)) "
        "SELECT pg_notify(c, p) FROM lazy, unnest(CAST(:c AS text[]), CAST(:p AS text[])) AS n(c, p)"
    )
)

_log = get_logger("fencepost.live")


def channel_of(session_id: str) -> str:
    """Give the name of a session's channel: any session id, within PostgreSQL's 63 bytes."""
    return "fencepost_" + hashlib.sha256(session_id.encode()).hexdigest()[:32]


EVERY_SESSION = "fencepost_every_session"
"""The channel that says which session has more to read, for readers that follow all of them."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a notification says. `seq` is the last durable sequence its sender knows; without a part it says just that
    there is more to read. `offset` counts characters from the part's beginning."""

    seq: int
    message_id: str = ""
    kind: str = ""
    part_id: str = ""
    attempt: int = 0
    offset: int = 0
    text: str = ""

    @classmethod
    def look(cls) -> Notice:
        """Give a notice that there is something durable to read, whatever its sequence."""
        return cls(_ANY_SEQ)

    def encode(self) -> str:
        """Give the payload."""
        if not self.message_id:
            return f"[{self.seq}]"
        said = [self.seq, self.message_id, self.kind, self.part_id, self.attempt, self.offset, self.text]
        return to_json(said).decode()

    @classmethod
    def decode(cls, payload: str) -> Notice:
        """Read a payload. Raises ValueError or TypeError for one that is not ours."""
        return cls(*from_json(payload))

    def pieces(self) -> list[Notice]:
        """Split a long text into notices that fit a payload."""
        size = _CHUNK_CHARACTERS
        if len(self.text) <= size:
            return [self]
        return [
            Notice(
                self.seq,
                self.message_id,
                self.kind,
                self.part_id,
                self.attempt,
                self.offset + start,
                self.text[start : start + size],
            )
            for start in range(0, len(self.text), size)
        ]


class Announcer:
    """Sends notices, outside any other transaction: a NOTIFY inside one makes all commits queue up.

    One task and one statement at a time for the whole process, so that many streams share a round trip.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[str, str]] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to send."""
        self._task = asyncio.create_task(self._run(), name="announcer")

    async def close(self) -> None:
        """Send what waits, as far as that works, and end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(UnavailableError):
            await self._send()

    def send(self, session_id: str, notice: Notice) -> None:
        """Hand over a notice. Never waits and never fails; when the database is away, notices are dropped."""
        if len(self._waiting) > _QUEUED_AT_MOST:
            return
        channel = channel_of(session_id)
        self._waiting += [(channel, piece.encode()) for piece in notice.pieces()]
        if not notice.message_id:
            self._waiting.append((EVERY_SESSION, to_json([notice.seq, session_id]).decode()))
        self._more.set()

    async def _run(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                await self._send()
            except UnavailableError as error:
                _log.warning("live notices dropped", error=error.message)

    async def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        channels, payloads = zip(*waiting, strict=True)
        async with self._database.read() as conn:
            await _NOTIFY.run(conn, c=list(channels), p=list(payloads))


def listen_url(url: URL) -> str:
    """Give the address for a connection of asyncpg's own."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


class Subscription(asyncio.Queue[Notice]):
    """The notices that wait for one reader, at most `maxsize` of them."""

    def __init__(self, size: int, *, strict: bool) -> None:
        super().__init__(size)
        self._strict = strict
        self._overflowed = False

    def take(self, notice: Notice) -> None:
        """Add a notice, at the cost of the oldest one, or of the whole subscription."""
        if self._overflowed:
            return
        if self.full():
            self._overflowed = self._strict
            self.get_nowait()
        self.put_nowait(notice)

    def check(self) -> None:
        """Raise SubscriberOverflowError when this is a strict subscription and its reader was too slow."""
        if self._overflowed:
            raise SubscriberOverflowError(
                f"this reader is too slow: more than {self.maxsize} notices waited for it. "
                "Follow again after the last sequence it has seen",
                capacity=self.maxsize,
            )


_BROKEN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)
"""What a connection that listens may end with."""


class Listener:
    """One listening connection for all readers of this process. It needs a direct connection, not a pooler's."""

    def __init__(self, database: Database) -> None:
        self._url = database.url
        self._conn: asyncpg.Connection[Any] | None = None
        self._queues: dict[str, set[Subscription]] = {}
        self._listening: set[str] = set()  # what the connection listens to
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """End the connection."""
        async with self._lock:
            if self._conn is not None:
                with suppress(*_BROKEN):
                    await self._conn.close(timeout=2)
                self._conn = None

    @asynccontextmanager
    async def subscribed(
        self, session_id: str | None, size: int = 1_000, *, strict: bool = False
    ) -> AsyncIterator[Subscription]:
        """Give a queue of the session's notices, or of what every session's tell (their `message_id` is the session).

        At most `size` notices wait. When there are more, the oldest go, since what they said can be read; a `strict`
        subscription has overflowed then, and takes no more. Raises UnavailableError when the database is away.
        """
        channel = EVERY_SESSION if session_id is None else channel_of(session_id)
        queue = Subscription(size, strict=strict)
        self._queues.setdefault(channel, set()).add(queue)
        try:
            await self.ensure()
            yield queue
        finally:
            await self._unsubscribe(channel, queue)

    @property
    def subscriptions(self) -> int:
        """Give how many subscriptions there are."""
        return sum(len(queues) for queues in self._queues.values())

    async def ensure(self) -> None:
        """Connect again if the connection is gone, and listen to all channels. Raises UnavailableError."""
        async with self._lock:
            try:
                if self._conn is None or self._conn.is_closed():
                    self._listening.clear()
                    self._conn = await asyncpg.connect(listen_url(self._url), timeout=5, command_timeout=10)
                for channel in self._queues.keys() - self._listening:
                    await self._conn.add_listener(channel, self._heard)
                    self._listening.add(channel)
            except _BROKEN as error:
                raise unavailable(self._url, error) from error

    async def _unsubscribe(self, channel: str, queue: Subscription) -> None:
        queues = self._queues.get(channel, set())
        queues.discard(queue)
        if queues:
            return
        self._queues.pop(channel, None)
        async with self._lock:  # the connection does one thing at a time
            if channel not in self._queues and self._conn is not None and not self._conn.is_closed():
                self._listening.discard(channel)
                with suppress(*_BROKEN):
                    await self._conn.remove_listener(channel, self._heard)

    def _heard(self, _connection: Any, _pid: int, channel: str, payload: object) -> None:
        try:
            notice = Notice.decode(str(payload))
        except (ValueError, TypeError):
            return
        for queue in self._queues.get(channel, ()):
            queue.take(notice)
