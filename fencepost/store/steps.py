"""The stages of a step: prepared, requested, published, settled. Each is one fenced transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, column, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.clean import clean_text
from fencepost.domain.errors import OwnershipLostError
from fencepost.domain.events import DurableEvent, InterruptReason, StepInterrupted, ToolCalled
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import Stage, Token, continues
from fencepost.store import context_epoch, continuation, inbox, ledger, ownership, tables
from fencepost.store.context_epoch import Current
from fencepost.store.event_log import Entry
from fencepost.store.leftovers import Row, close_open_parts, newest_assistant
from fencepost.store.ownership import Held, Lease, Locked
from fencepost.store.sessions import Session
from fencepost.store.statement import Statement

_live, _calls = tables.live_part, tables.tool_call
_DROP_LIVE = Statement(
    text(
        """
        DELETE FROM live_part USING unnest(CAST(:kinds AS text[]), CAST(:parts AS text[])) AS e(kind, part_id)
        WHERE assistant_message_id = :message_id
          AND live_part.kind = e.kind AND live_part.part_id = e.part_id
        """
    )
)
_PLAN_TOOL = Statement(
    upsert(_calls).values({column.name: bindparam(column.name) for column in _calls.c}).on_conflict_do_nothing()
)
_KEEP_LIVE = Statement(
    upsert(_live)
    .values({column.name: bindparam(column.name) for column in _live.c})
    .on_conflict_do_update(
        index_elements=["assistant_message_id", "kind", "part_id"],
        set_={name: upsert(_live).excluded[name] for name in ("attempt", "text", "execution_id")},
    )
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step begins with. `promoted` counts inputs that the model sees for the first time; `refused` says why the
    step can only be settled as failed. `session` is as the step found it, None when it was not read."""

    assistant_message_id: str
    promoted: int
    continued: bool
    refused: str | None = None
    session: Session | None = field(default=None, compare=False)


async def prepare(
    conn: AsyncConnection,
    token: Token,
    step: int,
    *,
    queued: bool,
    lease: Lease,
    required: bool = False,
    refused: str | None = None,
    locked: Locked | None = None,
) -> Prepared:
    """Begin a step: fail tools that an earlier hand left open, promote input, promote a pending continuation, and tell
    the model what has changed of its context.

    Raises OwnershipLostError, and ContextError when the step cannot have its context; prepared with that as `refused`,
    it does without. A step without input has a context only if it is `required`. A repeated call gives the recorded
    result and writes nothing. `locked` is what this transaction has locked already.
    """
    held, done = await _hold(conn, token, step, "prepared", locked)
    if done.passed(step, "prepared"):
        # Of an earlier step nothing is recorded any more. Only a step that had promoted nothing, or has failed, can be
        # asked about then: what follows is the same.
        nothing = {"assistant_message_id": "", "promoted": 0, "continued": False}
        return Prepared(**(done.results.get("prepared", nothing) if done.step == step else nothing))
    assert held is not None, "without a row the stage has passed"
    _require_settled(done, step)
    # A settlement in this very transaction has closed what its step had opened.
    newest = await newest_assistant(conn, token.session_id) if locked is None else None
    entries = await _left_open(conn, held, step, newest)
    going_on, continuations = await continuation.promote(conn, held.head) if held.owed else ([], 0)
    # A turn that goes on by a continuation is not over: queued input waits for its end.
    promotions = await inbox.promote(conn, held.head, queued=queued and not going_on)
    message = (newest.id, newest.data) if newest is not None else None
    due = refused is None and (required or bool(going_on or promotions))
    current = await context_epoch.advance(conn, held.head) if due else None
    # The change comes after the input that it comes with: the model reads it as the newest word.
    made = [*entries, *going_on, *promotions, *_told(held, step, current)]
    await ownership.append(conn, held, made, lease, message=message)
    recorded: dict[str, Any] = {
        "assistant_message_id": derived_id("msg", token.execution_id, step),
        "promoted": len(promotions),
        "continued": bool(going_on),
    }
    if refused is not None:
        recorded["refused"] = refused
    results = {"prepared": recorded} | ({"carried": True} if done.results.get("carried") else {})
    # The claim that took over has counted this one already; one made after a recovery scan begins at 0.
    changes: dict[str, Any] = {"continuations": continuations} if going_on else {}
    if promotions:
        changes = {"continuations": 0}
    await ownership.set_phase(conn, held, "ready")
    await ledger.move(conn, done, step, "prepared", held.head.now, attempt=0, results=results, **changes)
    return Prepared(**recorded, session=current.session if current is not None else None)


