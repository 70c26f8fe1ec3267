"""Claiming a session, taking it over with one reconciliation, and releasing it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sqlalchemy import ColumnElement, bindparam, delete, exists, func, insert, not_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.errors import ClaimRefusedError, OwnershipLostError
from fencepost.domain.events import StepInterrupted
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import (
    OwnerRun,
    Stage,
    TakeoverReason,
    Token,
    continues,
    may_take_over,
    takeover_reason,
)
from fencepost.store import continuation, event_log, inbox, ledger, leftovers, ownership, tables
from fencepost.store.event_log import Entry, Head
from fencepost.store.ownership import Held, Lease, Locked, Owner
from fencepost.store.statement import Statement

_FROM_CLIENTS = tuple(
    kind.stored_type()
    for kind in (
        events.SessionCreated,
        events.PromptAdmitted,
        events.AgentSwitchedEvent,
        events.ModelSwitchedEvent,
        events.Moved,
        events.RevertStaged,
        events.RevertCleared,
        events.RevertCommitted,
    )
)


_execution = tables.session_execution
_CLAIM = Statement(
    insert(_execution).values({c.name: bindparam(c.name) for c in _execution.c if c.name != "recovery_error"})
)
_RELEASE = Statement(delete(_execution).where(_execution.c.session_id == bindparam("session_id")))


def _give_back(unless: ColumnElement[bool]) -> Statement:
    """Delete the claim and say so in its ledger, in one statement, unless there is something to run."""
    ended, mine = tables.execution_ledger, _execution.c.session_id == bindparam("session_id")
    gone = delete(_execution).where(mine, not_(unless)).returning(_execution.c.id).cte("gone")
    named = ended.c.execution_id == bindparam("named")
    ending = update(ended).where(named, exists(select(gone.c.id)))
    return Statement(
        ending.values(stage="released", result=bindparam("result"), time_updated=bindparam("time_updated"))
    )


_GIVE_BACK, _GIVE_BACK_ALL_BUT_WAKING = _give_back(inbox.PENDING), _give_back(inbox.WAKING)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A claim by a run. `force` claims although nothing waits; `reason` is why a run takes over from itself. `carried`
    is a claim between two steps of a turn, whose run has continued as new: nothing was cut off."""

    token: Token
    force: bool = False
    reason: TakeoverReason = "lost"
    max_continuations: int = 3
    carried: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What was asked of Temporal before the transaction: about which owner, and the answer."""

    owner: Owner
    run: OwnerRun


@dataclass(frozen=True, slots=True)
class Claimed:
    """`held` is false when there was nothing to run. `exhausted` says that a turn was given up after too many
    continuations, `carried` that one goes on with its next step, since nothing has cut it off.

    How it came about is for the log, and no part of the answer that twins of a claim share: whether it was held
    already, and the run that had it before.
    """

    held: bool
    exhausted: bool = False
    carried: bool = False
    renewed: bool = field(default=False, compare=False)
    taken_from: str | None = field(default=None, compare=False)
    repeated: bool = field(default=False, compare=False)
    """The answer is that of an earlier call, which found nothing; since then something may have come."""


class AskAgainError(Exception):
    """The owner is another one than the one that was asked about: look again."""


async def claim(
    conn: AsyncConnection, wanted: Wanted, seen: Seen | None, lease: Lease, locked: Locked | None = None
) -> Claimed:
    """Claim the session for the wanted token, taking over where the protocol allows it.

    Raises ClaimRefusedError while another run owns it, OwnershipLostError when this very claim was superseded, and
    AskAgainError when what was asked of Temporal is out of date; nothing is written then. `locked` is what this
    transaction has locked already.
    """
    token = wanted.token
    execution = tables.session_execution
    locked = locked or await ownership.lock(conn, token)
    head, own, held = locked.head, locked.ledger, locked.held
    if held is None:
        return await _claim_free(conn, wanted, locked, lease)
    old = held.token
    if old == token:
        await ownership.renew(conn, held, lease)
        said = own.results if own is not None else {}
        return Claimed(True, bool(said.get("exhausted")), bool(said.get("carried")), renewed=True)
    if own is not None:
        if own.results.get("held") is False:
            return _recorded(own)
        raise OwnershipLostError(f"execution {token.execution_id} was superseded by {old.execution_id}")
    reason = wanted.reason
    if old.owner_id != token.owner_id:
        if seen is None or (seen.owner.execution_id, seen.owner.owner_id) != (old.execution_id, old.owner_id):
            raise AskAgainError
        if not may_take_over(seen.run, lease_expired=held.expires_at <= head.now):
            raise ClaimRefusedError(
                f"session {token.session_id} is owned by run {old.owner_id} ({seen.run}): this run leaves it alone"
            )
        reason = takeover_reason(seen.run)
    outcome = await reconcile(conn, held, reason, wanted.max_continuations, carried=wanted.carried, called=True)
    if not wanted.force and not outcome.carried and not await inbox.has_pending(conn, token.session_id):
        await _RELEASE.run(conn, session_id=token.session_id)
        return await _not_held(conn, token, head, exhausted=outcome.exhausted)
    await conn.execute(
        update(execution)
        .where(execution.c.session_id == token.session_id)
        .values(**_fresh(token, head, lease), recovery_error=None)
    )
    results = {name: True for name in ("exhausted", "carried") if getattr(outcome, name)}
    await ledger.open_ledger(conn, token, outcome.continuations, head.now, results=results)
    return Claimed(True, outcome.exhausted, outcome.carried, taken_from=old.owner_id)


def _fresh(token: Token, head: Head, lease: Lease) -> dict[str, object]:
    return {
        "id": token.execution_id,
        "owner_id": token.owner_id,
        "assistant_message_id": None,
        "phase": "ready",
        "time_created": head.now,
        "expires_at": head.now + lease.length,
    }


async def _claim_free(conn: AsyncConnection, wanted: Wanted, locked: Locked, lease: Lease) -> Claimed:
    token, head, own = wanted.token, locked.head, locked.ledger
    if locked.late:
        raise AskAgainError  # it may be this very claim, made by a twin of this call
    if own is not None:
        if own.stage == "released" and not own.results.get("moved"):
            return _recorded(own)
        raise OwnershipLostError(f"the claim of execution {token.execution_id} was taken away")
    if not wanted.force and not await inbox.has_pending(conn, token.session_id):
        return await _not_held(conn, token, head, exhausted=False)
    await _CLAIM.run(conn, session_id=token.session_id, **_fresh(token, head, lease))
    await ledger.open_ledger(conn, token, 0, head.now)
    return Claimed(held=True)


async def _not_held(conn: AsyncConnection, token: Token, head: Head, *, exhausted: bool) -> Claimed:
    """Record that there was nothing to run: a late twin of this call must not claim what came since."""
    results = {"held": False, "exhausted": exhausted}
    await ledger.open_ledger(conn, token, 0, head.now, stage="released", results=results)
    return Claimed(held=False, exhausted=exhausted)


def _recorded(own: ledger.Ledger) -> Claimed:
    """Answer a claim that was made and ended before: held, if its own run has worked and released it since."""
    held = bool(own.results.get("released"))
    return Claimed(held, exhausted=bool(own.results.get("exhausted")), repeated=not held)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """How many continuations this turn has had, whether another one was due but refused, whether one is recorded for
    the execution, and whether the turn goes on without one."""

    continuations: int
    exhausted: bool
    recorded: bool = False
    carried: bool = False


async def reconcile(
    conn: AsyncConnection,
    held: Held,
    reason: TakeoverReason,
    max_continuations: int,
    *,
    carried: bool = False,
    called: bool = False,
) -> Reconciled:
    """Settle what an ended execution left, under its row's lock, in the transaction that replaces or deletes the row.

    Closes its open parts, fails its open tools, records one interruption of its open step, and at most one
    continuation: if promoted input is unanswered and the last interruption was not the user's. What is `carried` over
    between two steps goes on without: the claim that follows says in its ledger that an answer is owed.

    A run that its user has ended may have prepared one more step before its worker heard of it, and promoted what was
    sent after the end. If a client has `called` since, which is why there is a claim, and nothing else waits, that is
    answered.
    """
    old, head = held.token, held.head
    done = await ledger.find(conn, old.execution_id)
    stage = done.stage if done is not None else await _stage_seen(conn, held)
    step_open = stage == "requested"
    begun = stage != "claimed" or (done is not None and bool(done.results.get("carried")))
    answer_owed = begun and await _unanswered(conn, held, step_open=step_open)
    last_own = await _last_appended(conn, old) if begun else -1
    carried = carried and answer_owed and continues(reason) and not step_open
    if step_open or (answer_owed and stage != "settled" and not carried):
        await _interrupt(conn, held, reason, held.assistant_message_id if step_open else None)
    if not continues(reason):
        await inbox.clear_wakes(conn, old.session_id, last_own)
    await leftovers.close_books(conn, old.session_id)
    late = called and not continues(reason) and done is not None and _has_promoted(done)
    late = late and not await inbox.has_pending(conn, old.session_id)
    if done is not None:
        results = {**done.results, "moved": True} if reason == "moved" else done.results
        await ledger.move(conn, done, done.step, "released", head.now, results=results)
    had = done.continuations if done is not None else 0
    if done is not None and done.results.get("continued"):
        return Reconciled(had + 1, exhausted=False, recorded=True)  # its settlement recorded the continuation already
    if carried:
        return Reconciled(had, exhausted=False, carried=True)
    due = answer_owed and (continues(reason) or late)
    if due and (had < max_continuations or late):
        await continuation.record(conn, old.session_id, old.execution_id, held.assistant_message_id, head.now)
        return Reconciled(had + 1, exhausted=False, recorded=True)
    return Reconciled(had, exhausted=due)


async def _interrupt(conn: AsyncConnection, held: Held, reason: TakeoverReason, message_id: str | None) -> None:
    """Close what is open of a step's message, if it has one, and record the step's interruption."""
    old, head = held.token, held.head
    made: list[events.DurableEvent] = []
    message = await leftovers.newest_assistant(conn, old.session_id) if message_id is not None else None
    if message is not None and message.id == message_id:
        made += await leftovers.close_open_parts(conn, head, message.id, message.data)
    made.append(
        StepInterrupted(
            timestamp=head.now,
            session_id=old.session_id,
            assistant_message_id=message_id,
            execution_id=old.execution_id,
            reason=reason,
        )
    )
    entries = [Entry(derived_id("evt", old.execution_id, "reconciled", n), event) for n, event in enumerate(made)]
    await event_log.append(conn, head, entries)


def _has_promoted(done: ledger.Ledger) -> bool:
    """Say whether input was promoted for a step whose request was never made."""
    return done.stage == "prepared" and bool(done.results.get("prepared", {}).get("promoted"))


async def free(conn: AsyncConnection, session_id: str) -> None:
    """Delete a claim that was reconciled, under its row's lock: nobody owns the session then."""
    await _RELEASE.run(conn, session_id=session_id)


