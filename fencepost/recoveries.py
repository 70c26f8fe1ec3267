"""The recovery scan: sessions that somebody should work on, and nobody does, are settled and set going again.

Anybody may scan, any number at a time. Temporal is asked outside any transaction, and what it says counts only if the
claim is still the same afterwards. A scan is bounded, so that after an outage sessions come back at a pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from fencepost.domain import scanning
from fencepost.domain.errors import FencepostError, UnavailableError
from fencepost.domain.ownership import OwnerRun
from fencepost.store import recovery
from fencepost.store.engine import Database
from fencepost.store.ownership import Lease
from fencepost.store.recovery import Abandoned, Outcome, Wake
from fencepost.telemetry import get_logger

Found = TypeVar("Found", Abandoned, Wake)

_ROUNDS = 10
_RPC = timedelta(seconds=5)
# Longer than any scan: a run that no worker takes must not stand in the way of later ones for ever.
_RUN = timedelta(minutes=10)

_log = get_logger("fencepost.recovery")


class SessionRuns(Protocol):
    """What a scan needs of Temporal."""

    async def state(self, session_id: str, run_id: str) -> OwnerRun:
        """Say how the run that owns a session is doing."""

    async def redrive(self, session_id: str, task_queue: str) -> None:
        """Have the session's run look at its inbox, starting one. Raises UnavailableError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One session, and what a scan did for it."""

    session_id: str
    outcome: Outcome


@dataclass(slots=True)
class Report:
    """What a scan came to. `cut_off` says why it ended before it was through."""

    findings: list[Finding] = field(default_factory=list)
    cut_off: str | None = None

    def result(self) -> scanning.RecoveryResult:
        """Give it as numbers."""
        counts = Counter(finding.outcome.did for finding in self.findings)
        return scanning.RecoveryResult(done=dict(sorted(counts.items())), cut_off=self.cut_off)


class _UndoneError(Exception):
    """Takes a transaction back and brings out what it would have come to."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Scan:
    """One scan's tools and bounds. `batch` bounds each of the three kinds of work by itself, so that none of them
    waits behind another. With `dry_run` nothing is changed."""

    database: Database
    runs: SessionRuns
    task_queue: str
    lease: Lease = field(default_factory=Lease)
    max_recoveries: int = 5
    batch: int = 50
    dry_run: bool = False

    async def run(self) -> Report:
        """Scan once. Raises UnavailableError when the database is away; without Temporal the scan ends early."""
        report = Report()
        kinds: tuple[Callable[[Report], Awaitable[None]], ...] = (
            lambda report: self._each(report, recovery.abandoned, self.reconcile),
            lambda report: self._each(report, recovery.recoveries, self.wake),
            lambda report: self._each(report, recovery.lost_inputs, self.wake),
        )
        for kind in kinds:
            await kind(report)
            if report.cut_off is not None:
                break
        return report

    async def _each(
        self,
        report: Report,
        find: Callable[[AsyncConnection, int], Awaitable[Sequence[Found]]],
        serve: Callable[[Found], Awaitable[Outcome]],
    ) -> None:
        """Serve one batch. Rows that are put aside do not count: a batch full of them is followed by another."""
        left, before = self.batch, set[str]()
        for _ in range(_ROUNDS):
            async with self.database.read() as conn:
                found = [one for one in await find(conn, left) if one.session_id not in before]
            before.update(one.session_id for one in found)
            quarantined = 0
            for each in found:
                try:
                    outcome = await serve(each)
                except AwayError as error:
                    report.cut_off = str(error)
                    return
                if outcome.did != "passed":
                    report.findings.append(Finding(each.session_id, outcome))
                    self._tell(each.session_id, outcome)
                quarantined += outcome.did == "quarantined"
            left -= len(found) - quarantined
            if not quarantined or left <= 0 or self.dry_run:
                return

    async def reconcile(self, seen: Abandoned) -> Outcome:
        """Reconcile one claim whose lease has run out. Raises AwayError, and UnavailableError of the database."""
        run = await self.runs.state(seen.session_id, seen.owner_id)
        if run == "unreachable":
            raise AwayError("Temporal does not say how the runs of sessions are doing: the scan is to be tried again")
        try:
            return await self._transact(
                lambda conn: recovery.reconcile(conn, seen, run, self.max_recoveries, self.lease)
            )
        except UnavailableError:
            raise
        except Exception as error:
            # Whatever it is, it comes out of this session's rows, and other sessions wait behind it. The words of an
            # error that nobody foresaw may quote what people wrote.
            words = error.message if isinstance(error, FencepostError) else type(error).__name__
            return await self._transact(
                lambda conn: recovery.quarantine(conn, seen, f"cannot be reconciled: {words}"[:500])
            )

    async def wake(self, wake: Wake) -> Outcome:
        """Make one attempt at a wake, counted before it is made. Raises AwayError, and UnavailableError."""
        outcome = await self._transact(lambda conn: recovery.take(conn, wake))
        if outcome.did == "woken" and not self.dry_run:
            try:
                await self.runs.redrive(wake.session_id, self.task_queue)
            except UnavailableError as error:
                raise AwayError(error.message) from error
        return outcome

    async def _transact(self, work: Callable[[AsyncConnection], Awaitable[Outcome]]) -> Outcome:
        async def undone(conn: AsyncConnection) -> Outcome:
            raise _UndoneError(await work(conn))

        try:
            return await self.database.transact(undone if self.dry_run else work)
        except _UndoneError as would:
            return would.outcome

    def _tell(self, session_id: str, outcome: Outcome) -> None:
        if self.dry_run:
            return
        say = _log.warning if outcome.error is not None else _log.info
        say("session recovered", session=session_id, did=outcome.did)


class AwayError(Exception):
    """Temporal does not answer: the scan ends here, and the next one goes on."""


async def schedule(client: Client, deployment: str, task_queue: str) -> None:
    """Have a scan now, and one every few seconds from now on, whichever worker is there for it. Never fails: where
    schedules are not permitted the workers' own first scans, and the command, are what there is."""
    name = scanning.recovery_id(deployment, task_queue)
    action = ScheduleActionStartWorkflow(
        scanning.RECOVERY, id=name, task_queue=task_queue, execution_timeout=_RUN, args=[]
    )
    every = ScheduleSpec(intervals=[ScheduleIntervalSpec(timedelta(seconds=scanning.RECOVERY_SECONDS))])
    policy = SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=10))
    try:
        await client.create_schedule(name, Schedule(action, every, policy=policy), rpc_timeout=_RPC)
    except ScheduleAlreadyRunningError:
        pass
    except (RPCError, RuntimeError) as error:
        _log.warning("recovery not scheduled", kind=type(error).__name__)
    try:
        await client.start_workflow(
            scanning.RECOVERY,
            id=f"{name}-at-start",
            task_queue=task_queue,
            execution_timeout=_RUN,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            rpc_timeout=_RPC,
        )
    except (RPCError, RuntimeError) as error:
        _log.warning("recovery not started", kind=type(error).__name__)
