"""A worker dies, stands still, or loses its database at every durable boundary of a turn, and another one goes on.

A representative part runs with the suite, everything with FAULTS=all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from fencepost.store.engine import Database
from tests.faults.stage import Model, broken, open_stage
from tests.faulty_worker import PROBES, SIDES, Deed, Fault, passed
from tests.house_kit import open_house

_DEEDS: tuple[Deed, ...] = ("kill", "stop", "error")
EVERY = os.environ.get("FAULTS") == "all"
_EVERY = [
    *(Fault(probe, side, deed) for probe in PROBES for side in SIDES for deed in _DEEDS),
    # The later ones of what a turn does several times.
    *(Fault("append", side, deed, nth) for nth in (2, 3) for side in SIDES for deed in _DEEDS),
    *(Fault(probe, side, deed, 2) for probe in ("promote", "intent") for side in SIDES for deed in _DEEDS),
]
_SOME = [
    Fault("admit", "after", "kill"),
    Fault("promote", "after", "kill"),
    Fault("append", "after", "kill", 2),
    Fault("start", "after", "kill"),
    Fault("end", "within", "kill"),
    Fault("release", "after", "kill"),
    Fault("promote", "within", "stop"),  # it holds the session's locks
    Fault("claim", "after", "error"),
    Fault("called", "within", "error"),
    Fault("settle", "after", "error"),
]


def name_of(fault: Fault) -> str:
    return f"{fault.deed} {fault.side} {fault.probe} {fault.nth}"


@pytest.mark.parametrize("fault", _EVERY if EVERY else _SOME, ids=name_of)
async def test_a_turn_outlives_a_fault_at(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, fault: Fault
) -> None:
    async with open_stage(database_url, temporal_client, task_queue, tmp_path) as stage:
        worker, mark = await stage.faulty(fault)
        handle = await stage.start("Do it, and say so.")
        await broken(worker, fault, mark)
        if fault.deed != "error":
            await stage.healthy()
        result: Any = await handle.result()
        if fault.deed == "stop":
            before = await stage.traces()
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
            assert await worker.ended() == 0  # it has done whatever it still does
            assert await stage.traces() == before

        assert result["outcome"] == "done"
        await stage.verify()


async def test_every_point_at_which_a_fault_is_due_is_passed(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a transaction does moves to another one now and then: a fault that waits for it would wait for ever."""
    passes: Counter[str] = Counter()
    transact = Database.transact

    async def counted(database: Database, work: Any, *, alone: bool = False) -> Any:
        passes.update(passed(work))
        return await transact(database, work, alone=alone)

    monkeypatch.setattr(Database, "transact", counted)
    async with open_house(database_url, temporal_client, task_queue, tmp_path, Model(tmp_path / "effects")) as house:
        await house.run(house.new_id(), "Do it, and say so.")

    assert [name_of(fault) for fault in _EVERY if passes[fault.probe] < fault.nth] == []


@pytest.mark.parametrize("tool", ["bash", "write"] if EVERY else ["write"])
async def test_a_paused_worker_does_not_begin_a_tool_after_its_session_was_taken_over(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, tool: str
) -> None:
    """It had the start recorded, and stood still before the effect. The model has been told that it was interrupted."""
    fault = Fault("start", "after", "stop")
    async with open_stage(database_url, temporal_client, task_queue, tmp_path, tool) as stage:
        worker, mark = await stage.faulty(fault)
        handle = await stage.start("Do it, and say so.")
        await broken(worker, fault, mark)
        await stage.healthy()
        await handle.result()
        before = await stage.traces()
        worker.signal(signal.SIGCONT)
        while not any("ownership lost" in line for line in worker.lines):  # noqa: ASYNC110 - it tells nobody else
            await asyncio.sleep(0.02)
        worker.signal(signal.SIGTERM)
        await worker.ended()

        assert await stage.traces() == before
        await stage.verify()
