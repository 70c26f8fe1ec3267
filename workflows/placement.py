"""Getting a tool call to a worker that sees the session's files, when there may be none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from workflows.calls import database_step, is_expiry, is_untaken, start_tool
from workflows.progress import Progress

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import CallRef, RefuseTool, ToolInput, ToolOutcome
    from fencepost.domain.errors import WorkspaceUnavailableError

# How often an activity that found the lease expired is started again, each time that a worker took it.
RENEWALS = 3
# A worker that comes takes the call at once, however long it may wait: a longer wait only makes fewer events.
_LONGEST_WAIT = 600.0


class Placement:
    """Starts the tool calls of one turn. `wait_for` awaits an activity as one that an interrupt cancels, `stopped` says
    whether one has come, and `renew` gives the lease its whole length again, or raises that it is lost."""

    def __init__(
        self,
        settings: contracts.Settings,
        progress: Progress,
        *,
        renew: Callable[[], Awaitable[None]],
        wait_for: Callable[[Any], Awaitable[ToolOutcome]],
        stopped: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._renew = renew
        self._wait_for = wait_for
        self._stopped = stopped

    async def execute(self, given: ToolInput, call: CallRef) -> None:
        """Execute the call, or have it refused, once and for all. Raises what the activity failed with."""
        waited, rounds, expiries = 0.0, 0, 0
        while True:
            patience = self._patience(given, rounds)
            try:
                await self._wait_for(start_tool(given, call, self._settings, patience))
            except FailureError as error:
                absent = is_untaken(error)
                if self._stopped() or not (absent or (is_expiry(error) and expiries < RENEWALS)):
                    raise
                # It waited for a worker longer than a lease or than its patience, and has not started.
                expiries = 0 if absent else expiries + 1
            else:
                return
            await self._renew()
            if self._stopped():
                return
            if absent:
                waited, rounds = waited + (patience or 0), rounds + 1
                words = _absence(given.plan.workspace_id, call, waited)
                if self._settings.workspace_absent == "fail":
                    await self._refuse(given, words)
                    return
                self._tell(call, words)
                given = given.model_copy(update={"waited": True})

    def _patience(self, given: ToolInput, rounds: int) -> float | None:
        """Give the seconds that a call may wait. On the turn's own queue there is a worker, or nothing would go on."""
        first = self._settings.workspace_wait
        return min(first * 2.0**rounds, max(first, _LONGEST_WAIT)) if given.plan.workspace_id else None

    def _tell(self, call: CallRef, words: str) -> None:
        if call.id not in self._progress.waits:
            workflow.logger.warning("no worker for a tool call, which waits")
        self._progress.waits[call.id] = words
        self._progress.show()

    async def _refuse(self, given: ToolInput, words: str) -> None:
        """The model is told, and the turn goes on without."""
        await database_step(
            contracts.REFUSE_TOOL,
            RefuseTool(
                token=given.token,
                step=given.step,
                assistant_message_id=given.assistant_message_id,
                call_id=given.call_id,
                error=words,
            ),
            ToolOutcome,
            summary="refuse tool call",
            waiting=self._progress.wait_for_service,
        )


def _absence(workspace_id: str | None, call: CallRef, seconds: float) -> str:
    """Say what is wrong, by its name, and what to do about it."""
    queue = contracts.workspace_queue(workflow.info().task_queue, workspace_id or "")
    return (
        f"{WorkspaceUnavailableError.code}: no worker of workspace {workspace_id} (task queue {queue}) has taken "
        f"{call.summary!r} for {seconds:g} s, being busy or not there: start one with workspace.id = {workspace_id!r}, "
        f"or move the session with `fencepost session move {workflow.info().workflow_id} DIRECTORY`"
    )
