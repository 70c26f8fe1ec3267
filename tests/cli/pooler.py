"""A pooler in front of PostgreSQL, as far as listeners see one: the server's notifications never come through."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sqlalchemy.engine import URL, make_url

_SSL_REQUEST = 80877103
_NOTIFICATION = b"A"


@asynccontextmanager
async def pooled(address: str) -> AsyncIterator[str]:
    """Give an address of the same database behind the pooler, for the time of the block."""
    url = make_url(address)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await _serve(url, reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(url: URL, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    first = await reader.readexactly(8)
    length, code = struct.unpack("!II", first)
    if code == _SSL_REQUEST:
        writer.write(b"N")
        first = await reader.readexactly(8)
        length, code = struct.unpack("!II", first)
    folder = url.query.get("host") or url.host or "127.0.0.1"
    assert isinstance(folder, str)
    if folder.startswith("/"):
        above, below = await asyncio.open_unix_connection(str(Path(folder) / f".s.PGSQL.{url.query.get('port', 5432)}"))
    else:
        above, below = await asyncio.open_connection(folder, url.port or 5432)
    below.write(first + await reader.readexactly(length - 8))
    passing = asyncio.create_task(_pass(reader, below))
    try:
        while True:
            kind = await above.readexactly(1)
            size = await above.readexactly(4)
            body = await above.readexactly(struct.unpack("!I", size)[0] - 4)
            if kind != _NOTIFICATION:
                writer.write(kind + size + body)
                await writer.drain()
    finally:
        passing.cancel()
        below.close()
        await asyncio.gather(passing, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