def _told(held: Held, step: int, current: Current | None) -> list[Entry]:
    if current is None or current.update is None:
        return []
    session_id, execution = held.token.session_id, held.token.execution_id
    event = events.ContextUpdated(
        timestamp=held.head.now,
        session_id=session_id,
        message_id=derived_id("msg", execution, step, "context"),
        text=current.update,
    )
    return [Entry(derived_id("evt", execution, step, "context"), event)]


async def _hold(
    conn: AsyncConnection, token: Token, step: int, stage: Stage, locked: Locked | None
) -> tuple[Held | None, ledger.Ledger]:
    """Hold the token and give its ledger; without a row, that of an execution which its own run gave back
    after this stage."""
    try:
        held = await ownership.hold(conn, token, locked=locked)
    except OwnershipLostError:
        done = await ledger.given_back(conn, token, settled=stage == "settled")
        if done is None or not done.passed(step, stage):
            raise
        return None, done
    return held, _ledger_of(held)


def _ledger_of(held: Held) -> ledger.Ledger:
    if held.ledger is None:
        raise OwnershipLostError(f"execution {held.token.execution_id} of {held.token.session_id} has no ledger")
    return held.ledger


def _require_settled(done: ledger.Ledger, step: int) -> None:
    """No step begins or ends while another one's stream may still be running under the same token."""
    if done.stage == "requested" and done.step != step:
        raise OwnershipLostError(f"step {done.step} of execution {done.execution_id} is still open, not step {step}")


async def _left_open(conn: AsyncConnection, held: Held, step: int, newest: Row | None) -> list[Entry]:
    """Tools of the newest assistant that are still open have no worker any more: they fail, and never run again."""
    if newest is None:
        return []
    left = await close_open_parts(conn, held.head, newest.id, newest.data, tools_only=True)
    return [
        Entry(derived_id("evt", held.token.execution_id, step, "left-open", n), event) for n, event in enumerate(left)
    ]


_REQUEST = Statement(
    text(
        "SELECT * FROM fencepost_request"
        "(:session_id, :execution_id, :owner_id, :step, :attempt, :lease_length, :renew_after)"
    ).columns(*ownership.LOCKED, column("done"))
)


async def request(conn: AsyncConnection, token: Token, step: int, attempt: int, lease: Lease) -> None:
    """Record the intent of one provider request, just before it is made, in one statement: it may be run alone.

    Raises OwnershipLostError when the token does not hold, the lease ran out, or this attempt was made already: a
    request may be repeated only after the one before it was recorded as failed without durable output.
    """
    found = await _REQUEST.first(
        conn,
        session_id=token.session_id,
        execution_id=token.execution_id,
        owner_id=token.owner_id,
        step=step,
        attempt=attempt,
        lease_length=lease.length,
        renew_after=lease.renew_after,
    )
    if not found.done:
        await ownership.hold(conn, token, unexpired=True, found=found)
        raise OwnershipLostError(f"request {attempt} of step {step} is not due in execution {token.execution_id}")


async def attempt_failed(conn: AsyncConnection, token: Token, step: int, attempt: int) -> None:
    """Record that this attempt ended without durable output, so that the next one may be made."""
    held = await ownership.hold(conn, token)
    done = _ledger_of(held)
    if (done.step, done.stage, done.attempt) != (step, "requested", attempt):
        raise OwnershipLostError(f"attempt {attempt} of step {step} is not open in execution {token.execution_id}")
    if held.assistant_message_id is not None:
        raise OwnershipLostError(f"attempt {attempt} of step {step} has durable output: it cannot be made again")
    await ledger.move(conn, done, step, "requested", held.head.now, results={**done.results, "failed_attempt": attempt})