async def abandon(conn: AsyncConnection, held: Held) -> None:
    """Delete a claim that is not to be recovered, under its row's lock: whatever it left, the session has gone on."""
    done = await ledger.find(conn, held.token.execution_id)
    await leftovers.close_books(conn, held.token.session_id)
    await _RELEASE.run(conn, session_id=held.token.session_id)
    if done is not None:
        await ledger.move(conn, done, done.step, "released", held.head.now, results=done.results)


async def _stage_seen(conn: AsyncConnection, held: Held) -> Stage:
    """Tell how far an execution without a ledger has come by what it left: its assistant message proves a request."""
    if held.assistant_message_id is None:
        return "claimed"
    newest = await leftovers.newest_assistant(conn, held.token.session_id)
    is_open = newest is not None and newest.id == held.assistant_message_id and "completed" not in newest.data["time"]
    return "requested" if is_open else "settled"


async def _unanswered(conn: AsyncConnection, held: Held, *, step_open: bool) -> bool:
    """Say whether the model still owes an answer, and nobody stopped it on purpose."""
    if step_open:
        return True
    if held.phase == "unknown":
        return continues(await _last_interruption(conn, held.token))
    newest = await leftovers.newest(conn, held.token.session_id, ("user", "synthetic", "assistant"))
    if newest is None:
        return False
    if newest.type != "assistant":
        return True
    local = [p for p in newest.data["content"] if p["type"] == "tool" and not (p.get("provider") or {}).get("executed")]
    return bool(local) and newest.data.get("finish") != "error"


