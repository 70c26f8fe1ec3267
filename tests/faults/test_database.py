"""Connections that the server ends under their users: an outage, whatever the driver makes of it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from asyncpg import InternalClientError, InternalServerError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import UnavailableError
from fencepost.store.engine import Database

_USERS = 8
_ROUNDS = 60
_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> :own"


async def _look(conn: AsyncConnection) -> int:
    return int((await conn.execute(text("SELECT pg_backend_pid()"))).scalar_one())


async def test_a_connection_that_the_server_ends_is_an_outage(database_url: str) -> None:
    """Also in the moment in which the driver has heard of its end and not seen it."""
    database, administrator = Database(database_url, pool_size=_USERS), Database(database_url, pool_size=1)
    failures: Counter[str] = Counter()
    over = False

    async def use() -> None:
        while not over:
            try:
                await database.transact(_look)
                async with database.read() as conn:
                    await _look(conn)
            except UnavailableError:
                failures["outage"] += 1
            except Exception as error:
                failures[f"{type(error).__name__}: {error}"] += 1

    users = [asyncio.create_task(use()) for _ in range(_USERS)]
    for _ in range(_ROUNDS):
        async with administrator.read() as conn:
            await conn.execute(text(_OTHERS), {"own": await _look(conn)})
    over = True
    await asyncio.gather(*users)
    await database.close()
    await administrator.close()

    assert set(failures) == {"outage"}


async def test_a_transaction_that_stands_still_does_not_keep_its_locks(database_url: str) -> None:
    """The database ends it, so that whoever takes over need not wait for a worker that is paused, or cut off."""
    database = Database(database_url, pool_size=2)
    locked, over = asyncio.Event(), asyncio.Event()

    async def stand_still(conn: AsyncConnection) -> None:
        await conn.execute(text("SELECT pg_advisory_xact_lock(1)"))
        locked.set()
        await over.wait()
        await _look(conn)

    async def lock(conn: AsyncConnection) -> None:
        await conn.execute(text("SELECT pg_advisory_xact_lock(1)"))

    standing = asyncio.create_task(database.transact(stand_still))
    await locked.wait()
    await database.transact(lock)
    over.set()
    [outcome] = await asyncio.gather(standing, return_exceptions=True)
    await database.close()

    assert isinstance(outcome, UnavailableError)


@pytest.mark.parametrize("said_by", [InterfaceError, InternalError, OperationalError])
async def test_what_the_driver_says_of_a_lost_connection_is_an_outage(
    database_url: str, said_by: type[DBAPIError]
) -> None:
    """However SQLAlchemy calls it. What the server itself has said, with a SQLSTATE, is none."""
    database = Database(database_url, pool_size=1)

    async def lose(said: Exception) -> None:
        async def work(conn: AsyncConnection) -> None:
            raise said_by("SELECT 1", {}, said)

        await database.transact(work)

    with pytest.raises(UnavailableError, match="it has ended the connection"):
        await lose(InternalClientError("cannot switch to state 12; another operation (2) is in progress"))
    with pytest.raises(said_by):
        await lose(InternalServerError("the server's own fault"))
    await database.close()