@dataclass(frozen=True, slots=True)
class Producer:
    """Where in an execution events come from; their ids are derived from it and an ordinal."""

    step: int
    attempt: int
    name: str


async def publish(
    conn: AsyncConnection,
    token: Token,
    producer: Producer,
    first_ordinal: int,
    make: Sequence[DurableEvent],
    lease: Lease,
    *,
    kept: bool = True,
) -> list[int]:
    """Append events of the running step, at once visible. Gives their sequences.

    Their timestamps are set to the database's clock. Tool calls among them are planned in the same transaction. `kept`
    says whether parts of this step may have been kept for readers by `keep_live`.
    Raises OwnershipLostError when the token does not hold, the lease ran out, or the step is not open.
    """
    held = await ownership.hold(conn, token, unexpired=True)
    done = _ledger_of(held)
    if (done.step, done.stage, done.attempt) != (producer.step, "requested", producer.attempt):
        raise OwnershipLostError(
            f"attempt {producer.attempt} of step {producer.step} is not open in execution {token.execution_id}"
        )
    entries, ended = [], []
    for ordinal, event in enumerate(make, first_ordinal):
        stamped = event.model_copy(update={"timestamp": held.head.now})
        event_id = derived_id("evt", token.execution_id, producer.step, producer.attempt, producer.name, ordinal)
        entries.append(Entry(event_id, stamped))
        if isinstance(event, events.StepStarted):
            await ownership.set_phase(conn, held, "ready", event.assistant_message_id)
        elif isinstance(event, ToolCalled) and not event.provider.executed:
            await _plan_tool(conn, held, event)
        elif isinstance(event, events.ToolFailed):
            await _never_start(conn, event)
        elif isinstance(event, events.TextEnded | events.ReasoningEnded | events.ToolInputEnded):
            ended.append(part_of(event))
    if ended and kept:
        # A part's durable end replaces what was kept of it for readers.
        kinds, parts = zip(*ended, strict=True)
        await _DROP_LIVE.run(conn, message_id=held.assistant_message_id, kinds=list(kinds), parts=list(parts))
    return await ownership.append(conn, held, entries, lease)


def part_of(event: events.TextEnded | events.ReasoningEnded | events.ToolInputEnded) -> tuple[str, str]:
    """Give kind and id of the part that an event ends, the id as it is stored."""
    if isinstance(event, events.TextEnded):
        return "text", clean_text(event.text_id)
    if isinstance(event, events.ReasoningEnded):
        return "reasoning", clean_text(event.reasoning_id)
    return "tool", clean_text(event.call_id)


async def _plan_tool(conn: AsyncConnection, held: Held, event: ToolCalled) -> None:
    call_id = clean_text(event.call_id)
    key = derived_id("evt", "effect", event.session_id, event.assistant_message_id, call_id)
    await _PLAN_TOOL.run(
        conn,
        assistant_message_id=event.assistant_message_id,
        call_id=call_id,
        session_id=event.session_id,
        execution_id=held.token.execution_id,
        status="called",
        effect_key=key,
        time_updated=held.head.now,
    )


async def _never_start(conn: AsyncConnection, event: events.ToolFailed) -> None:
    """A call that failed before it was executed, such as one with unreadable input, is settled with its failure."""
    calls = tables.tool_call
    call_id = clean_text(event.call_id)
    named = (calls.c.assistant_message_id == event.assistant_message_id) & (calls.c.call_id == call_id)
    await conn.execute(update(calls).where(named).values(status="settled"))


@dataclass(frozen=True, slots=True)
class LivePart:
    """The text so far of a part that has no durable end yet."""

    assistant_message_id: str
    kind: str
    part_id: str
    attempt: int
    text: str


