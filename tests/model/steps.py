"""The stages of a step and its tool calls, as pure functions: one function is one transaction.

Each mirrors the function of the same name in `fencepost.store`. `off` names rules of the protocol that are left out.
"""

from __future__ import annotations

from fencepost.domain.ownership import Stage, continues
from tests.model.claims import cut_off, record, stop
from tests.model.rows import ALL_ON, Call, Db, Input, Ledger, Off, RefusedError, Token, append, hold


def _hold(db: Db, token: Token, step: int, stage: Stage, off: Off) -> tuple[Ledger, bool]:
    """Give the ledger, and whether it says that this was done before."""
    try:
        done = hold(db, token, off)
    except RefusedError:
        given_back = db.ledger(token.execution)
        if given_back is None or not given_back.passed(step, stage):
            raise
        settled = stage == "settled" and given_back.settled == given_back.step and given_back.stage == "released"
        if given_back.ended != "released" and not settled:
            raise
        return given_back, True
    return done, done.passed(step, stage) and "ledger" not in off


def prepare(db: Db, token: Token, step: int, *, queued: bool, off: Off = ALL_ON) -> tuple[Db, tuple[int, bool]]:
    """Begin a step. Gives how many inputs were promoted, and whether a continuation was."""
    done, passed = _hold(db, token, step, "prepared", off)
    if passed:
        return db, done.prepared if done.step == step else (0, False)
    if done.stage == "requested" and "ledger" not in off:
        raise RefusedError("lost")
    made = False
    if db.newest == "tools":
        made = any(one.status != "settled" for one in db.calls)
        db = db._replace(calls=tuple(one._replace(status="settled") for one in db.calls))
    changes = done._replace(step=step, stage="prepared", attempt=0, failed_attempt=0, continued=False, exhausted=False)
    going_on = [name for name, phase in db.recovery if phase == "pending"][:1]
    if going_on:
        db, changes = _go_on(db, token, going_on[0], changes)
    open_now = [one for one in db.inputs if not one.promoted]
    chosen = [one for one in open_now if one.delivery == "steer"] or (open_now[:1] if queued and not going_on else [])
    if chosen:
        db = _promote(db, token, chosen)
        changes = changes._replace(continuations=0)
    result = (len(chosen), bool(going_on))
    db = append(db, token, made=made or bool(chosen or going_on))
    if db.row is not None:
        db = db._replace(row=db.row._replace(phase="ready", message=False))
    return db.with_ledger(changes._replace(prepared=result, begun=False, ends=0)), result


def _go_on(db: Db, token: Token, ended: int, changes: Ledger) -> tuple[Db, Ledger]:
    db = db._replace(recovery=tuple((n, "promoted" if n == ended else p) for n, p in db.recovery))
    db, before = db._replace(newest="asked", cuts=db.cuts + 1), db.ledger(ended)
    if not any(one.owed for one in db.inputs):
        db = db.broken("a continuation of a turn that was stopped or answered")
    changes = changes._replace(continuations=(before.continuations if before else 0) + 1)
    return db.noted(token.execution, "synthetic"), changes


def _promote(db: Db, token: Token, chosen: list[Input]) -> Db:
    if any(one.stage == "requested" and one.begun and not one.ends for one in db.ledgers):
        db = db.broken("input promoted in the middle of a stream")
    seen = tuple(
        one._replace(promoted=one.promoted + 1, wake=False, stopped=False) if one in chosen else one
        for one in db.inputs
    )
    return db._replace(newest="asked", cuts=0, inputs=seen).noted(token.execution, *("prompted" for _ in chosen))


def request(db: Db, token: Token, step: int, attempt: int, *, off: Off = ALL_ON) -> Db:
    """Record the intent of one request."""
    done = hold(db, token, off, unexpired=True)
    first = (done.step, done.stage) == (step, "prepared") and attempt == 1
    again = (done.step, done.stage, done.attempt) == (step, "requested", attempt - 1)
    if not first and not (again and done.failed_attempt == attempt - 1):
        raise RefusedError("lost")
    return append(db, token, made=False).with_ledger(done._replace(stage="requested", attempt=attempt, begun=True))


def attempt_failed(db: Db, token: Token, step: int, attempt: int, *, off: Off = ALL_ON) -> Db:
    """Record that an attempt ended without durable output."""
    done = hold(db, token, off)
    if (done.step, done.stage, done.attempt) != (step, "requested", attempt):
        raise RefusedError("lost")
    if db.row is not None and db.row.message:
        raise RefusedError("lost")
    return db.with_ledger(done._replace(failed_attempt=attempt))


