"""One claim's work: steps, one after the other, until the agent yields, fails, is interrupted or loses the session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from temporalio import workflow
from temporalio.exceptions import FailureError

from workflows.calls import (
    database_step,
    failure_message,
    failure_type,
    is_expiry,
    is_ownership_loss,
    start_stream,
)
from workflows.mail import Stop
from workflows.placement import RENEWALS, Placement
from workflows.progress import Progress, added

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts, decisions
    from fencepost.domain.contracts import (
        Announcement,
        CallRef,
        Plan,
        ReleaseState,
        Relocation,
        Resolved,
        ResolveInput,
        SettleInput,
        SettleResult,
        StreamInput,
        StreamResult,
        ToolBegun,
        ToolInput,
    )
    from fencepost.domain.errors import UnavailableError
    from fencepost.domain.ownership import TakeoverReason, Token
    from fencepost.domain.wire import WireModel

Result = TypeVar("Result")

# Failures after which the activity's hand may still move somewhere, or the database did not let it finish.
_GONE = frozenset({"Timeout", "Cancelled", contracts.WORKER_SHUTDOWN, UnavailableError.code})

Ended: TypeAlias = Literal["yield", "failed", "interrupted", "take-over", "carry"]
"""`take-over` asks for a new execution id, under which the turn goes on if it has to; `carry` for a new run, in which
it goes on with the next step."""


class Turn:
    """Runs steps under one token. Signals change it only by the methods of their part. `renew` gives the token's lease
    its whole length again."""

    def __init__(
        self,
        token: Token,
        settings: contracts.Settings,
        progress: Progress,
        renew: Callable[[], Awaitable[None]],
    ) -> None:
        self.token = token
        self.settings = settings
        self.progress = progress
        self._renew = renew
        self._stop: Stop | None = None
        self._stop_settled = False
        self.reason: TakeoverReason = "lost"
        self.step = 0
        self.agent_step = 0
        self._message_id = ""
        self._settled = True
        self.released: ReleaseState | None = None
        self._begun: Resolved | None = None
        self._lost_one = False
        self._left = False
        self._looking: asyncio.Task[None] | None = None
        self._open: set[asyncio.Future[Any]] = set()
        self._tools: dict[str, asyncio.Task[None]] = {}
        self._plan: Plan | None = None
        self._placement = Placement(
            settings,
            progress,
            renew=renew,
            wait_for=self._wait_for,
            stopped=lambda: self._left or self.interrupted(),
        )

    # Signals

    def stop(self, stop: Stop) -> bool:
        """Interrupt whatever runs now. False when it is too late: an earlier interrupt is being settled already."""
        if self._stop_settled:
            return False
        if self._stop is None:
            self._stop = stop
            for handle in tuple(self._open):
                handle.cancel()
        else:
            # One interruption for both, that reaches as far as the later one.
            self._stop = replace(self._stop, given=self._stop.given.model_copy(update={"after": stop.given.after}))
        return True

    def interrupted(self) -> bool:
        """Say whether an interrupt has come; it may come during any await."""
        return self._stop is not None

    @property
    def unsettled_stop(self) -> Stop | None:
        """Give an interrupt that has stopped nothing yet."""
        return None if self._stop_settled else self._stop

    def announce(self, said: Announcement) -> None:
        """Start a tool call of the current step while its stream goes on; anything else is not for now."""
        current = (said.execution_id, said.step) == (self.token.execution_id, self.step)
        if current and self._plan is not None and self._open and not self.interrupted():
            self._start_tool(said.call, self._plan)

    def begun(self, said: ToolBegun) -> None:
        """Show that a call which waited for a worker runs now."""
        if said.execution_id == self.token.execution_id and self.progress.waits.pop(said.call_id, ""):
            self.progress.show()

    def leave(self, said: Relocation) -> None:
        """Stop what runs: the session was moved, and what was begun for the old place owns nothing any more."""
        if said.execution_id == self.token.execution_id:
            self._leave()

    def look(self) -> None:
        """While a call waits for a worker that may never come, see whether the session is still held."""
        if self.progress.waits and self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            await self._renew()
        except FailureError as error:
            if is_ownership_loss(error):
                self._leave()
        self._looking = None

    def _leave(self) -> None:
        self._left = True
        for handle in tuple(self._open):
            handle.cancel()

    # Steps

    async def run(self, *, force: bool, going_on: bool = False, begun: Resolved | None = None) -> Ended:
        """Run steps until there is nothing more to do under this token. `force` makes one step even without input;
        `going_on` says that the first one is in the middle of a turn. `begun` is the first one, if it is begun."""
        self.released, self._begun = None, begun
        while True:
            if self.interrupted():
                return await self._interrupted()
            begun = await self._begin(queued=not going_on, required=going_on or force)
            self.step += 1
            self._settled = False
            self._message_id = begun.assistant_message_id
            if not (going_on or force or begun.promoted or begun.continued):
                return "yield"
            force = False
            self.agent_step = 1 if begun.promoted else self.agent_step + 1
            self.progress.steps += 1
            ended = await self._run_step(begun)
            if ended != "continue":
                return ended
            going_on = True

    async def _begin(self, *, queued: bool, required: bool) -> Resolved:
        """Begin the next step, unless that came with the claim, or with the settlement of the one before."""
        begun, self._begun = self._begun, None
        if begun is not None:
            if begun.plan is not None or begun.error is not None or not required:
                return begun
            self.step += 1  # begun when nothing was required of it, it has nothing to run with
        given = self._next_step(queued=queued, required=required)
        return await self._database(contracts.RESOLVE_MODEL, given, Resolved, "resolve model")

    def _next_step(self, *, queued: bool, required: bool) -> ResolveInput:
        return ResolveInput(
            token=self.token, step=self.step + 1, queued=queued, required=required, agent_step=self.agent_step
        )

    async def _run_step(self, begun: Resolved) -> Ended | Literal["continue"]:
        self._plan, self._tools = None, {}
        progress = self.progress
        progress.phase, progress.step, progress.attempt, progress.error = "busy", self.step, 1, None
        plan = begun.plan
        if plan is None:
            return await self._settle_failed(begun.error or "there is no plan for this step")
        self._plan = progress.plan = plan
        progress.show()
        progress.attribute(self.settings.search_attributes)
        result = await self._request(plan)
        if self.interrupted():
            await self._rest()
            return await self._interrupted()
        if result is None:
            await self._rest()
            return "take-over"
        for call in () if self._left else result.calls:
            self._start_tool(call, plan)
        await self._rest()
        if self.interrupted():
            return await self._interrupted()
        if self._lost_one or self._left:
            return "take-over"
        return await self._settle(plan, result)

    async def _request(self, plan: Plan) -> StreamResult | None:
        """Make the step's request, again where that is allowed. None when the activity was lost with its worker."""
        attempt, pause = 1, 0.0
        renewals = 0
        while True:
            if self.interrupted() or self._left:
                return None
            given = StreamInput(
                token=self.token,
                step=self.step,
                attempt=attempt,
                assistant_message_id=self._message_id,
                plan=plan,
                delay=pause,
            )
            try:
                result = await self._wait_for(start_stream(given, self.settings))
            except FailureError as error:
                if is_expiry(error) and renewals < RENEWALS:
                    renewals += 1
                    await self._renew()
                    continue
                if is_ownership_loss(error):
                    self._leave()
                    await self._rest()
                    raise
                if failure_type(error) not in _GONE:
                    return StreamResult(ok=False, output=True, error=failure_message(error))
                self._note_loss(error)
                return None
            if self.interrupted() or not decisions.may_repeat(result, attempt, self.settings.max_provider_attempts):
                return result
            self.progress.phase, self.progress.error = "retrying", result.error
            pause = decisions.back_off(attempt, result.retry_after)
            attempt += 1
            self.progress.attempt = attempt
            self.progress.show()
            if pause >= 1:
                # A long wait holds no activity. A short one is slept there: timers take a second at least.
                await self._pause(pause)
                pause = 0.0
                await self._renew()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._left or self.interrupted(), timeout=timedelta(seconds=seconds), timeout_summary="back-off"
            )

    def _note_loss(self, error: FailureError) -> None:
        """Note that an activity is gone whose hand may still move, and why: drained in good order, or lost."""
        self._lost_one = True
        if failure_type(error) == contracts.WORKER_SHUTDOWN:
            self.reason = "shutdown"
        self.progress.error = failure_message(error)

    async def _wait_for(self, handle: asyncio.Task[Result]) -> Result:
        self._open.add(handle)
        try:
            return await handle
        finally:
            self._open.discard(handle)

    # Tools

    def _start_tool(self, call: CallRef, plan: Plan) -> None:
        if call.id not in self._tools:
            self._tools[call.id] = asyncio.create_task(self._run_tool(call, plan))

    async def _run_tool(self, call: CallRef, plan: Plan) -> None:
        if self.interrupted() or self._left:
            return
        given = ToolInput(
            token=self.token,
            step=self.step,
            assistant_message_id=self._message_id,
            call_id=call.id,
            plan=plan,
        )
        self.progress.running[call.id] = call.summary
        self.progress.show()
        # No `finally` here: when Temporal evicts a run it closes its coroutines outside the workflow's event loop.
        try:
            await self._placement.execute(given, call)
        except FailureError as error:
            # Its outcome is unknown, and it is never started again: the settlement says that it was interrupted.
            if failure_type(error) != "Cancelled":
                self._note_loss(error)
        self.progress.running.pop(call.id, None)
        self.progress.waits.pop(call.id, None)
        self.progress.show()

    async def _rest(self) -> None:
        """Let every tool of the step come to its end: a new execution id would fence the healthy ones."""
        while pending := [task for task in (*self._tools.values(), self._looking) if task and not task.done()]:
            await workflow.wait(pending)

    # Settlement

    async def _settle(self, plan: Plan, result: StreamResult) -> Ended | Literal["continue"]:
        last = decisions.after_step(result) == "yield"
        carry = not last and self._is_long()
        settled = await self._database(
            contracts.SETTLE_STEP,
            SettleInput(
                token=self.token,
                step=self.step,
                assistant_message_id=self._message_id,
                plan=plan,
                result=result,
                release=last,
                next=None if last or carry else self._next_step(queued=False, required=True),
            ),
            SettleResult,
            "settle step",
        )
        self._settled, self.released, self._begun = True, settled.released, settled.begun
        progress = self.progress
        progress.tokens, progress.cost = added(progress.tokens, result.tokens), progress.cost + result.cost
        progress.error = result.error
        progress.show()
        if self.interrupted() and settled.continued:
            return await self._interrupted()
        if settled.continued:
            return "take-over"
        if not result.ok:
            return "failed"
        return "yield" if last else "carry" if carry else "continue"

    def _is_long(self) -> bool:
        """Say whether the run's history is long enough: Temporal ends a run whose history grows without end."""
        info, limit = workflow.info(), self.settings.max_run_events
        if limit is None:  # claimed before there was a limit: it must go the same way again
            return False
        return info.is_continue_as_new_suggested() or info.get_current_history_length() >= limit

    async def _settle_failed(self, error: str) -> Ended:
        settled = await self._database(
            contracts.SETTLE_STEP,
            SettleInput(
                token=self.token,
                step=self.step,
                assistant_message_id=self._message_id,
                error=error,
                release=True,
            ),
            SettleResult,
            "settle step",
        )
        self._settled, self.released = True, settled.released
        self.progress.error = error
        return "failed"

    async def _interrupted(self) -> Ended:
        """Settle what the interrupt cut; between two steps the interruption belongs to the one that would be next."""
        assert self._stop is not None
        self._stop_settled = True
        self.step += self._settled
        try:
            await self._database(
                contracts.SETTLE_STEP,
                SettleInput(
                    token=self.token,
                    step=self.step,
                    interrupt=self._stop.given,
                    interrupt_reason=self._stop.reason,
                ),
                SettleResult,
                "settle interrupted step",
            )
        except FailureError:
            self._stop_settled = False
            raise
        self._settled = True
        return "interrupted"

    async def _database(self, name: str, given: WireModel, result_type: type[Result], summary: str) -> Result:
        return await database_step(name, given, result_type, summary=summary, waiting=self.progress.wait_for_service)
