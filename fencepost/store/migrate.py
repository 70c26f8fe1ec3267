"""Bringing a database to this program's schema, and telling whether it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import SchemaVersionError, UnavailableError
from fencepost.store.engine import Database
from fencepost.store.tables import metadata

VERSION_TABLE = "fencepost_version"
# Any number will do, as long as it is always this one.
_LOCK = 7_366_203_715


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def wanted_version() -> str:
    """Give the schema version that this program works with."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None, "the package holds at least one migration"
    return head


def _current(sync: Connection) -> str | None:
    context = MigrationContext.configure(sync, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


async def version(conn: AsyncConnection) -> str | None:
    """Give the database's schema version, None when it has none."""
    return await conn.run_sync(_current)


async def check(database: Database) -> None:
    """Raise SchemaVersionError, with what to do, unless the database is at this program's schema."""
    wanted = wanted_version()
    async with database.read() as conn:
        current = await version(conn)
    if current == wanted:
        return
    if current is None:
        raise SchemaVersionError("the database has no fencepost schema yet: run `fencepost db upgrade`")
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if current in known:
        raise SchemaVersionError(
            f"the database is at migration {current}, this program needs {wanted}: run `fencepost db upgrade`"
        )
    raise SchemaVersionError(
        f"the database is at migration {current}, which this program (at {wanted}) does not know: "
        "install the newer fencepost"
    )


async def upgrade(address: str, *, wait: float = 60, say: Callable[[str], None] | None = None) -> str:
    """Bring the database at this address to the program's schema; give that version.

    Many may call this at once: one migrates, the others wait up to `wait` seconds for it. Raises UnavailableError,
    and SchemaVersionError when the database holds tables of these names that no migration made, or is too new.
    """
    database = Database(address, pool_size=2)
    try:
        async with database.read() as conn:
            await _get_lock(conn, wait, say)
            try:
                await _migrate(database)
            finally:
                await conn.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _LOCK})
                await conn.commit()
        return wanted_version()
    finally:
        await database.close()


async def _get_lock(conn: AsyncConnection, wait: float, say: Callable[[str], None] | None) -> None:
    # Polled: a session that waits inside pg_advisory_lock holds a snapshot, and an index that another session builds
    # concurrently waits for that snapshot, for ever.
    deadline = asyncio.get_running_loop().time() + wait
    told = False
    while True:
        got = (await conn.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK})).scalar_one()
        await conn.commit()
        if got:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise UnavailableError(
                f"another process has been migrating the database for {wait:.0f} s: wait for it or end it"
            )
        if say is not None and not told:
            say("another process is migrating the database: waiting for it")
            told = True
        await asyncio.sleep(0.1)


async def _migrate(database: Database) -> None:
    wanted = wanted_version()

    def run(sync: Connection) -> None:
        config = _config()
        current = _current(sync)
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if current == wanted:
            return
        if current is not None and current not in known:
            raise SchemaVersionError(
                f"the database is at migration {current}, which this program (at {wanted}) does not know: "
                "install the newer fencepost"
            )
        if current is None:
            foreign = sorted(set(inspect(sync).get_table_names()) & set(metadata.tables))
            if foreign:
                raise SchemaVersionError(
                    f"the database holds tables of other origin with fencepost's names ({', '.join(foreign[:3])}): "
                    "use an empty database"
                )
        config.attributes["connection"] = sync
        command.upgrade(config, "head")

    async with database.begin() as conn:
        await conn.run_sync(run)
