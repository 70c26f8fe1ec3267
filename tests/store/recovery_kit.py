"""A store whose sessions are all this test's own, and scans over it with a Temporal that does what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import UnavailableError
from fencepost.domain.ownership import OwnerRun
from fencepost.recoveries import Report, Scan
from fencepost.store import tables
from tests.store.kit import StoreKit, open_store

HOUR_MS = 3_600_000


@dataclass
class TemporalRuns:
    """The runs of sessions: what is said of an owner's run, and which sessions were woken, in order."""

    states: dict[str, OwnerRun] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    away: bool = False

    async def state(self, session_id: str, run_id: str) -> OwnerRun:
        """Say how the owner's run is doing: closed, unless the test said otherwise."""
        self.asked.append((session_id, run_id))
        return "unreachable" if self.away else self.states.get(session_id, "closed")

    async def redrive(self, session_id: str, task_queue: str) -> None:
        """Note that the session was woken."""
        if self.away:
            raise UnavailableError("Temporal is away")
        self.woken.append(session_id)


class Recovering:
    """A store and what scans it."""

    def __init__(self, store: StoreKit) -> None:
        self.store = store
        self.runs = TemporalRuns()

    async def scan(self, *, batch: int = 50, dry_run: bool = False, max_recoveries: int = 5) -> Report:
        """Scan once."""
        scan = Scan(
            self.store.database,
            self.runs,
            "a-queue",
            max_recoveries=max_recoveries,
            batch=batch,
            dry_run=dry_run,
        )
        return await scan.run()

    async def did(self, **options: Any) -> list[tuple[str, str]]:
        """Scan once, and give session and deed of each finding, in order."""
        return [(one.session_id, one.outcome.did) for one in (await self.scan(**options)).findings]

    async def abandoned(self, text: str = "hello", session_id: str | None = None) -> str:
        """Give a session whose step was requested and half answered when its run was lost, and its lease ran out."""
        session_id = session_id or await self.store.new_session()
        work = await self.store.begin(session_id, text)
        await work.say("half")
        await self.store.expire(session_id)
        return session_id

    async def waiting(self, text: str = "hello", *, age: int = HOUR_MS) -> str:
        """Give a session with one input that nobody was told of, so many milliseconds ago."""
        session_id = await self.store.new_session()
        await self.store.admit(session_id, text)
        await self.age(tables.session_input, session_id, age)
        return session_id

    async def age(self, table: Any, session_id: str, milliseconds: int) -> None:
        """Let the session's rows be older."""
        older = update(table).where(table.c.session_id == session_id)
        await self._run(older.values(time_created=table.c.time_created - milliseconds))

    async def set(self, table: Any, named: str, **values: Any) -> None:
        """Set columns of a session's rows."""
        await self._run(update(table).where(table.c.session_id == named).values(**values))

    async def sql(self, statement: str, **values: Any) -> None:
        """Run one statement."""
        await self._run(text(statement).bindparams(**values))

    async def _run(self, statement: Any) -> None:
        async def work(conn: AsyncConnection) -> None:
            await conn.execute(statement)

        await self.store.database.transact(work)

    async def recovery(self, named: str, **columns: Any) -> dict[str, Any]:
        """Insert a continuation's row for a session, with these columns changed, and give it."""
        row = {
            "session_id": named,
            "execution_id": f"exe_{named}",
            "continuation_message_id": f"msg_c{named[4:]}",
            "phase": "pending",
            "time_created": 1_000,
            **columns,
        }
        await self._run(tables.session_recovery.insert().values(**row))
        return row

    async def errors(self, table: Any) -> dict[str, str]:
        """Give the errors of the rows that were put aside, by session."""
        async with self.store.database.read() as conn:
            found = await conn.execute(select(table).where(table.c.recovery_error.is_not(None)))
            return {row.session_id: row.recovery_error for row in found}


@pytest.fixture
async def recovering(postgres_url: str, template_database: str) -> AsyncIterator[Recovering]:
    """A database of this test's own: a scan sees every session there is."""
    async with open_store(postgres_url, template_database) as store:
        yield Recovering(store)
