"""`fencepost db`: the schema of the configured database, or of the local one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from fencepost.cli import terminal
from fencepost.cli.entry import OK, Signals
from fencepost.cli.terminal import Notices
from fencepost.config import load_settings
from fencepost.local import LocalStack
from fencepost.store import migrate
from fencepost.store.engine import Database
from fencepost.store.rebuild import rebuild_all


@asynccontextmanager
async def _address(config: Path | None) -> AsyncIterator[str]:
    settings = load_settings(config, dict(os.environ))
    if settings.database_url is not None:
        yield settings.database_url
        return
    async with LocalStack(settings.home, temporal=False, progress=Notices()) as local:
        yield local.database_url


async def upgrade(config: Path | None, signals: Signals) -> int:
    """Bring the database to this program's schema."""
    del signals
    async with _address(config) as address:
        version = await migrate.upgrade(address, say=Notices())
    terminal.out(f"the database is at migration {version}")
    return OK


async def check(config: Path | None, signals: Signals) -> int:
    """Say whether the database is at this program's schema. Raises SchemaVersionError when it is not."""
    del signals
    async with _address(config) as address:
        database = Database(address, pool_size=1)
        try:
            await migrate.check(database)
        finally:
            await database.close()
    terminal.out(f"the database is at migration {migrate.wanted_version()}, as it should be")
    return OK


async def rebuild(config: Path | None, signals: Signals) -> int:
    """Make every session's projection anew from its log; wakes, ownership and the ledger stay as they are."""
    del signals
    sessions = different = 0
    async with _address(config) as address:
        database = Database(address, pool_size=2)
        try:
            await migrate.check(database)
            async with aclosing(rebuild_all(database)) as rebuilt:
                async for session_id, found in rebuilt:
                    sessions += 1
                    different += bool(found)
                    if found:
                        terminal.out(f"{session_id}: {_counted(len(found), 'row')} did not agree with the log")
        finally:
            await database.close()
    terminal.out(f"rebuilt from the log: {_counted(sessions, 'session')}; changed by it: {different or 'none'}")
    return OK


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
