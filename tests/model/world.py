"""What may happen next: each state that one atomic step leads to, a transaction, an effect outside, or a message."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.domain.ownership import OwnerRun
from tests.model import claims, turns
from tests.model.faults import faults
from tests.model.rows import Db, Off, RefusedError
from tests.model.scene import Run, Scenario, State, Step, expired, local, put, signal, with_run
from tests.model.turns import Hand, Turn


def successors(state: State, scenario: Scenario) -> Iterator[Step]:
    """Give what may happen next, faults last."""
    for place, run in enumerate(state.runs):
        if run.status == "open":
            yield from _run_steps(state, place, run, scenario)
    for hand in state.hands:
        yield from _hand_steps(state, hand, scenario)
    yield from _client_steps(state, scenario.off)
    if scenario.scan:
        yield from _scan_steps(state, scenario)
    yield from _expiry(state)
    if state.faults:
        lesser = state._replace(faults=state.faults - 1)
        for label, after in faults(lesser, scenario):
            yield f"FAULT {label}", after


# Runs


def _run_steps(state: State, place: int, run: Run, scenario: Scenario) -> Iterator[Step]:
    turn, off = run.turn, scenario.off
    if run.signals:
        # A workflow task completes, and the next one brings what was sent.
        got = turns.deliver(turn, run.signals)
        told = with_run(state, place, run._replace(signals=()))
        yield f"run {place} gets {run.signals}", put(told, place, got, off, task=True)
    if turn.mail and turn.pc not in ("admit", "first-claim"):
        db, after = turns.mail(state.db, turn, place, off)
        yield f"run {place} handles {turn.mail[0]}", put(state, place, after, off, db)
    if turn.pc == "return":
        if run.signals:
            # Temporal refuses the completion, and has the whole last workflow task done again.
            again = turns.deliver(run.kept, run.signals)
            told = with_run(state, place, run._replace(signals=()))
            yield f"run {place} has to do its last task again", put(told, place, again, off, task=True)
        elif not turn.mail or "admit_before_return" in off:
            if turn.mail:
                state = state._replace(db=state.db.broken("a run ends before it has admitted what it was sent"))
            status: OwnerRun = "cancelled" if turn.cancelled else "closed"
            yield f"run {place} returns", with_run(state, place, run._replace(status=status, turn=turns.OVER))
    if turn.pc == "old" and not turn.mail:
        if run.signals:
            again = turns.deliver(run.kept, run.signals)
            told = with_run(state, place, run._replace(signals=()))
            yield f"run {place} has to do its last task again", put(told, place, again, off, task=True)
        else:
            first = Turn("admit", wanted=True, old=True)
            ended = with_run(state, place, run._replace(status="closed", turn=turns.OVER))
            yield f"run {place} continues as new", ended._replace(runs=(*ended.runs, Run("open", first, first, first)))
    if turn.pc in turns.LOCAL:
        done = local(state, place, turn, scenario)
        if done is not None:
            yield f"run {place}: {turns.name(turn)}", put(state, place, done[1], off, done[0])


# Activities


def _hand_steps(state: State, hand: Hand, scenario: Scenario) -> Iterator[Step]:
    others = tuple(one for one in state.hands if one is not hand)
    alone = state._replace(hands=others)
    if hand.kind == "local":
        # A twin of a local activity, that stood still: its transaction comes late.
        assert hand.turn is not None
        try:
            db, _ = turns.local(state.db, hand.turn, hand.run, scenario.limit, scenario.off)
        except RefusedError:
            db = state.db
        yield f"late twin of run {hand.run}: {turns.name(hand.turn)}", alone._replace(db=db)
        return
    run, healthy = state.runs[hand.run], not hand.lost and state.runs[hand.run].status == "open"
    if not hand.lost and (run.status != "open" or turns.is_over(run.turn, hand)):
        hand = hand._replace(lost=True)  # Temporal expects it no more
    if not hand.lost and run.turn.stop >= 0 and not run.turn.stopped:
        cancelled = turns.report(run.turn, hand, "cancelled", scenario.off)
        yield f"{hand.label} is cancelled", put(alone, hand.run, cancelled, scenario.off, task=True)
    calls = not state.db.calls
    try:
        db, after, said = turns.work(state.db, hand, calls=calls, off=scenario.off)
    except RefusedError as error:
        db, after, said = state.db, None, "expired" if error.kind == "expired" and hand.first else "turned"
        if healthy and not hand.first and hand.kind == "tool" and db.row is not None and db.row.owner == hand.run:
            db = db.broken("a healthy tool is fenced by its own run")
    label = f"{hand.label}: {hand.pc}"
    if after is not None:
        yield label, alone._replace(db=db, hands=tuple(sorted((*others, after))))
    elif hand.lost:
        yield f"{label} (nobody listens)", alone._replace(db=db)
    else:
        told = turns.report(run.turn, hand, said, scenario.off)
        yield f"{label}, says {said}", put(alone._replace(db=db), hand.run, told, scenario.off, task=True)
    if hand.kind == "stream" and hand.pc == "end" and hand.called and scenario.eager and run.status == "open":
        yield from _announce(state, hand, run, scenario)


def _announce(state: State, hand: Hand, run: Run, scenario: Scenario) -> Iterator[Step]:
    current = run.turn.token == hand.token and run.turn.step == hand.step
    waits = run.turn.pc == "wait" and not run.turn.result and run.turn.stop < 0
    if waits and not run.turn.tool and (current or "announcements" in scenario.off):
        if not current:
            state = state._replace(db=state.db.broken("a call of a stale hand is started by a run"))
        yield f"{hand.label} announces its call", put(state, hand.run, run.turn._replace(tool="due"), scenario.off)


# The client, and the scan


def _client_steps(state: State, off: Off) -> Iterator[Step]:
    if not state.client:
        return
    first, rest = state.client[0], state.client[1:]
    at_work = state.runs[-1].status == "open"
    after = state._replace(client=rest)
    if first == "letter":
        yield "client signals its input", signal(after, "letter")
        db, claimed = claims.admit(state.db, "letter", "steer")
        if "signal_only_if_no_claim" in off:
            # A rule left out: whether somebody will look is asked before the admission.
            live = state.db.row is not None and not state.db.row.expired
            yield "client looks for a claim", state._replace(client=("blind" if live else "seen", *rest))
        elif state.db.claims and (at_work or state.db.row is None):
            # Admitted by the client itself; a run that owns the session will look.
            yield "client admits its input", state._replace(db=db, client=rest if claimed else ("wake", *rest))
    elif first in ("blind", "seen"):
        db, _ = claims.admit(state.db, "letter", "steer")
        yield "client admits its input", state._replace(db=db, client=rest if first == "blind" else ("wake", *rest))
    elif first == "wake":
        yield "client wakes", signal(after, "wake")
    elif at_work:
        yield "client interrupts", signal(after, "stop")
    else:
        yield "client has nothing to interrupt", after


def _scan_steps(state: State, scenario: Scenario) -> Iterator[Step]:
    db = state.db
    if state.hint is not None:
        after = state._replace(hint=None)
        if "one_reconcile" in scenario.off and state.hint[2:] == ("halfway",):
            yield "scan deletes the claim", after._replace(db=_delete(db, state.hint))
            return
        done, did = claims.scan(db, state.hint, scenario.limit, scenario.off)
        if did in ("continued", "ended", "given-up") and state.runs[state.hint[1]].status == "open":
            done = done.broken("an open run loses its session to a scan")
        if "one_reconcile" in scenario.off and did in ("continued", "ended"):
            # A rule left out: what is left is reconciled in one transaction, and the claim deleted in another.
            done = done._replace(row=db.row)
            after = state._replace(hint=(*state.hint[:2], "halfway"))  # type: ignore[arg-type]
        yield f"scan acts: {did}", after._replace(db=done)
    elif db.row is not None and db.row.expired:
        status = state.runs[db.row.owner].status
        yield "scan finds a claim", state._replace(hint=(db.row.execution, db.row.owner, status))
    elif db.row is None and _waking(db) and _heeds(state.runs[-1]):
        yield "scan wakes", signal(state, "wake")


def _delete(db: Db, seen: tuple[int, int, str]) -> Db:
    if db.row is not None and db.row.execution != seen[0]:
        db = db.broken("a claim deleted under a live turn")
    return db._replace(row=None)


def _heeds(run: Run) -> bool:
    """Say whether a wake would change anything: a run that has not come to its end looks at the inbox anyway."""
    return run.status != "open" or (run.turn.pc == "return" and "wake" not in run.signals)


def _waking(db: Db) -> bool:
    return any(one.wake and not one.promoted for one in db.inputs) or any(p == "pending" for _, p in db.recovery)


def _expiry(state: State) -> Iterator[Step]:
    """A lease that nobody renews runs out."""
    row = state.db.row
    if row is not None and not row.expired and state.runs[row.owner].status != "open":
        yield "the lease runs out", expired(state)
