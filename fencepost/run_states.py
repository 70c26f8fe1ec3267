"""How a workflow run is doing, as Temporal knows it: open, closed, reset, stopped by its user, or out of reach."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowHistoryEventFilterType
from temporalio.service import RPCError, RPCStatusCode

from fencepost.domain.ownership import OwnerRun

REPAIR = "fencepost-repair"
"""The reason with which a repair terminates a run that cannot progress. Such a run counts as lost; one that is
terminated for any other reason was stopped by its user."""

_RESETTER = "history-resetter"
"""Who ends the open run when an earlier run of its chain is reset."""

ANSWER = timedelta(seconds=3)
"""How long Temporal may take to answer where the caller goes on without the answer."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as Temporal knows it, and where it waits for workers. `attempt` is that of its pending workflow task, 0
    without one: all attempts before it have failed."""

    state: OwnerRun
    run_id: str = ""
    attempt: int = 0
    task_queue: str = ""


async def state_of_run(client: Client, session_id: str, run_id: str, asker: str | None = None) -> OwnerRun:
    """Ask Temporal how the run that owns a session is doing. `asker` is the run that wants to know, if one does."""
    return (await facts_of_run(client, session_id, run_id, asker)).state


async def facts_of_run(client: Client, session_id: str, run_id: str | None, asker: str | None = None) -> RunFacts:
    """Ask Temporal about a run, or about the session's newest one.

    Of a run that continued as new the answer is that of the run in which it goes on, or `closed` for that run itself.
    """
    try:
        described = await client.get_workflow_handle(session_id, run_id=run_id).describe(rpc_timeout=ANSWER)
        raw, status = described.raw_description, described.status
        state: OwnerRun = "closed"
        if raw.workflow_extended_info.reset_run_id:
            state = "reset"
        elif status == WorkflowExecutionStatus.RUNNING:
            state = "open"
        elif status == WorkflowExecutionStatus.CANCELED:
            state = "cancelled"
        elif status == WorkflowExecutionStatus.CONTINUED_AS_NEW and run_id is not None:
            # What it did goes on in the next run, which has not claimed the session yet.
            following = await _next_run(client.get_workflow_handle(session_id, run_id=run_id))
            if following not in ("", asker):
                return await facts_of_run(client, session_id, following, asker)
        elif status == WorkflowExecutionStatus.TERMINATED:
            state = await _how_terminated(client.get_workflow_handle(session_id, run_id=described.run_id))
    except RPCError as error:
        # An id that cannot be one of Temporal's is that of no run.
        unknown = error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT)
        return RunFacts("not-found" if unknown else "unreachable")
    return RunFacts(state, described.run_id, raw.pending_workflow_task.attempt, described.task_queue)


async def _how_terminated(handle: WorkflowHandle[Any, Any]) -> OwnerRun:
    """Say why a run was terminated: by a repair, by the reset of an earlier run, or by a user. Its last event tells."""
    event = await _last_event(handle)
    if event is None:
        return "terminated"
    said = event.workflow_execution_terminated_event_attributes
    if said.identity == _RESETTER:
        return "reset"
    return "closed" if said.reason == REPAIR else "terminated"


async def _next_run(handle: WorkflowHandle[Any, Any]) -> str:
    """Give the id of the run as which a run has continued."""
    event = await _last_event(handle)
    followed = event.workflow_execution_continued_as_new_event_attributes if event is not None else None
    return followed.new_execution_run_id if followed is not None else ""


async def _last_event(handle: WorkflowHandle[Any, Any]) -> HistoryEvent | None:
    last = WorkflowHistoryEventFilterType.CLOSE_EVENT
    async for event in handle.fetch_history_events(event_filter_type=last, rpc_timeout=ANSWER):
        return event
    return None
