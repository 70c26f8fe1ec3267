"""The turn workflow: one run per turn of a session, or per few short ones. Its id is the session's id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError, FailureError

from workflows.calls import database_step
from workflows.mail import Letter, as_application_error, read
from workflows.work import Work

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import (
        AdmitStart,
        AdmitStartResult,
        Announcement,
        PromptInput,
        Relocation,
        StartInput,
        Status,
        ToolBegun,
        TurnResult,
    )
    from fencepost.domain.errors import InvalidInputError
    from fencepost.domain.ids import derived_id, is_session_id
    from fencepost.domain.inbox import Receipt
    from fencepost.domain.wire import WireModel

Said = TypeVar("Said", bound=WireModel)


@workflow.defn(name=contracts.SESSION_TURN)
class SessionTurn:
    """Admits what arrives, claims the session, runs its turns, releases it.

    Names and shapes of everything public are in `fencepost.domain.contracts`.
    """

    def __init__(self) -> None:
        self._session_id = workflow.info().workflow_id
        self._work = Work(self._session_id)
        self._mail = self._work.mail
        self._refused: ApplicationError | None = None
        self._others = False

    @workflow.run
    async def run(self, *args: Any) -> TurnResult:
        """Run until the session has nothing to do."""
        work = asyncio.create_task(self._run(self._read_start(args)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # Cancelled from outside: a user's interrupt, and the run ends as cancelled once that is settled.
            self._work.cancel()
            await work
            raise

    async def _run(self, start: StartInput) -> TurnResult:
        await self._begin(start)
        office = asyncio.create_task(self._mail.deliver())
        try:
            result = await self._work.serve()
        except FailureError as error:
            # Nothing that could be repaired here. What came is admitted, for the run that comes next.
            await workflow.wait_condition(lambda: not self._mail)
            await self._refuse(error)
        office.cancel()
        return result

    # Handlers. None of them declares a type: see workflows.mail.

    @workflow.signal(
        name=contracts.SIGNAL_STEER, description="Input for the next safe boundary: {id?, text, files?, agents?}"
    )
    def steer(self, *args: Any) -> None:
        """Admit input that steers."""
        self._posted(contracts.SIGNAL_STEER, args, {"delivery": "steer"})

    @workflow.signal(
        name=contracts.SIGNAL_QUEUE, description="Input for when the session is idle: {id?, text, files?, agents?}"
    )
    def queue(self, *args: Any) -> None:
        """Admit input that waits for its turn."""
        self._posted(contracts.SIGNAL_QUEUE, args, {"delivery": "queue"})

    @workflow.signal(name=contracts.SIGNAL_WAKE, description="Look at the inbox; carries nothing, may be lost")
    def wake(self, *args: Any) -> None:
        """Look at the inbox."""
        self._others = True
        self._work.want()
        if self._work.turn is not None:
            self._work.turn.look()

    @workflow.signal(name=contracts.SIGNAL_INTERRUPT, description="Stop the running turn: {id?, reason?, after?}")
    def interrupt(self, *args: Any) -> None:
        """Stop what was asked for so far; when that is nothing, do nothing."""
        self._others = True
        self._mail.interrupt(args)

    @workflow.signal(
        name=contracts.SIGNAL_ANNOUNCE, description="Internal: a tool call is durable while its stream goes on"
    )
    def announce_tool_call(self, *args: Any) -> None:
        """Start a tool call eagerly."""
        said = self._read_internal(contracts.SIGNAL_ANNOUNCE, Announcement, args)
        if said is not None and self._work.turn is not None:
            self._work.turn.announce(said)

    @workflow.signal(name=contracts.SIGNAL_BEGUN, description="Internal: a tool call that waited for a worker runs")
    def announce_tool_start(self, *args: Any) -> None:
        """Show that a tool call waits no longer."""
        said = self._read_internal(contracts.SIGNAL_BEGUN, ToolBegun, args)
        if said is not None and self._work.turn is not None:
            self._work.turn.begun(said)

    @workflow.signal(name=contracts.SIGNAL_MOVED, description="Internal: the session was moved, work goes on elsewhere")
    def announce_move(self, *args: Any) -> None:
        """Stop what was begun at the old place; the database refuses it already."""
        said = self._read_internal(contracts.SIGNAL_MOVED, Relocation, args)
        self._others = True
        self._work.want()
        if said is not None and self._work.turn is not None:
            self._work.turn.leave(said)

    @workflow.signal(dynamic=True)
    def unknown(self, name: str, args: Sequence[RawValue]) -> None:
        """Show that a signal was sent that does not exist."""
        self._mail.reject(name, InvalidInputError("no such signal; there are steer, queue, interrupt and wake"))

    @workflow.update(
        name=contracts.UPDATE_PROMPT, description="Admit input and give its receipt: {id?, text, delivery?, resume?}"
    )
    async def prompt(self, *args: Any) -> Receipt:
        """Admit input; the update's id names it unless the input has an id of its own."""
        self._others = True
        given = read(PromptInput, args)
        update = workflow.current_update_info()
        assert update is not None
        name = given.id or derived_id("msg", self._session_id, "update", update.id)
        letter = self._mail.take(Letter(name, given))
        await workflow.wait_condition(lambda: letter.done or self._refused is not None)
        if letter.receipt is not None:
            return letter.receipt
        raise letter.error or self._refused or AssertionError("a letter is done by its receipt or an error")

    @prompt.validator
    def check_prompt(self, *args: Any) -> None:
        """Refuse what cannot be understood, before it is accepted."""
        try:
            read(PromptInput, args)
        except InvalidInputError as error:
            _refuse_input("prompt", error)

    @workflow.update(
        name=contracts.UPDATE_RESUME, description="Run the session, at least one step; gives how the turn ended"
    )
    async def resume(self, *args: Any) -> TurnResult:
        """Join the turn that runs, or force one; answer when it has ended. One that is being stopped is not joined."""
        self._others = True
        work = self._work
        stopping = work.turn is not None and work.turn.interrupted()
        before = work.finished_turns + (1 if stopping else 0)
        if work.turn is None or stopping:
            work.want(force=True)
        work.resumes += 1
        await workflow.wait_condition(lambda: work.finished_turns > before or work.ending or self._refused is not None)
        work.resumes -= 1
        if self._refused is not None:
            raise self._refused
        return work.result()

    @workflow.query(name=contracts.QUERY_STATUS, description="What the session does now")
    def status(self, *args: Any) -> Status:
        """Give what people want to know of the running turn."""
        progress = self._work.progress
        return Status(
            session_id=self._session_id,
            phase=progress.state,
            step=progress.steps,
            attempt=progress.attempt,
            agent=progress.plan.agent if progress.plan else None,
            model=str(progress.plan.model) if progress.plan else None,
            tools=tuple(summary for call, summary in progress.running.items() if call not in progress.waits),
            tokens=progress.tokens,
            waiting_for=progress.reason,
            rejected=tuple(self._mail.rejected),
        )

    def _read_internal(self, signal: str, kind: type[Said], args: Sequence[object]) -> Said | None:
        try:
            return read(kind, args)
        except InvalidInputError as error:
            self._mail.reject(signal, error)
            return None

    # Admission

    def _read_start(self, args: tuple[Any, ...]) -> StartInput:
        try:
            if not is_session_id(self._session_id):
                raise InvalidInputError(
                    "the workflow id is the session id: `ses_` and up to 64 letters, digits, `_` or `-`"
                )
            return read(StartInput, args, optional=True)
        except InvalidInputError as error:
            _refuse_input("start input", error)

    async def _begin(self, start: StartInput) -> None:
        """Create the session and admit the prompt of the start input; either is refused visibly."""
        self._mail.rejected.extend(start.rejected)
        self._work.go_on(start.going_on)
        # A bare start is a wake; one that came along with a signal or an update leaves it to those.
        asks = start.prompt is not None or start.carried or not self._others
        if asks and (start.prompt is None or start.prompt.resume):
            self._work.want()
        given = AdmitStart(
            session_id=self._session_id,
            start=start,
            input_id=self._mail.input_id(start.prompt, 0),
            claim=self._work.first_claim(),
            begin=self._work.may_begin(),
        )
        try:
            admitted = await database_step(
                contracts.ADMIT_START, given, AdmitStartResult, summary="admit start input", waiting=self._work.waiting
            )
        except FailureError as error:
            # What came along is refused for the same reason, before the run ends under it.
            self._mail.refuse(as_application_error(error))
            await self._refuse(error)
        self._work.claimed(admitted.claim, admitted.begun)

    async def _refuse(self, error: FailureError) -> NoReturn:
        """End the run with a failure, once everybody who waits for it has been told."""
        self._refused = as_application_error(error)
        await workflow.wait_condition(workflow.all_handlers_finished)
        raise self._refused from error

    def _posted(self, signal: str, args: Sequence[object], delivery: dict[str, Any]) -> None:
        self._others = True
        self._mail.post(signal, args, delivery)


def _refuse_input(what: str, error: InvalidInputError) -> NoReturn:
    raise ApplicationError(f"{what}: {error.message}", type=error.code, non_retryable=True)
