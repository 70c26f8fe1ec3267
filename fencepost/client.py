"""A client of sessions: admits input, follows what happens, waits for how it ends. Needs no worker's code.

It writes through the turn workflow, except for the creation of a session, and reads from the database. Outages of
Temporal are waited out; every request carries an id of its own, so that one sent twice counts once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError
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

from fencepost.config import Settings
from fencepost.domain import contracts, errors
from fencepost.domain.contracts import InterruptInput, PromptInput, SessionInput, StartInput, Status, TurnResult
from fencepost.domain.errors import ConfigurationError, FencepostError, InvalidInputError, UnavailableError
from fencepost.domain.ids import derived_id, fresh_id, is_session_id
from fencepost.domain.inbox import Delivery, Receipt
from fencepost.domain.messages import Message
from fencepost.services import connect_temporal
from fencepost.store import event_log, migrate, readers, sessions
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Listener
from fencepost.store.readers import Delta
from fencepost.store.sessions import NewSession, Session

Result = TypeVar("Result")
Service: TypeAlias = Literal["PostgreSQL", "Temporal"]

_AGAIN_SECONDS = 1.0
_PAGE = 200
_TRIES = 5
# A worker's poll lasts a minute at most, so one that was seen before that is gone.
_POLL_SECONDS = 70
_ANSWER = timedelta(seconds=3)
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


class Client:
    """Sessions as a program sees them. Made by `open_client`; one per process is enough."""

    def __init__(self, settings: Settings, database: Database, temporal: TemporalClient, listener: Listener) -> None:
        self.settings = settings
        self.temporal = temporal
        self._database = database
        self._listener = listener

    async def create(self, new: NewSession, session_id: str | None = None) -> Session:
        """Create a session, or give the existing one of this id unchanged. Raises InvalidInputError for a bad id."""
        session_id = fresh_id("ses") if session_id is None else session_id
        _check_id(session_id)
        wanted = session_id
        return await self._database.transact(lambda conn: sessions.create(conn, wanted, new))

    async def get(self, session_id: str) -> Session:
        """Give a session. Raises NotFoundError."""
        async with self._database.read() as conn:
            return await sessions.get(conn, session_id)

    async def messages(self, session_id: str) -> list[Message]:
        """Give the session's messages, oldest first. Raises NotFoundError."""
        await self.get(session_id)
        found: list[Message] = []
        after = -1
        while True:
            async with self._database.read() as conn:
                page = await readers.page(conn, session_id, limit=_PAGE, after=after)
            if not page:
                return found
            found += [message for _, message in page]
            after = page[-1][0]

    def events(self, session_id: str, after: int = -1) -> AsyncIterator[StoredEvent | Delta]:
        """Follow a session: its durable events after a sequence, then what happens, for ever; see `readers.follow`."""
        return readers.follow(self._database, self._listener, session_id, after)

    async def head(self, session_id: str) -> int:
        """Give the sequence of the session's last event, -1 when there is none."""
        async with self._database.read() as conn:
            return await event_log.latest(conn, session_id)

    async def prompt(
        self,
        session_id: str,
        text: str,
        *,
        id: str | None = None,  # noqa: A002 - the name of the field
        delivery: Delivery = "steer",
        resume: bool = True,
        session: SessionInput | None = None,
    ) -> Receipt:
        """Admit input, starting a run where none is open; `session` are the attributes of a new session.

        Raises NotFoundError for an unknown session without attributes, InvalidInputError for what cannot be
        understood, PromptConflictError when the id stands for something else, and what a worker refuses a session for.
        Waits while no worker is there, or Temporal is away.
        """
        if session is None:
            await self.get(session_id)
        _check_id(session_id)
        try:
            given = PromptInput(id=id or fresh_id("msg"), text=text, delivery=delivery, resume=resume)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidInputError(f"prompt: {first['loc'][0]}: {first['msg']}") from None
        start = StartInput(session=session).to_wire()
        # Temporal answers an update id that it knows by itself, so other content under one input id needs another one.
        update_id = derived_id("int", session_id, given.model_dump_json())
        return await self._update(session_id, contracts.UPDATE_PROMPT, [given.to_wire()], update_id, start, Receipt)

    async def resume(self, session_id: str) -> TurnResult:
        """Join the turn that runs or force one step, and give how it ended. Raises NotFoundError."""
        await self.get(session_id)
        return await self._update(session_id, contracts.UPDATE_RESUME, [], fresh_id("int"), {}, TurnResult)

    async def interrupt(self, session_id: str, reason: str | None = None, *, after: int | None = None) -> bool:
        """Stop the turn that runs; False when the session is idle. `after` is the last sequence that was seen."""
        given = InterruptInput(id=fresh_id("int"), reason=reason, after=after)
        handle = self._handle(session_id)
        try:
            await self._through_outages(lambda: handle.signal(contracts.SIGNAL_INTERRUPT, given.to_wire()))
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def result(self, session_id: str) -> TurnResult:
        """Wait until the session's open run has ended, and give how; of an idle session, how its last run ended.

        Raises NotFoundError for an unknown session, and what a worker refused the run for.
        """
        handle = self._handle(session_id)
        try:
            return await self._through_outages(handle.result)
        except WorkflowFailureError as error:
            return _ended(session_id, error)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            await self.get(session_id)
            return TurnResult(session_id=session_id, outcome="idle")

    async def status(self, session_id: str) -> Status:
        """Give what the session's open run does now; of an idle session, that it is idle.

        Raises UnavailableError when no worker answers in time, or Temporal is away.
        """
        handle = self._handle(session_id)
        try:
            described = await handle.describe(rpc_timeout=_ANSWER)
            if described.status != WorkflowExecutionStatus.RUNNING:
                return Status(session_id=session_id, phase="idle")
            status: Status = await handle.query(contracts.QUERY_STATUS, result_type=Status, rpc_timeout=_ANSWER)
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
            described = await self._through_outages(handle.describe)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None
        return described.task_queue if described.status == WorkflowExecutionStatus.RUNNING else None

    async def is_served(self, task_queue: str | None = None) -> bool:
        """Say whether a worker has asked for work on the task queue within the last minute."""
        request = DescribeTaskQueueRequest(
            namespace=self.temporal.namespace,
            task_queue=TaskQueue(name=task_queue or self.settings.task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
        answer = await self._through_outages(lambda: self.temporal.workflow_service.describe_task_queue(request))
        return any(time.time() - each.last_access_time.seconds < _POLL_SECONDS for each in answer.pollers)

    async def check(self, service: Service) -> None:
        """Ask a service for a sign of life. Raises UnavailableError."""
        if service == "PostgreSQL":
            await self._database.ping()
            return
        try:
            await self.temporal.service_client.check_health(retry=False, timeout=_ANSWER)
        except RPCError as error:
            where = self.temporal.service_client.config.target_host
            raise UnavailableError(f"Temporal at {where} cannot be reached ({error.message})") from error

    def _handle(self, session_id: str) -> WorkflowHandle[Any, TurnResult]:
        return self.temporal.get_workflow_handle(session_id, result_type=TurnResult)

    async def _update(
        self,
        session_id: str,
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
                task_queue=self.settings.task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            )
            answer: Result = await self.temporal.execute_update_with_start_workflow(
                name, args=arguments, start_workflow_operation=operation, id=update_id, result_type=result_type
            )
            return answer

        for _ in range(_TRIES):
            try:
                return await self._through_outages(send)
            except WorkflowUpdateFailedError as error:
                refused = _refusal(error.cause)
                if refused is not None:
                    raise refused from error
                # The run ended before it came to the update. Either its own failure says why, or the next run does it.
                await self.result(session_id)
        raise UnavailableError(f"{name}: runs of session {session_id} end before they answer: try again")

    async def _through_outages(self, call: Callable[[], Awaitable[Result]]) -> Result:
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


def _check_id(session_id: str) -> None:
    if not is_session_id(session_id):
        raise InvalidInputError(
            f"{session_id!r} is no session id: `ses_` and up to 59 letters, digits, `_` or `-`, please"
        )


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
        return TurnResult(session_id=session_id, outcome="interrupted", error="the workflow was terminated")
    return TurnResult(session_id=session_id, outcome="failed", error=str(cause) or str(failure))


@asynccontextmanager
async def open_client(settings: Settings, environ: Mapping[str, str] | None = None) -> AsyncIterator[Client]:
    """Connect to both services. Raises ConfigurationError, UnavailableError or SchemaVersionError.

    `environ` is where Temporal's own settings are read from, the process's environment when it is None.
    """
    if settings.database_url is None:
        raise ConfigurationError("no database: set FENCEPOST_DATABASE_URL, or use `fencepost dev` for a local one")
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, pool_size=5)
        stack.push_async_callback(database.close)
        await migrate.check(database)
        temporal = await connect_temporal(os.environ if environ is None else environ)
        listener = Listener(database)
        stack.push_async_callback(listener.close)
        yield Client(settings, database, temporal, listener)
