"""The workflow runs of sessions, as a client of Temporal sees them: outages waited out, failures as our errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import (
    WithStartWorkflowOperation,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, CancelledError, TerminatedError
from temporalio.service import RPCError, RPCStatusCode

from fencepost.domain import contracts, errors
from fencepost.domain.contracts import Status, TurnResult
from fencepost.domain.errors import FencepostError, UnavailableError
from fencepost.domain.ownership import OwnerRun
from fencepost.run_states import ANSWER, REPAIR, RunFacts, facts_of_run, state_of_run

Result = TypeVar("Result")

CANNOT_PROGRESS = 5
"""The attempt at a workflow task from which on its run counts as one that cannot progress."""

_AGAIN_SECONDS = 1.0
_TRIES = 5
# A worker's poll lasts a minute at most, so one that was seen before that is gone.
_POLL_SECONDS = 70
_AWAY = frozenset(
    {
        RPCStatusCode.ABORTED,
        RPCStatusCode.CANCELLED,
        RPCStatusCode.DEADLINE_EXCEEDED,
        RPCStatusCode.RESOURCE_EXHAUSTED,
        RPCStatusCode.UNAVAILABLE,
        RPCStatusCode.UNKNOWN,
    }
)


class Runs:
    """The runs of sessions on one Temporal server; a run's workflow id is its session's id.

    `attempts` is the attempt at a workflow task from which on its run cannot progress.
    """

    def __init__(self, temporal: TemporalClient, attempts: int = CANNOT_PROGRESS) -> None:
        self._temporal = temporal
        self._attempts = attempts

    async def update(
        self,
        session_id: str,
        task_queue: str,
        name: str,
        arguments: list[Any],
        update_id: str,
        start: dict[str, Any],
        result_type: type[Result],
    ) -> Result:
        """Send an update, starting the run it is for; again under the same id when Temporal was away."""

        async def send() -> Result:
            operation: WithStartWorkflowOperation[Any, Any] = WithStartWorkflowOperation(
                contracts.SESSION_TURN,
                start,
                id=session_id,
                task_queue=task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            )
            try:
                answer: Result = await self._temporal.execute_update_with_start_workflow(
                    name, args=arguments, start_workflow_operation=operation, id=update_id, result_type=result_type
                )
            except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError):
                # The same failure, kept for whoever asks how the start went: asyncio logs it when nobody does.
                with suppress(RPCError, asyncio.CancelledError):
                    await operation.workflow_handle()
                raise
            return answer

        for _ in range(_TRIES):
            try:
                return await _through_outages(send)
            except WorkflowUpdateFailedError as error:
                refused = _refusal(error.cause)
                if refused is not None:
                    raise refused from error
                # The run ended before it came to the update. Either its own failure says why, or the next run does it.
                with suppress(_RepairedError):
                    await self._result(session_id)
        raise UnavailableError(f"{name}: runs of session {session_id} end before they answer: try again")

    async def wake(self, session_id: str, task_queue: str) -> None:
        """Tell the session's run to look at the inbox, starting one where none is open."""

        await _through_outages(lambda: self._wake(session_id, task_queue))

    async def _wake(self, session_id: str, task_queue: str, rpc_timeout: timedelta | None = None) -> None:
        await self._temporal.start_workflow(
            contracts.SESSION_TURN,
            {},
            id=session_id,
            task_queue=task_queue,
            start_signal=contracts.SIGNAL_WAKE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            rpc_timeout=rpc_timeout,
        )

    async def redrive(self, session_id: str, task_queue: str) -> None:
        """Do as `wake` does, once. Raises UnavailableError when Temporal does not take it."""
        try:
            await self._wake(session_id, task_queue, ANSWER)
        except RPCError as error:
            raise UnavailableError(f"Temporal did not take a wake for session {session_id}: {error.message}") from error

    async def relocated(self, session_id: str, task_queue: str, execution_id: str | None, *, owed: bool) -> None:
        """Tell the session's run that it was moved, and which execution lost it with that; start one where none is open
        if something is `owed`. Once: when that is lost, the run finds out by itself, and recovery starts one."""
        with suppress(RPCError):
            if execution_id is not None:
                said = contracts.Relocation(execution_id=execution_id).to_wire()
                try:
                    await self._handle(session_id).signal(contracts.SIGNAL_MOVED, said, rpc_timeout=ANSWER)
                    return
                except RPCError as error:
                    if error.status != RPCStatusCode.NOT_FOUND:
                        raise
            if owed:
                await self._wake(session_id, task_queue, ANSWER)

    async def state(self, session_id: str, run_id: str) -> OwnerRun:
        """Say how a run is doing that owns a session, or owned it."""
        return await state_of_run(self._temporal, session_id, run_id)

    async def look(self, session_id: str, run_id: str | None = None) -> RunFacts:
        """Say what Temporal knows of a run, or of the session's newest one."""
        return await facts_of_run(self._temporal, session_id, run_id)

    async def failing(self, task_queue: str, limit: int) -> list[tuple[str, str]]:
        """Give sessions and runs of a task queue whose workflow tasks fail, as far as the server lists them: newer ones
        do so after five failures. Nothing when it does not, or does not answer."""
        query = (
            f"WorkflowType = '{contracts.SESSION_TURN}' AND TaskQueue = '{task_queue}' AND ExecutionStatus = 'Running' "
            "AND TemporalReportedProblems IS NOT NULL"
        )
        try:
            return [(run.id, run.run_id) async for run in self._temporal.list_workflows(query, limit=limit)]
        except RPCError:
            return []

    async def answers(self, session_id: str, run_id: str) -> bool:
        """Say whether an open run says what it does, which it can while it has a worker and no failing task."""
        handle = self._temporal.get_workflow_handle(session_id, run_id=run_id)
        try:
            await handle.query(contracts.QUERY_STATUS, rpc_timeout=ANSWER)
        except (RPCError, WorkflowQueryFailedError):
            return False
        return True

    async def end(self, session_id: str, run_id: str) -> None:
        """Terminate a run that cannot progress, so that it counts as lost; nothing happens to one that has ended.

        Raises UnavailableError when Temporal does not take it.
        """
        handle = self._temporal.get_workflow_handle(session_id, run_id=run_id)
        try:
            await handle.terminate(reason=REPAIR, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise UnavailableError(f"Temporal did not end the run of {session_id}: {error.message}") from error

    async def signal(self, session_id: str, name: str, payload: Any) -> bool:
        """Signal the session's open run; False when there is none."""
        handle = self._handle(session_id)
        try:
            await _through_outages(lambda: handle.signal(name, payload))
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def result(self, session_id: str) -> TurnResult | None:
        """Wait until the session's open run has ended, and give how; else how the last one ended, None without any.

        Raises what a worker refused the run for. A turn whose run a repair has ended goes on in the next run.
        """
        for _ in range(_TRIES):
            try:
                return await self._result(session_id)
            except _RepairedError:
                await asyncio.sleep(_AGAIN_SECONDS)
        again = "the run was ended by a repair, and the turn goes on in another one: ask again"
        return TurnResult(session_id=session_id, outcome="interrupted", error=again)

    async def _result(self, session_id: str) -> TurnResult | None:
        handle = self._handle(session_id)
        try:
            return await _through_outages(handle.result)
        except WorkflowFailureError as error:
            return _ended(session_id, error)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None

    async def status(self, session_id: str) -> Status:
        """Give what the session's open run does now. Raises UnavailableError when no worker answers in time."""
        handle = self._handle(session_id)
        try:
            described = await handle.describe(rpc_timeout=ANSWER)
            if described.status != WorkflowExecutionStatus.RUNNING:
                return Status(session_id=session_id, phase="idle")
            attempt = described.raw_description.pending_workflow_task.attempt
            if attempt >= self._attempts:
                waits = f"its run cannot progress, its workflow task failed {attempt - 1} times: see fencepost doctor"
                return Status(session_id=session_id, phase="waiting", waiting_for=f"{waits} --sessions {session_id}")
            status: Status = await handle.query(contracts.QUERY_STATUS, result_type=Status, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return Status(session_id=session_id, phase="idle")
            raise UnavailableError(f"session {session_id} does not say what it does: {error.message}") from error
        except WorkflowQueryFailedError as error:
            raise UnavailableError(f"session {session_id} does not say what it does: {error}") from error
        return status

    async def open_queue(self, session_id: str) -> str | None:
        """Give the task queue of the session's open run, None when it is idle."""
        handle = self._handle(session_id)
        try:
            described = await _through_outages(handle.describe)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None
        return described.task_queue if described.status == WorkflowExecutionStatus.RUNNING else None

    async def is_served(self, task_queue: str) -> bool:
        """Say whether a worker has asked for work on the task queue within the last minute."""
        request = DescribeTaskQueueRequest(
            namespace=self._temporal.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
        answer = await _through_outages(lambda: self._temporal.workflow_service.describe_task_queue(request))
        return any(time.time() - each.last_access_time.seconds < _POLL_SECONDS for each in answer.pollers)

    async def ping(self) -> None:
        """Ask Temporal for a sign of life. Raises UnavailableError."""
        try:
            await self._temporal.service_client.check_health(retry=False, timeout=ANSWER)
        except (RPCError, RuntimeError) as error:  # the second from a client that was not connected yet
            where = self._temporal.service_client.config.target_host
            reason = error.message if isinstance(error, RPCError) else "no connection"
            raise UnavailableError(f"Temporal at {where} cannot be reached ({reason})") from error

    def _handle(self, session_id: str) -> WorkflowHandle[Any, TurnResult]:
        return self._temporal.get_workflow_handle(session_id, result_type=TurnResult)


class _RepairedError(Exception):
    """The run was ended by a repair: another one goes on."""


async def _through_outages(call: Callable[[], Awaitable[Result]]) -> Result:
    while True:
        try:
            return await call()
        except WorkflowUpdateRPCTimeoutOrCancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from None
        except RPCError as error:
            if error.status not in _AWAY:
                raise
        await asyncio.sleep(_AGAIN_SECONDS)


def _kinds(root: type[FencepostError]) -> dict[str, type[FencepostError]]:
    found = {root.code: root}
    for kind in root.__subclasses__():
        found |= _kinds(kind)
    return found


def _refusal(cause: BaseException | None) -> FencepostError | None:
    """Give the error that a worker raised, as it was there; None for a failure that is not one of ours."""
    if not isinstance(cause, ApplicationError):
        return None
    kind = _kinds(FencepostError).get(cause.type or "")
    if kind is None or kind is errors.ProviderError:
        return None
    return kind(cause.message)


def _ended(session_id: str, failure: WorkflowFailureError) -> TurnResult:
    """Give the result of a run that ended otherwise than by returning one. Raises what it was refused for."""
    cause = failure.cause
    refused = _refusal(cause)
    if refused is not None:
        raise refused from failure
    if isinstance(cause, CancelledError):
        return TurnResult(session_id=session_id, outcome="interrupted", error="the workflow was cancelled")
    if isinstance(cause, TerminatedError):
        if cause.message == REPAIR:
            raise _RepairedError
        return TurnResult(session_id=session_id, outcome="interrupted", error="the workflow was terminated")
    return TurnResult(session_id=session_id, outcome="failed", error=str(cause) or str(failure))
