"""A worker with one fault in it: it does its deed at a named point of its durable work. `python -m tests.faulty_worker`
reads from FAULT which one; the product itself knows nothing of it.

A point is a transaction of the product, known by the name of the work that it does, and a side of it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

import worker
from fencepost.domain.errors import UnavailableError
from fencepost.domain.events import ToolCalled
from fencepost.process import run_and_exit
from fencepost.store.engine import Database

FAULT = "FAULT"

Side: TypeAlias = Literal["before", "within", "after"]
"""Before the transaction; within it, its work done and not committed; after its commit."""

SIDES: tuple[Side, ...] = ("before", "within", "after")

Deed: TypeAlias = Literal["kill", "stop", "error"]

PROBES = ("admit", "claim", "promote", "intent", "append", "called", "start", "end", "settle", "release")
"""Admission, claim (with the admission of a start input, or by itself), promotion (with that claim, with the
settlement of the step before, or by itself), intent of a request, an append of its stream, the append with a tool's
call, a tool's start and end, a step's settlement, and the release of the session (with the last settlement, or by
itself)."""

_BY_WORK = {
    "InboxActivities.admit_start": "admit",
    "InboxActivities.admit_input": "admit",
    "OwnershipActivities._claim": "claim",
    "ModelActivities.resolve_model": "promote",
    "_Attempt._intend": "intent",
    "StreamAppender._append": "append",
    "StepActivities.settle_step": "settle",
    "OwnershipActivities.release_session": "release",
}
_TOOL = "ToolActivities.execute_tool"

Work: TypeAlias = Callable[[AsyncConnection], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the `nth` pass of a probe; `mark` is the file that is there once it has happened."""

    probe: str
    side: Side
    deed: Deed
    nth: int = 1
    mark: str = ""

    def to_environment(self) -> dict[str, str]:
        """Give the variable that tells the worker."""
        return {FAULT: json.dumps(asdict(self))}


def passed(work: Any) -> set[str]:
    """Give the probes at which this work of a transaction stands."""
    owner = work.__qualname__.partition(".<locals>")[0]
    code = work.__code__
    if owner == _TOOL:
        return {"start" if "start" in code.co_names else "end"}
    probes = {_BY_WORK[owner]} if owner in _BY_WORK else set()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in work.__closure__ or ()), strict=True))
    if any(isinstance(event, ToolCalled) for event in held.get("batch", ())):
        probes.add("called")
    if "settle" in probes and held["given"].release:
        probes.add("release")
    if "settle" in probes and held["given"].next is not None:
        probes.add("promote")
    if "admit" in probes and held.get("wanted") is not None:
        probes.add("claim")
    if "claim" in probes and "admit" in probes and held["given"].begin:
        probes.add("promote")
    return probes


class Breaker:
    """Stands in for `Database.transact`, and does the deed once."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._passes = 0
        self._transact = Database.transact

    def install(self) -> None:
        """Put it into the database of this process."""
        breaker = self

        async def transact(database: Database, work: Work, *, alone: bool = False) -> Any:
            return await breaker.run(database, work, alone)

        Database.transact = transact  # type: ignore[method-assign, assignment]

    async def run(self, database: Database, work: Work, alone: bool) -> Any:
        """Run the work, with the deed at its side of it when its time has come; within it, there is a transaction."""
        fault = self._fault
        due = fault.probe in passed(work)
        self._passes += due
        if not due or self._passes != fault.nth:
            return await self._transact(database, work, alone=alone)
        if fault.side == "before":
            self._do()
        if fault.side != "within":
            result = await self._transact(database, work, alone=alone)
            if fault.side == "after":
                self._do()
            return result

        async def broken(conn: AsyncConnection) -> Any:
            result = await work(conn)
            if fault.deed == "error":
                self._note()
                await conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            else:
                self._do()
            return result

        return await self._transact(database, broken)

    def _note(self) -> None:
        Path(self._fault.mark).touch()

    def _do(self) -> None:
        self._note()
        if self._fault.deed == "error":
            raise UnavailableError("a test says so: the connection was lost, and nobody knows what was committed")
        os.kill(os.getpid(), signal.SIGKILL if self._fault.deed == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    Breaker(Fault(**json.loads(os.environ[FAULT]))).install()
    run_and_exit("worker", worker.run(None))
