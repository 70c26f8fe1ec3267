"""The turn workflow: one run per turn of a session, or per few short ones. Its id is the session's id."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError, FailureError

from workflows.calls import database_step, failure_message, failure_type, is_ownership_loss
from workflows.mail import read
from workflows.turn import Ended, Progress, Turn

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import (
        AdmitInput,
        AdmitStart,
        Announcement,
        ClaimInput,
        ClaimResult,
        InterruptInput,
        PromptInput,
        Rejection,
        ReleaseInput,
        ReleaseResult,
        StartInput,
        Status,
        TurnResult,
    )
    from fencepost.domain.errors import FencepostError, InvalidInputError
    from fencepost.domain.ids import derived_id, is_session_id
    from fencepost.domain.inbox import Receipt
    from fencepost.domain.ownership import TakeoverReason, Token
    from fencepost.domain.wire import WireModel

Result = TypeVar("Result")

# A run that has lived this long may continue as new without Temporal making it wait.
_OLD_ENOUGH = timedelta(seconds=1)
_REJECTIONS_KEPT = 20


@dataclass
class _Letter:
    """One input from a signal or an update, on its way into the inbox."""

    input_id: str
    prompt: PromptInput
    receipt: Receipt | None = None
    error: ApplicationError | None = None

    @property
    def done(self) -> bool:
        return self.receipt is not None or self.error is not None


@workflow.defn(name=contracts.SESSION_TURN)
class SessionTurn:
    """Admits what arrives, claims the session, runs its turns, releases it.

    Names and shapes of everything public are in `fencepost.domain.contracts`.
    """

    def __init__(self) -> None:
        self._session_id = workflow.info().workflow_id
        self._progress = Progress(self._session_id)
        self._mail: deque[_Letter] = deque()
        self._letters = 0
        self._claims = 0
        self._created = False
        self._refused: ApplicationError | None = None
        self._wanted = False
        self._force = False
        self._others = False
        self._cancelled = False
        self._turn: Turn | None = None
        self._last: Literal["done", "failed", "interrupted", "idle"] = "idle"
        self._finished_turns = 0
        self._forced_turns = 0
        self._rejected: deque[Rejection] = deque(maxlen=_REJECTIONS_KEPT)

    @workflow.run
    async def run(self, *args: Any) -> TurnResult:
        """Run until the session has nothing to do."""
        start = self._read_start(args)
        await self._begin(start)
        self._office = asyncio.create_task(self._deliver())
        work = asyncio.create_task(self._work())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # Cancelled from outside: a user's interrupt, and the run ends as cancelled once that is settled.
            self._cancelled = True
            if self._turn is not None:
                self._turn.stop(InterruptInput(reason="the workflow was cancelled"), "cancelled")
            await work
            raise

    # Handlers. None of them declares a type: see workflows.mail.

    @workflow.signal(
        name=contracts.SIGNAL_STEER, description="Input for the next safe boundary: {id?, text, files?, agents?}"
    )
    def steer(self, *args: Any) -> None:
        """Admit input that steers."""
        self._post(contracts.SIGNAL_STEER, args, {"delivery": "steer"})

    @workflow.signal(
        name=contracts.SIGNAL_QUEUE, description="Input for when the session is idle: {id?, text, files?, agents?}"
    )
    def queue(self, *args: Any) -> None:
        """Admit input that waits for its turn."""
        self._post(contracts.SIGNAL_QUEUE, args, {"delivery": "queue"})

    @workflow.signal(name=contracts.SIGNAL_WAKE, description="Look at the inbox; carries nothing, may be lost")
    def wake(self, *args: Any) -> None:
        """Look at the inbox."""
        self._wanted = self._others = True

    @workflow.signal(name=contracts.SIGNAL_INTERRUPT, description="Stop the running turn: {id?, reason?, after?}")
    def interrupt(self, *args: Any) -> None:
        """Stop the turn that runs; without one, do nothing."""
        self._others = True
        try:
            given = read(InterruptInput, args, optional=True)
        except InvalidInputError as error:
            self._reject(contracts.SIGNAL_INTERRUPT, error)
            return
        if self._turn is not None:
            self._turn.stop(given, "user")

    @workflow.signal(
        name=contracts.SIGNAL_ANNOUNCE, description="Internal: a tool call is durable while its stream goes on"
    )
    def announce_tool_call(self, *args: Any) -> None:
        """Start a tool call eagerly."""
        try:
            said = read(Announcement, args)
        except InvalidInputError as error:
            self._reject(contracts.SIGNAL_ANNOUNCE, error)
            return
        if self._turn is not None:
            self._turn.announce(said)

    @workflow.signal(dynamic=True)
    def unknown(self, name: str, args: Sequence[RawValue]) -> None:
        """Show that a signal was sent that does not exist."""
        self._reject(name, InvalidInputError("there is no such signal; there are steer, queue, interrupt and wake"))

    @workflow.update(
        name=contracts.UPDATE_PROMPT, description="Admit input and give its receipt: {id?, text, delivery?, resume?}"
    )
    async def prompt(self, *args: Any) -> Receipt:
        """Admit input; the update's id names it unless the input has an id of its own."""
        self._others = True
        given = read(PromptInput, args)
        update = workflow.current_update_info()
        assert update is not None
        letter = _Letter(given.id or derived_id("msg", self._session_id, "update", update.id), given)
        self._mail.append(letter)
        await workflow.wait_condition(lambda: letter.done)
        if letter.error is not None:
            raise letter.error
        assert letter.receipt is not None
        return letter.receipt

    @prompt.validator
    def check_prompt(self, *args: Any) -> None:
        """Refuse what cannot be understood, before it is accepted."""
        try:
            read(PromptInput, args)
        except InvalidInputError as error:
            _refuse("prompt", error)

    @workflow.update(
        name=contracts.UPDATE_RESUME, description="Run the session, at least one step; gives how the turn ended"
    )
    async def resume(self, *args: Any) -> TurnResult:
        """Join the turn that runs, or force one; answer when it has ended."""
        self._others = True
        ended = self._finished_turns
        if self._turn is None:
            self._wanted = self._force = True
        await workflow.wait_condition(lambda: self._finished_turns > ended or self._refused is not None)
        if self._refused is not None:
            raise self._refused
        return self._result()

    @workflow.query(name=contracts.QUERY_STATUS, description="What the session does now")
    def status(self, *args: Any) -> Status:
        """Give what people want to know of the running turn."""
        progress = self._progress
        return Status(
            session_id=self._session_id,
            phase=progress.phase,
            step=progress.steps,
            attempt=progress.attempt,
            agent=progress.plan.agent if progress.plan else None,
            model=str(progress.plan.model) if progress.plan else None,
            tools=tuple(progress.running.values()),
            tokens=progress.tokens,
            waiting_for=progress.waiting_for,
            rejected=tuple(self._rejected),
        )

    # Admission

    def _read_start(self, args: tuple[Any, ...]) -> StartInput:
        try:
            if not is_session_id(self._session_id):
                raise InvalidInputError(
                    "the workflow id is the session id: `ses_` and up to 59 letters, digits, `_` or `-`"
                )
            return read(StartInput, args, optional=True)
        except InvalidInputError as error:
            _refuse("start input", error)

    async def _begin(self, start: StartInput) -> None:
        """Create the session and admit the prompt of the start input; either is refused visibly."""
        if start.prompt is not None or start.carried or not self._others:
            # A bare start is a wake; one that came along with a signal or an update leaves it to those.
            self._wanted |= start.prompt is None or start.prompt.resume
        given = AdmitStart(session_id=self._session_id, start=start, input_id=self._input_id(start.prompt, 0))
        try:
            await self._database(contracts.ADMIT_START, given, type(None), "admit start input")
        except FailureError as error:
            self._refused = ApplicationError(failure_message(error), type=_code(error), non_retryable=True)
            # Updates that came along are refused for the same reason, before the run ends under them.
            for letter in self._mail:
                letter.error = self._refused
            await workflow.wait_condition(workflow.all_handlers_finished)
            raise self._refused from error
        self._created = True

    def _input_id(self, prompt: PromptInput | None, ordinal: int) -> str:
        """Name an input by what does not change when the run is reset."""
        if prompt is not None and prompt.id is not None:
            return prompt.id
        return derived_id("msg", self._session_id, workflow.info().original_execution_run_id, ordinal)

    def _post(self, signal: str, args: tuple[Any, ...], delivery: dict[str, Any]) -> None:
        self._letters += 1  # also for a bad one, so that those after it keep their ids
        self._others = True
        try:
            prompt = read(PromptInput, args).model_copy(update=delivery)
        except InvalidInputError as error:
            self._reject(signal, error)
            return
        self._mail.append(_Letter(self._input_id(prompt, self._letters), prompt))

    def _reject(self, signal: str, error: FencepostError) -> None:
        workflow.logger.warning("signal %s rejected: %s", signal, error.message)
        self._rejected.append(Rejection(signal=signal, reason=error.message))

    async def _deliver(self) -> None:
        """Admit what arrives, in its order, while whatever else goes on."""
        while True:
            await workflow.wait_condition(lambda: bool(self._mail))
            letter = self._mail[0]
            given = AdmitInput(session_id=self._session_id, input_id=letter.input_id, prompt=letter.prompt)
            try:
                letter.receipt = await self._database(contracts.ADMIT_INPUT, given, Receipt, "admit input")
                self._wanted |= letter.prompt.resume
            except FailureError as error:
                letter.error = ApplicationError(failure_message(error), type=_code(error), non_retryable=True)
                self._reject("input", InvalidInputError(failure_message(error)))
            self._mail.popleft()

    # Turns

    async def _work(self) -> TurnResult:
        reason: TakeoverReason = "lost"
        while True:
            await workflow.wait_condition(lambda: not self._mail)
            if not self._wanted or self._cancelled:
                await workflow.wait_condition(workflow.all_handlers_finished)
                if (self._wanted and not self._cancelled) or self._mail:
                    continue
                self._progress.phase = "idle"
                return self._result()
            self._wanted = False
            force, self._force = self._force, False
            claim = await self._claim(force, reason)
            reason = "lost"
            if claim.token is None:
                self._end_turn("failed" if claim.exhausted else self._last)
                if claim.exhausted:
                    self._progress.error = "the turn was cut off too often, and was given up: send a prompt to go on"
                continue
            try:
                reason = await self._run_turns(claim, force)
            except FailureError as error:
                if not is_ownership_loss(error):
                    raise
                self._wanted = True  # claim again: after a reset this run is the new owner, and takes over

    async def _claim(self, force: bool, reason: TakeoverReason) -> ClaimResult:
        self._claims += 1
        given = ClaimInput(session_id=self._session_id, ordinal=self._claims, force=force, reason=reason)
        return await self._database(contracts.CLAIM_SESSION, given, ClaimResult, "claim session")

    async def _run_turns(self, claim: ClaimResult, force: bool) -> TakeoverReason:
        """Run turns under one claim until the session is released or has to be claimed anew."""
        assert claim.token is not None
        assert claim.settings is not None
        turn = self._turn = Turn(claim.token, claim.settings, self._progress)
        if self._cancelled:
            turn.stop(InterruptInput(reason="the workflow was cancelled"), "cancelled")
        try:
            while True:
                ended = await turn.run(force=force)
                force = False
                if ended == "take-over":
                    self._wanted = True
                    return turn.reason
                released = await self._release(claim.token, interrupted=ended == "interrupted")
                self._end_turn(_OUTCOMES[ended])
                if released != "more":
                    self._wanted |= released == "lost"
                    return "lost"
                if ended == "interrupted" or self._should_continue_as_new():
                    # What came during an interrupt runs under a fresh claim, as does a turn of a long run.
                    self._wanted = True
                    await self._maybe_continue_as_new()
                    return "lost"
        finally:
            self._turn = None

    async def _release(self, token: Token, *, interrupted: bool) -> str:
        released = await self._database(
            contracts.RELEASE_SESSION,
            ReleaseInput(token=token, interrupted=interrupted),
            ReleaseResult,
            "release session",
        )
        return released.state

    def _should_continue_as_new(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or workflow.now() - info.start_time >= _OLD_ENOUGH

    async def _maybe_continue_as_new(self) -> None:
        """Begin the next turn as a new run, with everything that was signalled to this one admitted."""
        if not self._should_continue_as_new():
            return
        await workflow.wait_condition(lambda: not self._mail and workflow.all_handlers_finished())
        workflow.continue_as_new(StartInput(carried=True))

    def _end_turn(self, outcome: Literal["done", "failed", "interrupted", "idle"]) -> None:
        self._last = outcome
        self._finished_turns += 1
        self._progress.phase = "idle"
        self._progress.show()

    def _result(self) -> TurnResult:
        progress = self._progress
        return TurnResult(
            session_id=self._session_id,
            outcome=self._last,
            steps=progress.steps,
            tokens=progress.tokens,
            cost=progress.cost,
            error=progress.error if self._last == "failed" else None,
        )

    async def _database(self, name: str, given: WireModel, result_type: type[Result], summary: str) -> Result:
        return await database_step(name, given, result_type, summary=summary, waiting=self._waiting)

    def _waiting(self, what: str | None) -> None:
        self._progress.waiting_for = what
        if what is not None:
            self._progress.phase = "waiting"
            self._progress.show()


_OUTCOMES: dict[Ended, Literal["done", "failed", "interrupted"]] = {
    "yield": "done",
    "failed": "failed",
    "interrupted": "interrupted",
}


def _code(error: FailureError) -> str:
    return failure_type(error) or FencepostError.code


def _refuse(what: str, error: InvalidInputError) -> NoReturn:
    raise ApplicationError(f"{what}: {error.message}", type=error.code, non_retryable=True)