def publish(db: Db, token: Token, step: int, attempt: int, what: str, *, off: Off = ALL_ON) -> Db:
    """Append events of the running step: `said` is text, `tools` a tool call."""
    done = hold(db, token, off, unexpired=True)
    if (done.step, done.stage, done.attempt) != (step, "requested", attempt) and "ledger" not in off:
        raise RefusedError("lost")
    if done.ends:
        db = db.broken("output after the end of its step")
    started = db.row is None or not db.row.message
    db = append(db, token)._replace(newest=what).noted(token.execution, *(["step.started"] if started else []), what)
    if db.row is not None:
        db = db._replace(row=db.row._replace(message=True))
    if what == "tools":
        db = db._replace(calls=(*db.calls, Call(token.execution, step)))
    return db


def start_tool(db: Db, token: Token, step: int, *, off: Off = ALL_ON) -> Db:
    """Take a planned call from called to started."""
    hold(db, token, off, unexpired=True)
    if Call(token.execution, step) not in [one._replace(effects=0) for one in db.calls] and "start_once" not in off:
        raise RefusedError("lost")
    return append(_call(db, token, step, "started"), token, made=False)


def _call(db: Db, token: Token, step: int, status: str, effects: int = 0) -> Db:
    calls = []
    for one in db.calls:
        mine = (one.execution, one.step) == (token.execution, step)
        calls.append(one._replace(status=status or one.status, effects=one.effects + effects) if mine else one)
    return db._replace(calls=tuple(calls))


def effect(db: Db, token: Token, step: int) -> Db:
    """What the tool does to the world, outside the database."""
    db = _call(db, token, step, "", effects=1)
    if any(one.effects > 1 for one in db.calls):
        db = db.broken("a tool's effect happened twice")
    if db.row is not None and db.row.owner == token.owner and token.claim != db.claims:
        db = db.broken("a tool's effect begun after its own run had taken over")
    return db


def settle_tool(db: Db, token: Token, step: int, *, off: Off = ALL_ON) -> Db:
    """Record how a call ended."""
    hold(db, token, off)
    if not any((one.execution, one.step) == (token.execution, step) and one.status != "settled" for one in db.calls):
        raise RefusedError("lost")
    return append(_call(db, token, step, "settled"), token).noted(token.execution, "tool.success")


def settle(
    db: Db,
    token: Token,
    step: int,
    how: str,
    *,
    up_to: int | None = None,
    limit: int | None = None,
    off: Off = ALL_ON,
) -> tuple[Db, bool]:
    """Settle a step: as `said`, `tools` (ended), `failed`, or by the reason of an interruption.

    Gives whether the turn goes on by a continuation, which a failure has while there are fewer than `limit`.
    """
    done, passed = _hold(db, token, step, "settled", off)
    if passed:
        return db, done.continued
    if done.stage == "requested" and done.step != step:
        raise RefusedError("lost")
    message = db.row is not None and db.row.message and done.stage == "requested"
    newest = db.newest
    if message:
        db = cut_off(db, token.execution)._replace(newest=newest)
    db = append(db, token)._replace(calls=tuple(one._replace(status="settled") for one in db.calls))
    if how not in ("said", "tools", "failed"):
        db = _interrupt(db, token, how, up_to, message=message).noted(token.execution, "step.interrupted")
    else:
        started = [] if message else ["step.started"]
        db = db.noted(token.execution, *started, "step.failed" if how == "failed" else "step.ended")
        if how == "failed" or newest != "tools" or not message:
            db = db._replace(newest="error" if how == "failed" else "said")
    had = done.continuations
    continued = limit is not None and had < limit
    if continued:
        db = record(db, token.execution)
    elif how in ("said", "failed"):
        if not any(one.owed for one in db.inputs):
            db = db.broken("an answer that nobody waits for: answered twice")
        db = db._replace(inputs=tuple(one._replace(answered=one.answered or one.owed) for one in db.inputs))
    if how in ("said", "tools"):
        db, had = db._replace(cuts=0), 0
    moved = done._replace(step=step, stage="settled", continued=continued, continuations=had)
    ends = (done.ends if done.step == step else 0) + 1
    moved = moved._replace(ends=ends, begun=done.begun if done.step == step else False, settled=step)
    return db.with_ledger(moved), continued


def _interrupt(db: Db, token: Token, why: str, up_to: int | None, *, message: bool) -> Db:
    db = db._replace(last_stop=why, interrupted_by=token.owner if why == "user" else db.interrupted_by)
    db = db._replace(newest="error" if message else db.newest)
    db = db._replace(row=db.row._replace(phase="unknown", message=message) if db.row is not None else None)
    return db if continues(why) else stop(db, len(db.inputs) if up_to is None else up_to)
