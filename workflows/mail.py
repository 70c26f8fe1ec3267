"""What clients send: read by hand, and handled one after the other in the order of its arrival.

Payloads are decoded here since a typed handler drops a malformed signal silently, and an argument too few or too many
would fail the workflow task for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError, FailureError

from workflows.calls import database_step, failure_message, failure_type

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import contracts
    from fencepost.domain.contracts import (
        AdmitInput,
        InterruptInput,
        PlacedInterrupt,
        PlaceInterrupt,
        PromptInput,
        Rejection,
    )
    from fencepost.domain.errors import FencepostError, InvalidInputError
    from fencepost.domain.ids import derived_id
    from fencepost.domain.inbox import Receipt
    from fencepost.domain.wire import WireModel, read_json

Given = TypeVar("Given", bound=WireModel)

_REJECTIONS_KEPT = 20


def read(kind: type[Given], args: Sequence[object], *, optional: bool = False) -> Given:
    """Decode exactly one argument. With `optional`, no argument or null means the default value.

    Raises InvalidInputError in one line that names the field.
    """
    if len(args) > 1:
        raise InvalidInputError(f"takes one JSON object, not {len(args)} arguments")
    if not args or _is_null(args[0]):
        if not optional:
            raise InvalidInputError("needs one JSON object as its argument")
        return kind()
    raw = args[0]
    assert isinstance(raw, RawValue), "handlers declare no types, so that payloads arrive undecoded"
    if raw.payload.metadata.get("encoding") not in (b"json/plain", b"json/protobuf"):
        raise InvalidInputError("the argument must be a JSON object (encoding json/plain)")
    return read_json(kind, raw.payload.data)


def _is_null(raw: object) -> bool:
    return isinstance(raw, RawValue) and (
        raw.payload.metadata.get("encoding") == b"binary/null" or raw.payload.data.strip() == b"null"
    )


def as_application_error(error: FailureError) -> ApplicationError:
    """Give an activity's failure as the failure of an update or a run: its words, and its stable type."""
    kind = failure_type(error) or FencepostError.code
    return ApplicationError(failure_message(error), type=kind, non_retryable=True)


@dataclass
class Letter:
    """One input from a signal or an update, on its way into the inbox."""

    input_id: str
    prompt: PromptInput
    receipt: Receipt | None = None
    error: ApplicationError | None = None

    @property
    def done(self) -> bool:
        """Say whether it was admitted or refused."""
        return self.receipt is not None or self.error is not None


@dataclass
class Stop:
    """One interrupt: by a signal, or by the run's cancellation."""

    given: InterruptInput
    reason: Literal["user", "cancelled"] = "user"


class Addressee(Protocol):
    """Whose mail it is."""

    def admitted(self, prompt: PromptInput) -> None:
        """Hear of input that is in the inbox now."""

    def stoppable(self) -> bool:
        """Say whether there is anything that an interrupt could stop."""

    def halt(self, stop: Stop) -> None:
        """Stop what was asked for so far."""

    def waiting(self, what: str | None) -> None:
        """Hear what the delivery waits for."""


class Mail:
    """What came and is not handled yet. The order matters: an interrupt stops what was sent before it, and nothing that
    was sent after it."""

    def __init__(self, session_id: str, addressee: Addressee) -> None:
        self._session_id = session_id
        self._addressee = addressee
        self._items: deque[Letter | Stop] = deque()
        self._task = 0
        self._updates = 0
        self._in_hand = 0
        self._signals = 0
        self._interrupts = 0
        self._known_interrupts: set[str] = set()
        self.rejected: deque[Rejection] = deque(maxlen=_REJECTIONS_KEPT)

    def __bool__(self) -> bool:
        return bool(self._items)

    def input_id(self, prompt: PromptInput | None, ordinal: int) -> str:
        """Name an input by what does not change when the run is reset."""
        if prompt is not None and prompt.id is not None:
            return prompt.id
        return derived_id("msg", self._session_id, workflow.info().original_execution_run_id, ordinal)

    def post(self, signal: str, args: Sequence[object], delivery: dict[str, Any]) -> None:
        """Take input from a signal."""
        self._signals += 1  # also for a bad one, so that those after it keep their ids
        try:
            prompt = read(PromptInput, args).model_copy(update=delivery)
        except InvalidInputError as error:
            self.reject(signal, error)
            return
        self._put(Letter(self.input_id(prompt, self._signals), prompt))

    def take(self, letter: Letter) -> Letter:
        """Take input from an update."""
        self._put(letter, update=True)
        return letter

    def _put(self, item: Letter | Stop, *, update: bool = False) -> None:
        """Queue what came: of one workflow task its signals before its updates. After a reset Temporal gives these in
        one order when they run, and in another when they are replayed."""
        task = workflow.info().get_current_history_length()
        if task != self._task:
            self._task, self._updates = task, 0
        behind = 0 if update else min(self._updates, len(self._items) - self._in_hand)
        self._items.insert(len(self._items) - behind, item)
        self._updates += update

    def interrupt(self, args: Sequence[object]) -> None:
        """Take an interrupt, once for each id."""
        self._interrupts += 1
        try:
            given = read(InterruptInput, args, optional=True)
        except InvalidInputError as error:
            self.reject(contracts.SIGNAL_INTERRUPT, error)
            return
        run = workflow.info().original_execution_run_id
        name = given.id or derived_id("int", self._session_id, run, self._interrupts)
        if name not in self._known_interrupts:
            self._known_interrupts.add(name)
            self._put(Stop(given.model_copy(update={"id": name})))

    def reject(self, signal: str, error: FencepostError) -> None:
        """Show what could not be understood."""
        workflow.logger.warning("signal %s rejected: %s", signal, error.message)
        self.rejected.append(Rejection(signal=signal, reason=error.message))

    def refuse(self, error: ApplicationError) -> None:
        """Refuse all input that came and waits."""
        for item in self._items:
            if isinstance(item, Letter):
                item.error = error

    async def deliver(self) -> None:
        """Handle what comes, for ever, while whatever else goes on."""
        while True:
            await workflow.wait_condition(lambda: bool(self._items))
            item, self._in_hand = self._items[0], 1
            try:
                await (self._admit(item) if isinstance(item, Letter) else self._place(item))
            except FailureError as error:
                if isinstance(item, Letter):
                    item.error = as_application_error(error)
                what = "input" if isinstance(item, Letter) else contracts.SIGNAL_INTERRUPT
                self.reject(what, FencepostError(failure_message(error)))
            self._items.popleft()
            self._in_hand = 0

    async def _admit(self, letter: Letter) -> None:
        letter.receipt = await database_step(
            contracts.ADMIT_INPUT,
            AdmitInput(session_id=self._session_id, input_id=letter.input_id, prompt=letter.prompt),
            Receipt,
            summary="admit input",
            waiting=self._addressee.waiting,
        )
        self._addressee.admitted(letter.prompt)

    async def _place(self, stop: Stop) -> None:
        """Find the place in the log that an interrupt was handled at, unless it says one; one that the log knows
        already comes a second time."""
        given = stop.given
        if not self._addressee.stoppable():
            return
        assert given.id is not None
        placed = await database_step(
            contracts.PLACE_INTERRUPT,
            PlaceInterrupt(session_id=self._session_id, interrupt_id=given.id),
            PlacedInterrupt,
            summary="place interrupt",
            waiting=self._addressee.waiting,
        )
        if not placed.recorded and self._addressee.stoppable():
            after = placed.head if given.after is None else given.after
            self._addressee.halt(Stop(given.model_copy(update={"after": after}), stop.reason))
