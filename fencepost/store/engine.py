"""Connections and transactions. The only module that opens a transaction, and where the driver's errors end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from asyncpg import Connection, InternalClientError, PostgresError
from asyncpg import InterfaceError as DriverInterfaceError
from pydantic_core import from_json
from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    InvalidatePoolError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.store.statement import driver_of

Result = TypeVar("Result")

# Deadlock and serialization failure: the database asks for the whole transaction to be tried again.
_AGAIN = frozenset({"40P01", "40001"})
# Classes of SQLSTATE that say "not now": connection, resources, operator intervention, not yet accepting.
_AWAY = ("08", "53", "57")
_TRIES = 5
# A worker that stands still in a transaction, or whose machine is gone, must not keep its locks: the database ends it,
# sooner than a local activity of another worker gives up waiting.
_BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = '5s'"


def database_url(text: str) -> URL:
    """Read a PostgreSQL address and choose the driver. Raises ConfigurationError in one line."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "the database address cannot be read: write postgresql://user:password@host:5432/name"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(
            f"the database must be PostgreSQL, not {url.get_backend_name()}: write postgresql://user@host:5432/name"
        )
    return url.set(drivername="postgresql+asyncpg")


# What the driver raises, by itself or through SQLAlchemy. Its internal error is what it says of a connection that the
# server has just ended, until it has seen the end of the stream as well.
_DRIVER_ERRORS = (DBAPIError, PostgresError, DriverInterfaceError, InternalClientError)
_CLIENT_SIDE = (OperationalError, InterfaceError, InternalError, DriverInterfaceError, InternalClientError)


def sqlstate(error: BaseException) -> str:
    """Give the five-character SQLSTATE of a driver error, empty when it has none."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def _is_away(error: BaseException) -> bool:
    """Say whether the database cannot be used now, rather than that it refused what it was asked."""
    if not isinstance(error, _DRIVER_ERRORS):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    state = sqlstate(error)
    if not state:
        return isinstance(error, _CLIENT_SIDE)
    return state.startswith(_AWAY) or state in ("25P03", "3D000", "28P01", "28000")


def unavailable(url: URL, error: BaseException) -> UnavailableError:
    """Put a lost or refused connection into one line, without the password."""
    cause = getattr(error, "orig", error)
    reason = (str(cause).splitlines() or [""])[0] or type(cause).__name__
    if type(cause).__name__ == InternalClientError.__name__:  # the driver's own, or what SQLAlchemy makes of it
        reason = "it has ended the connection"
    where = f"{url.host or 'local socket'}:{url.port or 5432}/{url.database or ''}"
    return UnavailableError(
        f"PostgreSQL at {where} cannot be used ({reason[:200]}): "
        "check that it runs and that FENCEPOST_DATABASE_URL is right"
    )


def _refuse_closed(connection: Any, _record: object, _proxy: object) -> None:
    """After a restart of the server, make the pool drop its old connections instead of handing them out.

    The driver has noticed by then, so this costs nothing, where a ping would cost a round trip for each transaction.
    """
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError


async def _roll_back(driver: Connection[Any]) -> None:
    """Roll back, or drop the connection: it must not go back into the pool with a transaction open."""
    try:
        await driver.execute("ROLLBACK")
    except (PostgresError, DriverInterfaceError, InternalClientError, OSError):
        pass  # what is being raised already says more
    finally:
        if driver.is_in_transaction():
            driver.terminate()


class Database:
    """One pool of connections. `transact` is the only way to write."""

    def __init__(self, address: str, *, pool_size: int = 20) -> None:
        self.url = database_url(address)
        self.engine: AsyncEngine = create_async_engine(
            self.url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=10,
            pool_pre_ping=False,
            json_deserializer=from_json,
            # Transactions are begun and ended by `begin`, at a third of the CPU that SQLAlchemy takes for it.
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,  # they hold what people wrote
            connect_args={"timeout": 5, "command_timeout": 30, "server_settings": {"application_name": "fencepost"}},
        )

        event.listen(self.engine.sync_engine, "checkout", _refuse_closed)

    async def close(self) -> None:
        """Close the pool; connections in use are closed when they come back."""
        await self.engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection for reading. Raises UnavailableError when the database is away."""
        try:
            async with self.engine.connect() as conn:
                yield conn
        except (*_DRIVER_ERRORS, PoolTimeoutError, OSError, TimeoutError) as error:
            if not _is_away(error):
                raise
            raise unavailable(self.url, error) from error

    async def transact(self, work: Callable[[AsyncConnection], Awaitable[Result]], *, alone: bool = False) -> Result:
        """Run the work in one transaction, again when the database asks for it (deadlock, serialization). `alone` says
        that it is one statement, which is a transaction by itself: three round trips fewer.

        The work may run several times, so it must keep its effects inside the transaction. Raises UnavailableError
        when the database is away; whether a commit that was cut off happened is then unknown to the caller.
        """
        for attempt in range(_TRIES):
            try:
                async with self.engine.connect() if alone else self.begin() as conn:
                    return await work(conn)
            except (*_DRIVER_ERRORS, PoolTimeoutError, OSError, TimeoutError) as error:
                if _is_away(error):
                    raise unavailable(self.url, error) from error
                if sqlstate(error) not in _AGAIN or attempt + 1 == _TRIES:
                    raise
                await asyncio.sleep(0.01 * 2**attempt)
        raise AssertionError("unreachable: the last try returns or raises")

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection in a transaction that is committed when the body ends, or rolled back when it raises.

        Raises what the driver raises; `transact` tells apart what that means.
        """
        async with self.engine.connect() as conn:
            driver = driver_of(conn)
            try:
                await driver.execute(_BEGIN)
                yield conn
                await driver.execute("COMMIT")
            finally:
                if driver.is_in_transaction():
                    await _roll_back(driver)

    async def ping(self) -> None:
        """Ask for a trivial answer. Raises UnavailableError."""
        async with self.read() as conn:
            await conn.execute(text("SELECT 1"))
