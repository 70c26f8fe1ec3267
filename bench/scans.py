"""What one recovery scan takes in a large database: among settled rows, and with more to do than fits in it."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.figures import Figure
from bench.house import House, fresh_queue, say
from fencepost.domain.scanning import RECOVERY_SECONDS, RecoveryInput
from fencepost.recoveries import Scan
from fencepost.runs import Runs
from fencepost.store import migrate, recovery
from fencepost.store.engine import Database
from fencepost.store.statement import driver_of

_FILL_SECONDS = 600
_HOUR_AGO = "(extract(epoch FROM now()) * 1000)::bigint - 3600000"
# One session for each thing that waits. {waiting} and {rows} are how many there are.
_FILL = (
    "SET synchronous_commit TO off",
    "SET session_replication_role TO replica",  # foreign keys are right here; looking them up takes most of the time
    """
    INSERT INTO project (id, worktree, time_created, time_updated) VALUES ('bench', '/', 0, 0)
    """,
    """
    INSERT INTO session (id, project_id, slug, directory, title, version, time_created, time_updated)
    SELECT 'ses_' || kind || n, 'bench', 'bench', '/', 'bench', '0', 0, 0
    FROM unnest(ARRAY['claim', 'going', 'input']) AS kind, generate_series(1, {waiting}) AS n
    """,
    "INSERT INTO event_sequence (aggregate_id, seq) SELECT id, 0 FROM session",
    """
    INSERT INTO session_input (id, session_id, prompt, delivery, admitted_seq, promoted_seq, time_created)
    SELECT 'msg_settled' || n, 'ses_input' || 1 + n % {waiting}, '{{}}', 'steer', n, n, n
    FROM generate_series(1, {rows}) AS n
    """,
    """
    INSERT INTO session_recovery
        (session_id, execution_id, continuation_message_id, phase, wake_pending, time_created)
    SELECT 'ses_going' || 1 + n % {waiting}, 'exe_settled' || n, 'msg_going' || n, 'promoted', false, n
    FROM generate_series(1, {rows}) AS n
    """,
    """
    INSERT INTO session_input (id, session_id, prompt, delivery, admitted_seq, wake_pending, time_created)
    SELECT 'msg_waits' || n, 'ses_input' || n, '{{}}', 'steer', 0, true, {hour_ago}
    FROM generate_series(1, {waiting}) AS n
    """,
    """
    INSERT INTO session_recovery (session_id, execution_id, continuation_message_id, phase, time_created)
    SELECT 'ses_going' || n, 'exe_waits' || n, 'msg_goes' || n, 'pending', {hour_ago}
    FROM generate_series(1, {waiting}) AS n
    """,
    """
    INSERT INTO session_execution (id, session_id, owner_id, phase, time_created, expires_at)
    SELECT 'exe_claim' || n, 'ses_claim' || n, gen_random_uuid(), 'ready', 0, {hour_ago}
    FROM generate_series(1, {waiting}) AS n
    """,
    "ANALYZE",
)


@asynccontextmanager
async def _filled(address: str, rows: int, waiting: int) -> AsyncIterator[Database]:
    """Make a database of its own with so many rows, and drop it afterwards."""
    name = f"bench_{secrets.token_hex(4)}"
    administrator = Database(address, pool_size=1)
    try:
        async with administrator.read() as conn:
            await driver_of(conn).execute(f"CREATE DATABASE {name}")
        url = administrator.url.set(database=name).render_as_string(hide_password=False)
        try:
            await migrate.upgrade(url)
            filling = Database(url, pool_size=1)
            async with filling.read() as conn:
                for statement in _FILL:
                    sql = statement.format(rows=rows, waiting=waiting, hour_ago=_HOUR_AGO)
                    await driver_of(conn).execute(sql, timeout=_FILL_SECONDS)
            await filling.close()
            database = Database(url, pool_size=2)
            yield database
            await database.close()
        finally:
            async with administrator.read() as conn:
                await driver_of(conn).execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await administrator.close()


async def _queries(database: Database, batch: int) -> float:
    """Give the milliseconds of the queries by which a scan finds its work."""
    async with database.read() as conn:
        began = time.perf_counter()
        for find in (recovery.abandoned, recovery.recoveries, recovery.lost_inputs):
            if len(await find(conn, batch)) != batch:
                raise RuntimeError("the benchmark's database has too little to do for a scan")
        return (time.perf_counter() - began) * 1000


async def scan_figure(house: House, times: int, rows: int, waiting: int) -> Figure:
    """Measure scans, the first of a database that has just been filled; Temporal is the running one."""
    assert house.settings.database_url is not None
    batch = RecoveryInput().batch
    queries, whole = [], []
    say(f"recovery: a database of {rows:,} settled rows ...")
    async with _filled(house.settings.database_url, rows, waiting) as database:
        # Nobody takes work from this queue: a run that is started waits.
        scan = Scan(database, Runs(house.client.temporal), fresh_queue("unserved"), batch=batch)
        say(f"recovery: a scan, {times} times ...")
        for _ in range(times):
            queries.append(await _queries(database, batch))
            began = time.perf_counter()
            report = await scan.run()
            whole.append((time.perf_counter() - began) * 1000)
            if report.cut_off is not None or len(report.findings) != 3 * batch:
                raise RuntimeError(f"a scan of the benchmark came to {report.result()}")
    detail = {
        "median": statistics.median(whole),
        "its queries, worst": max(queries),
        "their median": statistics.median(queries),
        "settled rows": rows,
        "times": times,
    }
    name = f"a scan that does {3 * batch} things: worst, to the next one"
    return Figure("recovery", name, max(whole), RECOVERY_SECONDS * 1000, "ms", detail=detail)
