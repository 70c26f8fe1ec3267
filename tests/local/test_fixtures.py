"""What every other test relies on: a database and a task queue of its own on servers that are shared."""

from __future__ import annotations

import asyncpg
import pytest
from temporalio.client import Client


async def _tables(url: str) -> set[str]:
    connection = await asyncpg.connect(url.replace("+asyncpg", "", 1))
    try:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        await connection.execute("CREATE TABLE only_here (id int)")
    finally:
        await connection.close()
    return {row["tablename"] for row in rows}


@pytest.mark.parametrize("run", [1, 2])
async def test_each_test_has_a_fresh_database_with_the_schema(database_url: str, run: int) -> None:
    """What one test leaves is not there in the next."""
    tables = await _tables(database_url)

    assert {"session", "event", "session_execution"} <= tables
    assert "only_here" not in tables


async def test_an_empty_database_has_no_schema(empty_database_url: str) -> None:
    """Migrations are tested from nothing."""
    assert await _tables(empty_database_url) == set()


async def test_the_shared_temporal_server_answers(temporal_client: Client, task_queue: str) -> None:
    """One dev server serves the whole run."""
    assert await temporal_client.service_client.check_health()
    assert task_queue.startswith("test-")
