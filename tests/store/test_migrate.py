"""Bringing a database to the schema, and telling what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import SchemaVersionError, UnavailableError
from fencepost.store import migrate, tables
from fencepost.store.engine import Database


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    """Open a database for the body."""
    database = Database(url, pool_size=2)
    try:
        yield database
    finally:
        await database.close()


async def _execute(url: str, *statements: str) -> None:
    async with opened(url) as database, database.begin() as conn:
        for statement in statements:
            await conn.execute(text(statement))


async def _tables(conn: AsyncConnection) -> set[str]:
    return set(await conn.run_sync(lambda sync: inspect(sync).get_table_names()))


@pytest.mark.conformance("MIG-01")
async def test_processes_that_start_together_migrate_once(empty_database_url: str) -> None:
    """All come out well: one made the tables, the others found them made."""
    # Every statement that makes a table is written down by the database itself.
    await _execute(
        empty_database_url,
        "CREATE TABLE made (name text)",
        """CREATE FUNCTION note_made() RETURNS event_trigger LANGUAGE plpgsql AS
           $$ BEGIN
             INSERT INTO made SELECT DISTINCT object_identity FROM pg_event_trigger_ddl_commands()
             WHERE command_tag = 'CREATE TABLE' AND object_type = 'table';
           END $$""",
        "CREATE EVENT TRIGGER noting ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION note_made()",
    )
    said: list[str] = []
    versions = await asyncio.gather(*(migrate.upgrade(empty_database_url, say=said.append) for _ in range(4)))

    assert versions == [migrate.wanted_version()] * 4
    assert set(said) <= {"another process is migrating the database: waiting for it"}
    async with opened(empty_database_url) as database, database.read() as conn:
        made = (await conn.execute(text("SELECT name FROM made ORDER BY name"))).scalars().all()
        assert await _tables(conn) == {*tables.metadata.tables, migrate.VERSION_TABLE, "made"}
    assert len(made) == len(set(made))
    assert {name.removeprefix("public.") for name in made} >= set(tables.metadata.tables)


@pytest.mark.conformance("MIG-01")
async def test_a_migration_waits_for_the_one_that_runs(empty_database_url: str) -> None:
    """And gives up in plain words when that takes too long, with nothing done."""
    async with opened(empty_database_url) as database:
        async with database.read() as conn:
            await conn.execute(text("SELECT pg_advisory_lock(:key)"), {"key": migrate._LOCK})
            await conn.commit()
            with pytest.raises(UnavailableError, match="another process has been migrating"):
                await migrate.upgrade(empty_database_url, wait=0)
            assert await _tables(conn) == set()
            waiting = asyncio.Event()
            upgrade = asyncio.create_task(migrate.upgrade(empty_database_url, say=lambda _: waiting.set()))
            await waiting.wait()
            await conn.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": migrate._LOCK})
            await conn.commit()
        assert await upgrade == migrate.wanted_version()
        await migrate.check(database)


@pytest.mark.conformance("MIG-03")
async def test_an_empty_database_gets_the_schema(empty_database_url: str) -> None:
    """Before that it is told to be without one; doing it twice changes nothing."""
    async with opened(empty_database_url) as database:
        with pytest.raises(SchemaVersionError, match="no fencepost schema yet"):
            await migrate.check(database)
        for _ in range(2):
            assert await migrate.upgrade(empty_database_url) == migrate.wanted_version()
        await migrate.check(database)
        async with database.read() as conn:
            assert await migrate.version(conn) == migrate.wanted_version()


@pytest.mark.conformance("MIG-03")
async def test_a_filled_database_keeps_its_rows(database_url: str) -> None:
    """One that is migrated already, and one that holds other people's tables beside ours."""
    await _execute(
        database_url,
        "INSERT INTO project (id, worktree, time_created, time_updated) VALUES ('prj_1', '/work', 1, 1)",
        "CREATE TABLE of_others (name text)",
        "INSERT INTO of_others VALUES ('here before')",
    )
    await migrate.upgrade(database_url)

    async with opened(database_url) as database, database.read() as conn:
        assert (await conn.execute(text("SELECT id FROM project"))).scalars().all() == ["prj_1"]
        assert (await conn.execute(text("SELECT name FROM of_others"))).scalars().all() == ["here before"]


@pytest.mark.conformance("MIG-03")
async def test_a_database_with_tables_of_others_is_migrated_beside_them(empty_database_url: str) -> None:
    """As long as the names are not ours."""
    await _execute(empty_database_url, "CREATE TABLE of_others (name text)")
    await migrate.upgrade(empty_database_url)

    async with opened(empty_database_url) as database:
        await migrate.check(database)


@pytest.mark.conformance("MIG-03")
async def test_a_database_with_foreign_tables_of_our_names_is_refused(empty_database_url: str) -> None:
    """Nothing is made, nothing is changed."""
    await _execute(empty_database_url, "CREATE TABLE session (name text)")
    with pytest.raises(SchemaVersionError, match=r"tables of other origin .*\(session\)"):
        await migrate.upgrade(empty_database_url)

    async with opened(empty_database_url) as database, database.read() as conn:
        assert await _tables(conn) == {"session"}


async def test_a_database_of_a_newer_program_is_refused(database_url: str) -> None:
    """By a program that starts, and by one that would migrate it."""
    await _execute(database_url, f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'")
    async with opened(database_url) as database:
        with pytest.raises(SchemaVersionError, match="install the newer fencepost"):
            await migrate.check(database)
    with pytest.raises(SchemaVersionError, match="install the newer fencepost"):
        await migrate.upgrade(database_url)
