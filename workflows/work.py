"""What a run does for its session: it claims it, runs its turns, and releases it."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeVar

from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

from workflows.calls import database_step, is_ownership_loss
from workflows.mail import Mail, Stop
from workflows.progress import Progress
from workflows.turn import Ended, Turn

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import (
        ClaimInput,
        ClaimResult,
        GoingOn,
        InterruptInput,
        Outcome,
        PromptInput,
        ReleaseInput,
        ReleaseResult,
        Resolved,
        StartInput,
        TurnResult,
    )
    from fencepost.domain.errors import OwnershipLostError
    from fencepost.domain.ownership import TakeoverReason, Token
    from fencepost.domain.wire import WireModel

Result = TypeVar("Result")

# A run that has lived this long may continue as new without Temporal making it wait.
_OLD_ENOUGH = timedelta(seconds=1)
# So often the session may be lost, one time right after the other, before the run waits between two claims.
_LOSSES_IN_A_ROW = 3
_LONGEST_PAUSE = 30.0

_OUTCOMES: dict[Ended, Literal["done", "failed", "interrupted"]] = {
    "yield": "done",
    "failed": "failed",
    "interrupted": "interrupted",
}


class Work:
    """Everything between two looks at what is wanted. Signals and updates change it by its public methods only."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.progress = Progress(session_id)
        self.mail = Mail(session_id, self)
        self.turn: Turn | None = None
        self.finished_turns = 0
        self.ending = False
        self.resumes = 0
        self._wanted = False
        self._force = False
        self._claims = 0
        self._claiming = False
        self._held: ClaimResult | None = None
        self._begun: Resolved | None = None
        self._given_up = False
        self._cancelled = False
        self._stop: Stop | None = None
        self._last: Outcome = "idle"
        self._going_on: GoingOn | None = None

    # What is asked for

    def want(self, *, force: bool = False) -> None:
        """Look at the inbox; with `force` make one step even if it is empty."""
        self._wanted = True
        self._force |= force

    def admitted(self, prompt: PromptInput) -> None:
        """Look at the inbox again, unless the input is only to be recorded."""
        self._wanted |= prompt.resume

    def stoppable(self) -> bool:
        """Say whether there is anything that an interrupt could stop."""
        return self.turn is not None or self._claiming or self._wanted

    def halt(self, stop: Stop) -> None:
        """Stop the turn that runs, or the one that is about to run, with everything that was asked for so far."""
        if self.turn is not None or self._claiming:
            self._wanted = False
        if self.turn is None or not self.turn.stop(stop):
            self._stop = stop

    def cancel(self) -> None:
        """Stop for good: the run was cancelled from outside, and ends once that is settled."""
        self._cancelled = True
        if self.stoppable():
            self.halt(Stop(InterruptInput(reason="the workflow was cancelled"), "cancelled"))

    def waiting(self, what: str | None) -> None:
        """Show what the run waits for."""
        self.progress.wait_for_service(what)

    def result(self) -> TurnResult:
        """Give how the last turn ended."""
        progress = self.progress
        return TurnResult(
            session_id=self.session_id,
            outcome=self._last,
            steps=progress.steps,
            tokens=progress.tokens,
            cost=progress.cost,
            error=progress.error if self._last == "failed" else None,
        )

    def first_claim(self) -> ClaimInput | None:
        """Give the claim that may be made together with the admission of the start input, if the session is wanted."""
        if not self._wanted:
            return None
        self._claims += 1
        return ClaimInput(session_id=self.session_id, ordinal=self._claims, carried=self._going_on is not None)

    def may_begin(self) -> bool:
        """Say whether the first step may be begun with that claim: what came along with the start belongs to it too,
        and is not admitted yet."""
        return not self.mail and not self._force

    def go_on(self, given: GoingOn | None) -> None:
        """Take up the turn of the run before, if it is in the middle of one."""
        self._going_on = given
        if given is not None:
            progress = self.progress
            progress.steps, progress.tokens, progress.cost = given.steps, given.tokens, given.cost

    def claimed(self, claim: ClaimResult | None, begun: Resolved | None) -> None:
        """Take the answer to the first claim, and the step that was begun with it. A claim that found nothing is made
        again: input may have come since."""
        if claim is not None and claim.token is not None:
            self._held, self._begun = claim, begun
        elif claim is not None:
            self._given_up = claim.exhausted

    # Turns

    async def serve(self) -> TurnResult:
        """Run turns until nothing is wanted any more."""
        reason: TakeoverReason = "lost"
        losses = 0
        while not await self._rested():
            try:
                reason, losses = await self._serve_once(reason), 0
            except FailureError as error:
                if not is_ownership_loss(error):
                    raise
                # Claim again: after a reset this run is the new owner, and takes over.
                self._wanted, reason, losses = True, "lost", losses + 1
                if losses > _LOSSES_IN_A_ROW:
                    pause = min(2.0 ** (losses - _LOSSES_IN_A_ROW), _LONGEST_PAUSE)
                    await workflow.sleep(pause, summary="claim again")
        self.progress.phase = "idle"
        return self.result()

    async def _rested(self) -> bool:
        """Say whether the run may end: nothing is wanted, everything that came is admitted, and everybody is told."""
        await workflow.wait_condition(lambda: not self.mail)
        if not self._may_end():
            return False
        self.ending = True
        await workflow.wait_condition(
            lambda: bool(self.mail) or not self._may_end() or workflow.all_handlers_finished()
        )
        self.ending = False
        return not self.mail and self._may_end()

    def _may_end(self) -> bool:
        return self._held is None and (not self._wanted or (self._cancelled and self._stop is None))

    async def _serve_once(self, reason: TakeoverReason) -> TakeoverReason:
        """Claim the session, and run what there is to run. Gives why the next claim takes over, if it does."""
        self._wanted = False
        force, self._force = self._force, False
        stop = self._stop
        held, self._held = self._held, None
        claim = held or await self._claim(reason, force=force)
        going_on, self._going_on = self._going_on if claim.carried else None, None
        if claim.token is not None:
            return await self._run_turns(claim, claim.token, force=self._joined() or force, going_on=going_on)
        if claim.exhausted or self._given_up:
            self._given_up = False
            self._end_turn("failed")
            self.progress.error = "the turn was cut off too often, and was given up: send a prompt to go on"
        elif self._force or self._stop is not stop or claim.repeated:
            self._wanted = True  # asked for while the claim was on its way, or since: it was not seen
            return "lost"
        else:
            self._end_turn(self._last)
        self._stop = None
        return "lost"

    def _joined(self) -> bool:
        """Take along what was asked for while the claim was on its way, unless that was an interrupt first."""
        force = self._force and self._stop is None
        self._force &= not force
        return force

    async def _claim(self, reason: TakeoverReason, *, force: bool) -> ClaimResult:
        self._claims += 1
        self._claiming = True
        carried = self._going_on is not None
        given = ClaimInput(
            session_id=self.session_id, ordinal=self._claims, force=force, reason=reason, carried=carried
        )
        try:
            return await self._database(contracts.CLAIM_SESSION, given, ClaimResult, "claim session")
        finally:
            self._claiming = False

    async def _renew(self) -> None:
        """Give the claim its whole lease again, also when that has run out."""
        given = ClaimInput(session_id=self.session_id, ordinal=self._claims)
        claim = await self._database(contracts.CLAIM_SESSION, given, ClaimResult, "renew claim")
        if claim.token is None:
            raise ApplicationError("the claim is gone", type=OwnershipLostError.code)

    async def _run_turns(
        self, claim: ClaimResult, token: Token, *, force: bool, going_on: GoingOn | None
    ) -> TakeoverReason:
        """Run turns under one claim until the session is released or has to be claimed anew."""
        assert claim.settings is not None
        turn = self.turn = Turn(token, claim.settings, self.progress, self._renew)
        stop, self._stop = self._stop, None
        if stop is not None:
            turn.stop(stop)
        if going_on is not None:
            turn.agent_step = going_on.agent_step
        middle = going_on is not None
        try:
            while True:
                begun, self._begun = self._begun, None
                ended = await turn.run(force=force, going_on=middle, begun=begun)
                force, middle = False, ended == "carry"
                if middle:
                    await self._continue_as_new(turn)
                    continue  # it was needed here
                if ended == "take-over":
                    self._wanted = True
                    return turn.reason
                released = turn.released or await self._release(turn, interrupted=ended == "interrupted")
                self._end_turn(_OUTCOMES[ended])
                if released != "more":
                    # An interrupt that came during the release stops what the release did not see.
                    self._wanted |= released == "lost" or turn.unsettled_stop is not None
                    self._stop = None
                    return "lost"
                if ended == "interrupted" or self._should_continue_as_new():
                    # What came during an interrupt runs under a fresh claim, as does a turn of a long run.
                    self._wanted = True
                    break
        finally:
            self.turn = None
            self._stop = turn.unsettled_stop or self._stop
        if self._should_continue_as_new():
            await self._continue_as_new()
        return "lost"

    async def _release(self, turn: Turn, *, interrupted: bool) -> str:
        released = await self._database(
            contracts.RELEASE_SESSION,
            ReleaseInput(token=turn.token, step=turn.step, interrupted=interrupted),
            ReleaseResult,
            "release session",
        )
        return released.state

    def _should_continue_as_new(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or workflow.now() - info.start_time >= _OLD_ENOUGH

    async def _continue_as_new(self, turn: Turn | None = None) -> None:
        """Begin the next turn as a new run, or go on there with the one in hand, with everything that was signalled to
        this one admitted. Not when something was asked for that a new run would not know of."""
        await workflow.wait_condition(
            lambda: not self.mail and (workflow.all_handlers_finished() or self._is_needed_here())
        )
        if self._is_needed_here():
            return
        going_on, progress = None, self.progress
        if turn is not None:
            going_on = GoingOn(
                agent_step=turn.agent_step, steps=progress.steps, tokens=progress.tokens, cost=progress.cost
            )
        workflow.continue_as_new(StartInput(carried=True, rejected=tuple(self.mail.rejected), going_on=going_on))

    def _is_needed_here(self) -> bool:
        stopped = self._stop is not None or (self.turn is not None and self.turn.interrupted())
        return self._force or stopped or self._cancelled or self.resumes > 0

    def _end_turn(self, outcome: Outcome) -> None:
        self._last = outcome
        self.finished_turns += 1
        self.progress.phase = "idle"
        self.progress.show()

    async def _database(self, name: str, given: WireModel, result_type: type[Result], summary: str) -> Result:
        return await database_step(name, given, result_type, summary=summary, waiting=self.waiting)
