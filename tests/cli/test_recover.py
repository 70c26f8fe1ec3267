"""`fencepost recover`: what workers do by themselves, by hand, and what it says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from temporalio.client import Client

from fencepost.store import tables
from fencepost.store.engine import Database
from tests.cli.command import Ended
from tests.store.kit import StoreKit
from tests.store.recovery_kit import Recovering

Quick = Callable[..., Ended]


@pytest.fixture
async def recovering(database_url: str) -> AsyncIterator[Recovering]:
    """The database of the command, with what a crash leaves in it."""
    database = Database(database_url, pool_size=2)
    yield Recovering(StoreKit(database))
    await database.close()


async def test_it_says_what_it_would_do_and_then_does_it(
    quick: Quick, recovering: Recovering, temporal_client: Client
) -> None:
    """A line for each session; a run that no worker has taken yet is there afterwards."""
    lost, waiting, poison = await recovering.abandoned(), await recovering.waiting(), await recovering.abandoned()
    await recovering.set(tables.session_execution, poison, phase="dancing")
    before = [await recovering.store.everything(one) for one in (lost, waiting, poison)]

    would = await asyncio.to_thread(quick, "recover", "--dry-run")
    assert [await recovering.store.everything(one) for one in (lost, waiting, poison)] == before
    assert would.code == 0
    assert set(would.out.splitlines()) == {
        f"{lost}  would be settled as interrupted, and go on",
        f"{waiting}  would be started",
        f"{poison}  would be put aside: malformed claim: there is no phase 'dancing'",
    }

    done = await asyncio.to_thread(quick, "recover", "--json")
    assert {one["id"]: one["did"] for one in done.objects()} == {
        lost: ["continued", "woken"],
        waiting: ["woken"],
        poison: ["quarantined"],
    }
    try:
        for session_id in (lost, waiting):
            described = await temporal_client.get_workflow_handle(session_id).describe()
            assert described.workflow_type == "SessionTurn"
        again = await asyncio.to_thread(quick, "recover")
        assert (again.code, poison in again.out) == (0, False)
    finally:
        for session_id in (lost, waiting):
            await temporal_client.get_workflow_handle(session_id).terminate()


async def test_without_work_it_says_so(quick: Quick) -> None:
    """On standard error; standard output is for sessions."""
    done = await asyncio.to_thread(quick, "recover")

    assert (done.code, done.out, done.complaint()) == (0, "", "no session waits for recovery")
