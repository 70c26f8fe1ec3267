"""Admission, claims, their release and the scan, as pure functions: one function is one transaction.

Each mirrors the function of the same name in `fencepost.store`. `off` names rules of the protocol that are left out.
"""

from __future__ import annotations

from fencepost.domain.ownership import OwnerRun, continues, may_take_over, takeover_reason
from tests.model.rows import ALL_ON, Db, Input, Ledger, Off, RefusedError, Row, Token


def admit(db: Db, name: str, delivery: str) -> tuple[Db, bool]:
    """Admit an input, once for each name. Gives whether a live claim will look at the inbox anyway."""
    if all(one.name != name for one in db.inputs):
        db = db._replace(inputs=(*db.inputs, Input(name, delivery))).noted(0, "prompt.admitted")
    elif any(one.name == name and not one.promoted and not one.wake for one in db.inputs):
        db = db._replace(inputs=tuple(one._replace(wake=one.wake or one.name == name) for one in db.inputs))
    return db, db.row is not None and not db.row.expired


def claim(
    db: Db,
    token: Token,
    seen: tuple[int, int, OwnerRun] | None,
    *,
    reason: str = "lost",
    force: bool = False,
    limit: int = 1,
    off: Off = ALL_ON,
) -> tuple[Db, bool, bool]:
    """Claim, or take over. Gives whether it is held, and whether the turn was given up."""
    own, row, had = db.ledger(token.execution), db.row, 0
    exhausted = False
    if row is not None and (row.execution, row.owner) == (token.execution, token.owner) and own is not None:
        if "new_execution_id" not in off or reason == "renew" or own.stage == "claimed":
            return db._replace(row=row._replace(expired=False)), True, own.exhausted
        own = None
    if own is not None:
        if row is None and own.stage == "released":
            return db, own.ended == "released", own.exhausted
        if row is not None and own.ended == "not-held":
            return db, False, own.exhausted
        raise RefusedError("lost")
    if row is not None:
        if row.owner != token.owner:
            if seen is None or seen[:2] != (row.execution, row.owner):
                raise RefusedError("ask")
            if not (may_take_over(seen[2], lease_expired=row.expired) or ("ask_temporal" in off and row.expired)):
                raise RefusedError("busy")
            reason = takeover_reason(seen[2])
        db, had, exhausted, _ = reconcile(db, row, reason, limit, off, called=True)
    db = db._replace(row=None)
    ledger = Ledger(token.execution, token.owner, continuations=had, exhausted=exhausted)
    if not force and not db.pending():
        nothing = ledger._replace(stage="released", ended="not-held", continuations=0)  # it belongs to no turn
        return db.with_ledger(nothing), False, exhausted
    if "wake_until_promoted" in off:
        db = db._replace(inputs=tuple(one._replace(wake=False) for one in db.inputs))
    db = db._replace(row=Row(token.execution, token.owner), claims=db.claims + 1).with_ledger(ledger)
    return db, True, exhausted


def reconcile(
    db: Db, row: Row, reason: str, limit: int, off: Off = ALL_ON, *, called: bool = False
) -> tuple[Db, int, bool, bool]:
    """Settle what an execution left. Gives its continuations, whether another was refused, whether one is recorded.
    `called` is a run's, not a scan's: what was promoted for a request that was never made is answered after all."""
    done = db.ledger(row.execution)
    assert done is not None
    step_open = done.stage == "requested"
    owed = done.stage != "claimed" and (step_open or _unanswered(db, row, off))
    cursor = db.seen if done.stage != "claimed" else 0
    if step_open and row.message:
        db = cut_off(db, row.execution)
    if step_open or (owed and done.stage != "settled"):
        done = done._replace(ends=done.ends + 1)
        db = db._replace(last_stop=reason, seen=len(db.inputs)).noted(row.execution, "step.interrupted")
    late = called and not continues(reason) and done.stage == "prepared" and done.prepared[0] > 0
    late = late and not db.pending()
    if not continues(reason):
        owing = db.inputs
        db = stop(db, cursor)
        if late:  # it may have been sent after the end: that did not stop it
            kept = zip(db.inputs, owing, strict=True)
            db = db._replace(inputs=tuple(one._replace(stopped=was.stopped) for one, was in kept))
    db = db._replace(calls=tuple(one._replace(status="settled") for one in db.calls))
    db = db.with_ledger(done._replace(stage="released"))
    had = done.continuations
    if done.continued:
        return db, had + 1, False, True
    due = owed and (continues(reason) or late or "interrupt_reason" in off)
    if due and (had < limit or late or "attempts_counted" in off):
        return record(db, row.execution, off), had + 1, False, True
    if due:  # given up, and said so: the inputs have their answer
        db = db._replace(inputs=tuple(one._replace(answered=one.answered or one.owed) for one in db.inputs))
    return db, had, due, False


