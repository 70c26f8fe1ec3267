"""What is explored: runs of the workflow, their activities, a client, Temporal, and one session's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fencepost.domain.ownership import OwnerRun
from tests.model import turns
from tests.model.rows import ALL_ON, Db, Off, RefusedError
from tests.model.turns import Hand, Turn


@dataclass(frozen=True)
class Scenario:
    """What is explored. `client` is what a client sends, at any time and in this order: `letter` (a steer), `stop` (an
    interrupt). `faults` is how many may happen, and which. Without `scan` nobody helps: input has to be announced.
    An `old` run continues as new where it may; without `eager` no call starts before its stream has ended."""

    faults: int = 1
    kinds: frozenset[str] = frozenset()
    client: tuple[str, ...] = ("letter",)
    first: str = "queue"
    scan: bool = True
    eager: bool = True
    old: bool = False
    off: Off = ALL_ON
    limit: int = 1


class Run(NamedTuple):
    """A run: what Temporal says of it, its workflow's state, that of the last completed workflow task and its first,
    the signals that wait for the next one, and all signals that clients ever sent it."""

    status: OwnerRun
    turn: Turn
    kept: Turn
    first: Turn
    signals: tuple[str, ...] = ()
    history: tuple[str, ...] = ()


class State(NamedTuple):
    """Everything. `hint` is what a scan has seen and not acted upon."""

    db: Db
    runs: tuple[Run, ...]
    hands: tuple[Hand, ...] = ()
    client: tuple[str, ...] = ()
    hint: tuple[int, int, OwnerRun] | None = None
    faults: int = 0


Step: TypeAlias = tuple[str, State]


def initial(scenario: Scenario) -> State:
    """Give the beginning: a run was started with an input, and a client has something to say."""
    turn = Turn("admit", start=scenario.first, old=scenario.old)
    return State(Db(), (Run("open", turn, turn, turn),), client=scenario.client, faults=scenario.faults)


def put(state: State, place: int, turn: Turn, off: Off, db: Db | None = None, *, task: bool = False) -> State:
    """Put a workflow's new state in its place, and start what it waits for, which completes its workflow task. With
    `task` a new one has begun: what it was told comes again when it is done again."""
    run = state.runs[place]
    turn, started = turns.go(turn, place, off)
    run = run._replace(turn=turn, kept=turn if task or started or turn.pc == "wait" else run.kept)
    runs = (*state.runs[:place], run, *state.runs[place + 1 :])
    hands = tuple(sorted((*state.hands, *started))) if started else state.hands
    return state._replace(db=state.db if db is None else db, runs=runs, hands=hands)


def with_run(state: State, place: int, run: Run) -> State:
    """Put a run in its place."""
    return state._replace(runs=(*state.runs[:place], run, *state.runs[place + 1 :]))


def local(state: State, place: int, turn: Turn, scenario: Scenario) -> tuple[Db, Turn] | None:
    """Do a local activity. None while the session belongs to another run."""
    try:
        return turns.local(state.db, turn, place, scenario.limit, scenario.off)
    except RefusedError as error:
        row = state.db.row
        if error.kind == "ask" and row is not None:
            return state.db, turn._replace(seen=(row.execution, row.owner, state.runs[row.owner].status))
        if error.kind in ("busy", "ask"):
            return (state.db, turn._replace(seen=None)) if turn.seen is not None else None
        db = state.db
        mine = turn.token is not None and turn.token.owner == place and turn.token.claim == db.claims
        if (
            "strict" in scenario.kinds
            and mine
            and all(one.status == "open" or n < place for n, one in enumerate(state.runs))
        ):
            db = db.broken("a run is told that it lost a session that nobody took")
        return db, turns.lost(turn)


def expired(state: State) -> State:
    """Let the claim's lease run out."""
    assert state.db.row is not None
    return state._replace(db=state.db._replace(row=state.db.row._replace(expired=True)))


def signal(state: State, what: str) -> State:
    """Signal the open run, starting one where none is open; only an interrupt starts none."""
    run = state.runs[-1]
    if run.status == "open":
        known = run.history if what == "wake" else (*run.history, what)
        new = run._replace(signals=(*run.signals, what), history=known)
        return with_run(state, len(state.runs) - 1, new)
    first = Turn("admit", wanted=what == "wake", old=run.first.old)
    turn = first if what == "wake" else first._replace(mail=(what,))
    return state._replace(runs=(*state.runs, Run("open", turn, turn, first, (), turn.mail)))