async def _last_interruption(conn: AsyncConnection, token: Token) -> str:
    log = tables.event
    found = await conn.execute(
        select(log.c.data["reason"].astext)
        .where(log.c.aggregate_id == token.session_id, log.c.type == StepInterrupted.stored_type())
        .order_by(log.c.seq.desc())
        .limit(1)
    )
    return str(found.scalar_one_or_none() or "lost")


async def _last_appended(conn: AsyncConnection, old: Token) -> int:
    """Give the last sequence that running work appended; what clients append beside it does not count."""
    log = tables.event
    found = await conn.execute(
        select(func.max(log.c.seq)).where(log.c.aggregate_id == old.session_id, log.c.type.not_in(_FROM_CLIENTS))
    )
    seq = found.scalar_one_or_none()
    return -1 if seq is None else int(seq)


Released: TypeAlias = Literal["done", "more", "lost"]


async def release(
    conn: AsyncConnection, token: Token, step: int, *, interrupted: bool, locked: Locked | None = None
) -> Released:
    """Give the session back after this step if its inbox has nothing to run, else keep it and say `more`.

    After an interrupt only input that still asks for execution counts. Asked again after the release, it answers from
    the inbox as it is now: `done`, or `lost` when there is work that needs a new claim. Asked again after it said
    `more` and the next step was prepared, it says so once more: what that step promoted is not in the inbox any longer,
    and not answered yet. `locked` is what this transaction has locked already.
    """
    locked = locked or await ownership.lock(conn, token)
    head, done = locked.head, locked.ledger
    if done is None:
        raise OwnershipLostError(f"execution {token.execution_id} of {token.session_id} has no ledger")
    if locked.held is None or locked.held.token != token:
        if locked.held is None and done.stage == "released":
            pending = await inbox.has_pending(conn, token.session_id, waking_only=interrupted)
            return "lost" if pending else "done"
        raise OwnershipLostError(f"execution {token.execution_id} does not own session {token.session_id} any more")
    if done.step > step:
        return "more"
    if done.stage == "requested":
        raise OwnershipLostError(f"step {done.step} of execution {token.execution_id} is still open")
    give_back = _GIVE_BACK_ALL_BUT_WAKING if interrupted else _GIVE_BACK
    given_back = await give_back.run(
        conn,
        session_id=token.session_id,
        named=token.execution_id,
        result={**done.results, "released": True},
        time_updated=head.now,
    )
    return "done" if given_back else "more"