async def keep_live(conn: AsyncConnection, token: Token, part: LivePart) -> None:
    """Keep the part's text so far for readers and for recovery. Raises OwnershipLostError."""
    held = await ownership.hold(conn, token, unexpired=True)
    done = _ledger_of(held)
    open_now = (done.stage, done.attempt, held.assistant_message_id)
    if open_now != ("requested", part.attempt, part.assistant_message_id):
        raise OwnershipLostError(f"the step of {part.assistant_message_id} is not open in {token.execution_id}")
    await _KEEP_LIVE.run(
        conn,
        assistant_message_id=part.assistant_message_id,
        kind=part.kind,
        part_id=clean_text(part.part_id),
        session_id=token.session_id,
        execution_id=token.execution_id,
        attempt=part.attempt,
        text=clean_text(part.text),
    )


@dataclass(frozen=True, slots=True)
class Interruption:
    """Why a step was stopped; `interrupt_id` and `up_to` (a sequence) belong to a user's interrupt."""

    reason: InterruptReason
    interrupt_id: str | None = None
    note: str | None = None
    up_to: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a step ended: its terminal event, or an interruption. `start` is used when nothing has begun the step yet:
    an answer without content, or a failure before the first word, still has an assistant message."""

    terminal: events.StepEnded | events.StepFailed | Interruption
    start: events.StepStarted | None = None
    max_continuations: int | None = None
    """Given when the cause may pass: a continuation is recorded, unless the turn has had this many."""


async def settle(
    conn: AsyncConnection, token: Token, step: int, settlement: Settlement, lease: Lease, locked: Locked | None = None
) -> bool:
    """Settle the step with exactly one terminal event, after failing whatever of it is still open.

    Gives whether the turn goes on by a continuation, recorded here. A repeated call gives the same answer and writes
    nothing. Raises OwnershipLostError. `locked` is what this transaction has locked already.
    """
    held, done = await _hold(conn, token, step, "settled", locked)
    if done.passed(step, "settled"):
        return bool(done.results.get("continued"))
    assert held is not None, "without a row the stage has passed"
    _require_settled(done, step)
    execution, head = token.execution_id, held.head
    made: list[DurableEvent] = []
    message: tuple[str, dict[str, Any]] | None = None
    # Before the request there is no assistant message of this step; the row may still name the last one's.
    assistant, terminal = held.assistant_message_id if done.stage == "requested" else None, settlement.terminal
    if assistant is None and settlement.start is not None and not isinstance(terminal, Interruption):
        made.append(settlement.start.model_copy(update={"timestamp": head.now}))
    elif assistant is not None:
        newest = await newest_assistant(conn, token.session_id)
        if newest is not None and newest.id == assistant:
            message = (newest.id, newest.data)
            made += await close_open_parts(conn, head, assistant, newest.data)
    if isinstance(terminal, Interruption):
        made.append(
            StepInterrupted(
                timestamp=head.now,
                session_id=token.session_id,
                assistant_message_id=assistant,
                execution_id=execution,
                interrupt_id=terminal.interrupt_id,
                note=terminal.note,
                reason=terminal.reason,
            )
        )
    else:
        made.append(terminal.model_copy(update={"timestamp": head.now}))
    entries = [Entry(derived_id("evt", execution, step, "settlement", n), event) for n, event in enumerate(made)]
    await ownership.append(conn, held, entries, lease, message=message)
    if isinstance(terminal, Interruption):
        await ownership.set_phase(conn, held, "unknown", assistant)
        if not continues(terminal.reason):
            await inbox.clear_wakes(conn, token.session_id, head.seq if terminal.up_to is None else terminal.up_to)
    limit = settlement.max_continuations
    continued = limit is not None and done.continuations < limit
    if continued:
        await continuation.record(conn, token.session_id, execution, assistant, head.now)
    # Only cuts without a step between them count against the limit: a long turn may live through many deployments.
    changes: dict[str, Any] = {"continuations": 0} if isinstance(terminal, events.StepEnded) else {}
    results = {**done.results, "continued": continued}
    await ledger.move(conn, done, step, "settled", head.now, results=results, closing=token.session_id, **changes)
    return continued