def cut_off(db: Db, execution: int) -> Db:
    """Close the message of a step that was cut: its open tools fail."""
    open_calls = [one for one in db.calls if one.status != "settled" and one.execution == execution]
    return db._replace(newest="error").noted(execution, *("tool.failed" for _ in open_calls))


def _unanswered(db: Db, row: Row, off: Off) -> bool:
    if row.phase == "unknown" and "interrupt_reason" not in off:
        return continues(db.last_stop)
    return db.newest in ("asked", "tools")


def stop(db: Db, cursor: int) -> Db:
    """A user wanted it to stop: what was admitted before this place asks for nothing more, nor does a continuation."""
    inputs = tuple(
        one._replace(wake=one.wake and (bool(one.promoted) or place >= cursor), stopped=one.stopped or one.owed)
        for place, one in enumerate(db.inputs)
    )
    recovery = tuple((name, "stopped" if phase == "pending" else phase) for name, phase in db.recovery)
    return db._replace(inputs=inputs, recovery=recovery)


def record(db: Db, execution: int, off: Off = ALL_ON) -> Db:
    """Record a continuation, once for each execution."""
    if any(name == execution for name, _ in db.recovery) and "one_continuation" not in off:
        return db
    return db._replace(recovery=(*db.recovery, (execution, "pending")))


def release(
    db: Db, token: Token, step: int, *, interrupted: bool, looked: bool | None = None, off: Off = ALL_ON
) -> tuple[Db, str]:
    """Give the session back after a step: `done`, `more`, or asked again `lost`. `looked` is a look at the inbox that
    was made too early."""
    done = db.ledger(token.execution)
    if done is None:
        raise RefusedError("lost")
    pending = db.pending(waking_only=interrupted) if looked is None else looked
    row = db.row
    if row is None or (row.execution, row.owner) != (token.execution, token.owner):
        if row is None and done.stage == "released" and "release_repeatable" not in off:
            return db, "lost" if pending else "done"
        if "token" not in off or row is None:
            raise RefusedError("lost")
    if done.step > step and "release_names_its_step" not in off:
        return db, "more"
    if done.stage == "requested" and "ledger" not in off:
        raise RefusedError("lost")
    if pending:
        return db, "more"
    if token.claim != db.claims:
        db = db.broken("a claim deleted under a live turn")
    return db._replace(row=None).with_ledger(done._replace(stage="released", ended="released")), "done"


def scan(db: Db, seen: tuple[int, int, OwnerRun], limit: int, off: Off = ALL_ON) -> tuple[Db, str]:
    """The recovery scan's work on a claim whose lease had run out, as it was seen."""
    row = db.row
    if row is None or (row.execution, row.owner) != seen[:2] or not row.expired:
        return db, "passed"
    if seen[2] == "open" and "ask_temporal" not in off:
        return db._replace(row=row._replace(expired=False)), "postponed"
    if not may_take_over(seen[2], lease_expired=True) and "ask_temporal" not in off:
        return db, "passed"
    db, _, exhausted, recorded = reconcile(db, row, takeover_reason(seen[2]), limit, off)
    return db._replace(row=None), "given-up" if exhausted else "continued" if recorded else "ended"
