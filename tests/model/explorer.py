"""Breadth first through everything that may happen, so that the first violation found has the shortest trace."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.model.rows import Off
from tests.model.scene import Scenario, State, initial
from tests.model.world import successors


@dataclass(frozen=True)
class Found:
    """What an exploration came to: `violation` is None when every promise held in all `states`; `cut` says that there
    were more states than wanted."""

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()
    last: State | None = None
    cut: bool = False


def explore(scenario: Scenario, most: int = 10_000_000) -> Found:
    """Explore a scenario, up to so many states."""
    start = initial(scenario)
    # By its hash a state takes little room, and is hashed once; that two of millions share 64 bits is not to be feared.
    came: dict[int, tuple[int, str]] = {hash(start): (0, "")}
    todo = deque([(hash(start), start)])
    while todo:
        name, state = todo.popleft()
        wrong = state.db.bad
        resting = True
        if not wrong:
            for label, after in successors(state, scenario):
                resting = resting and label.startswith("FAULT")
                key = hash(after)
                if key not in came:
                    came[key] = (name, label)
                    todo.append((key, after))
            if resting:
                wrong = at_rest(state, scenario.off)
        if wrong:
            return Found(len(came), wrong, _trace(came, name), state)
        if len(came) > most:
            return Found(len(came), cut=True)
    return Found(len(came))


def _trace(came: dict[int, tuple[int, str]], name: int) -> tuple[str, ...]:
    steps: list[str] = []
    while came[name][1]:
        name, label = came[name]
        steps.append(label)
    return tuple(reversed(steps))


def at_rest(state: State, off: Off) -> str:
    """Say what is wrong where nothing more will happen by itself, nothing when all is well."""
    db = state.db
    if db.row is not None:
        return "a claim left over"
    for one in db.inputs:
        if one.promoted > 1:
            return "an input promoted twice"
        if one.promoted and not (one.answered or one.stopped):
            return "an input lost: promoted, and never answered"
        if not one.promoted and one.wake:
            return "an input lost: nobody looks at it"
        if one.stopped and not one.answered and not _user_stopped(state, off):
            return "an input lost: stopped, though no user wanted that"
        if not one.promoted and not _user_stopped(state, off):
            return "an input lost: nobody asks for it any more"
    if len({one.name.split()[0] for one in db.inputs}) < len(db.inputs):
        return "an input admitted twice, and answered twice"
    if any(phase == "pending" for _, phase in db.recovery):
        return "a continuation that nobody begins"
    if len({name for name, _ in db.recovery}) < len(db.recovery):
        return "two continuations of one execution"
    if any(one.begun and one.ends != 1 for one in db.ledgers):
        return "a step without exactly one terminal event"
    if state.runs[-1].status == "open":
        return f"a run that waits for nothing: {state.runs[-1].turn.pc}"
    return ""


def _user_stopped(state: State, off: Off) -> bool:
    """Say whether a user stopped the session: by an interrupt, or by cancelling or terminating its run."""
    ended = ("cancelled",) if "repair" in off else ("cancelled", "terminated")
    return state.db.interrupted_by >= 0 or any(run.status in ended for run in state.runs)
