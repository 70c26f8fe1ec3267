"""Calling the activities: their options, and how a turn waits for a database that is away."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, TimeoutType, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeoutError

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import CallRef, Settings, StreamInput, StreamResult, ToolInput, ToolOutcome
    from fencepost.domain.errors import ClaimRefusedError, LeaseExpiredError, OwnershipLostError, UnavailableError
    from fencepost.domain.wire import WireModel

Result = TypeVar("Result")

# A database activity is short, or it is not local: it holds signals back while it runs.
_SHORT = timedelta(seconds=10)
_LONGEST_PAUSE = 30.0
ONCE = RetryPolicy(maximum_attempts=1)


def failure_type(error: BaseException) -> str:
    """Give the stable type of an activity's failure: an error code, `Timeout`, `Cancelled`, or empty."""
    cause: BaseException | None = error
    while isinstance(cause, ActivityError) and cause.cause is not None:
        cause = cause.cause
    if cause is not None and is_cancelled_exception(cause):
        return "Cancelled"
    if isinstance(cause, ActivityTimeoutError):
        return "Timeout"
    return (cause.type or "") if isinstance(cause, ApplicationError) else ""


def failure_message(error: BaseException) -> str:
    """Give the words of an activity's failure."""
    cause: BaseException = error
    while isinstance(cause, ActivityError) and cause.cause is not None:
        cause = cause.cause
    return getattr(cause, "message", None) or str(cause) or type(cause).__name__


async def database_step(
    name: str,
    given: WireModel,
    result_type: type[Result],
    *,
    summary: str,
    waiting: Callable[[str | None], None],
) -> Result:
    """Run a database activity locally, for as long as it takes: an outage is waited out by timers of the workflow.

    `waiting` is told what it waits for, and None when it goes on. Errors of the domain come out as they are. A claim
    that is refused for now is asked for again as well: the lease ends, or Temporal answers.
    """
    pause = 1.0
    while True:
        try:
            result: Result = await workflow.execute_local_activity(
                name,
                given,
                result_type=result_type,
                start_to_close_timeout=_SHORT,
                retry_policy=ONCE,
            )
        except FailureError as error:
            # A local activity's failure comes out as itself, a regular one's inside an ActivityError.
            kind = failure_type(error)
            if kind not in (UnavailableError.code, ClaimRefusedError.code, "Timeout"):
                raise
            waiting(failure_message(error))
            await workflow.sleep(pause, summary=f"{summary}: waiting")
            pause = min(pause * 2, _LONGEST_PAUSE)
        else:
            waiting(None)
            return result


def is_ownership_loss(error: BaseException) -> bool:
    """Say whether the session belongs to somebody else now."""
    return failure_type(error) in (OwnershipLostError.code, LeaseExpiredError.code)


def is_expiry(error: BaseException) -> bool:
    """Say whether nothing was begun, since the lease had run out: nobody has taken the session, or it would be lost."""
    return failure_type(error) == LeaseExpiredError.code


def is_untaken(error: BaseException) -> bool:
    """Say whether nothing was begun, since no worker took the activity in time."""
    cause = error.cause if isinstance(error, ActivityError) else None
    return isinstance(cause, ActivityTimeoutError) and cause.type == TimeoutType.SCHEDULE_TO_START


def start_stream(given: StreamInput, settings: Settings) -> workflow.ActivityHandle[StreamResult]:
    """Start one provider request."""
    attempt = f", attempt {given.attempt}" if given.attempt > 1 else ""
    return workflow.start_activity(
        contracts.STREAM_PROVIDER,
        given,
        result_type=StreamResult,
        summary=f"stream {given.plan.model}, step {given.step}{attempt}",
        start_to_close_timeout=timedelta(seconds=settings.provider_timeout),
        **_held(settings),
    )


def start_tool(
    given: ToolInput, call: CallRef, settings: Settings, patience: float | None
) -> workflow.ActivityHandle[ToolOutcome]:
    """Start one tool call, on the queue of the workers that see the session's workspace; one of them has to take it
    within `patience`, in seconds."""
    queue = workflow.info().task_queue
    workspace = given.plan.workspace_id
    return workflow.start_activity(
        contracts.EXECUTE_TOOL,
        given,
        result_type=ToolOutcome,
        summary=call.summary,
        task_queue=contracts.workspace_queue(queue, workspace) if workspace else queue,
        schedule_to_start_timeout=None if patience is None else timedelta(seconds=patience),
        start_to_close_timeout=timedelta(seconds=settings.tool_timeout),
        **_held(settings),
    )


def _held(settings: Settings) -> dict[str, Any]:
    """One attempt: what may run again is decided here, not by a retry policy. Cancellation waits for the clean-up."""
    return {
        "heartbeat_timeout": timedelta(seconds=settings.heartbeat_timeout),
        "retry_policy": ONCE,
        "cancellation_type": workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    }
