"""The way from a process to its servers, to be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sqlalchemy.engine import make_url

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Cable:
    """Passes connections on to a server. While it is cut nothing comes through and nobody is told, as in a network that
    is gone: what was sent arrives when it is mended."""

    def __init__(self, reach: Callable[[], Awaitable[_Streams]]) -> None:
        self._reach = reach
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    def cut(self) -> None:
        """Hold back everything from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Let through what was held back, and all that follows."""
        self._whole.set()

    def drop(self) -> None:
        """End all connections at once. New ones find the cable as it is."""
        for connection in self._connections:
            connection.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._whole.wait()
                from_server, to_server = await self._reach()
                try:
                    await _first(self._pass(reader, to_server), self._pass(from_server, writer))
                finally:
                    to_server.transport.abort()
        finally:
            writer.transport.abort()
            self._connections.discard(connection)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        """End all connections, and wait for it."""
        self.drop()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def _first(*ways: Awaitable[None]) -> None:
    """Wait until one of them has ended, and end the other."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def cable_to_temporal(address: str) -> AsyncIterator[tuple[Cable, str]]:
    """Give a cable to a Temporal server, and the address at its near end."""
    host, _, port = address.rpartition(":")
    async with _laid(Cable(lambda: asyncio.open_connection(host, int(port)))) as cable:
        yield cable, f"127.0.0.1:{cable.port}"


@asynccontextmanager
async def cable_to_postgresql(database_url: str) -> AsyncIterator[tuple[Cable, str]]:
    """Give a cable to a PostgreSQL server, and the database's address at its near end."""
    url = make_url(database_url)
    host = url.query.get("host") or url.host or "127.0.0.1"
    port = url.query.get("port") or url.port or 5432
    assert isinstance(host, str)
    assert not isinstance(port, tuple)

    def reach() -> Awaitable[_Streams]:
        if host.startswith("/"):
            return asyncio.open_unix_connection(str(Path(host) / f".s.PGSQL.{port}"))
        return asyncio.open_connection(host, int(port))

    async with _laid(Cable(reach)) as cable:
        near = url.set(host="127.0.0.1", port=cable.port, query={})
        yield cable, near.render_as_string(hide_password=False)


@asynccontextmanager
async def _laid(cable: Cable) -> AsyncIterator[Cable]:
    server = await asyncio.start_server(cable.serve, "127.0.0.1", 0)
    cable.port = server.sockets[0].getsockname()[1]
    try:
        yield cable
    finally:
        server.close()
        await cable.close()
