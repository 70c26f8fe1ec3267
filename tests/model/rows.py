"""What the tables hold of one session, as small tuples, and ghosts: what no table holds, but a promise speaks of."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.domain.ownership import Stage, is_before

Off = frozenset[str]
"""Names of rules that are left out."""
ALL_ON: Off = frozenset()


class RefusedError(Exception):
    """The store refuses: `lost`, `expired`, `busy` (owned by another run) or `ask` (look again)."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Token(NamedTuple):
    """The token; `claim` is a ghost that counts claims, so that a stale hand is known by more than its token."""

    execution: int
    owner: int
    claim: int


class Row(NamedTuple):
    """The execution row. `message` says whether the step in hand has an assistant message."""

    execution: int
    owner: int
    phase: str = "ready"
    message: bool = False
    expired: bool = False


class Ledger(NamedTuple):
    """An execution's ledger; `begun` and `ends` are ghosts: whether this step has begun, and its terminal events.
    `settled` is the step whose settlement is recorded."""

    execution: int
    owner: int
    step: int = 0
    stage: Stage = "claimed"
    attempt: int = 0
    failed_attempt: int = 0
    prepared: tuple[int, bool] = (0, False)
    continued: bool = False
    continuations: int = 0
    ended: str = ""
    exhausted: bool = False
    begun: bool = False
    ends: int = 0
    settled: int = 0

    def passed(self, step: int, stage: Stage) -> bool:
        """Say whether the execution has come that far."""
        return not is_before(self.step, self.stage, step, stage)


class Input(NamedTuple):
    """An admitted input, in the order of admission. `answered` and `stopped` are ghosts."""

    name: str
    delivery: str = "steer"
    wake: bool = True
    promoted: int = 0
    answered: bool = False
    stopped: bool = False

    @property
    def owed(self) -> bool:
        """Say whether the model has seen it, and owes the answer."""
        return self.promoted > 0 and not self.answered and not self.stopped


class Call(NamedTuple):
    """A tool call; `effects` is a ghost."""

    execution: int
    step: int
    status: str = "called"
    effects: int = 0


class Db(NamedTuple):
    """One session. A place in the log is how many inputs were admitted before it; `seen` is that of the last event of
    running work. `newest` is the newest message, `last_stop` the reason of the last interruption. `bad` names the first
    promise that was broken. `log` is kept only where it begins as a tuple: execution and kind of each event."""

    row: Row | None = None
    ledgers: tuple[Ledger, ...] = ()
    inputs: tuple[Input, ...] = ()
    newest: str = ""
    last_stop: str = ""
    recovery: tuple[tuple[int, str], ...] = ()
    calls: tuple[Call, ...] = ()
    seen: int = 0
    interrupted_by: int = -1
    claims: int = 0
    cuts: int = 0
    bad: str = ""
    log: tuple[tuple[int, str], ...] | None = None

    def ledger(self, execution: int) -> Ledger | None:
        """Give an execution's ledger."""
        for one in self.ledgers:
            if one.execution == execution:
                return one
        return None

    def pending(self, *, waking_only: bool = False) -> bool:
        """Say whether the inbox has something to run."""
        waits = any(not one.promoted and (one.wake or not waking_only) for one in self.inputs)
        return waits or any(phase == "pending" for _, phase in self.recovery)

    def broken(self, what: str) -> Db:
        """Note a broken promise; the first one counts."""
        return self if self.bad else self._replace(bad=what)

    def noted(self, execution: int, *kinds: str) -> Db:
        """Note events, if they are kept."""
        return self if self.log is None else self._replace(log=(*self.log, *((execution, kind) for kind in kinds)))

    def with_ledger(self, new: Ledger) -> Db:
        """Put a ledger in the place of the execution's last one."""
        bad = "a step without exactly one terminal event" if new.ends > 1 else ""
        old = self.ledger(new.execution)
        if old is not None and old.step != new.step and old.begun and old.ends != 1:
            bad = "a step without exactly one terminal event"
        ledgers = (*(one for one in self.ledgers if one.execution != new.execution), new)
        return self._replace(ledgers=tuple(sorted(ledgers)), bad=self.bad or bad)


def hold(db: Db, token: Token, off: Off, *, unexpired: bool = False) -> Ledger:
    """The fence. Gives the execution's ledger."""
    row, done = db.row, db.ledger(token.execution)
    mine = row is not None and (row.execution, row.owner) == (token.execution, token.owner)
    if done is None or not (mine or "token" in off):
        raise RefusedError("lost")
    if unexpired and row is not None and row.expired:
        raise RefusedError("expired")
    return done


def append(db: Db, token: Token, *, made: bool = True) -> Db:
    """Running work writes, under the token: the lease is renewed when it has aged. Without `made` no event is there."""
    if token.claim != db.claims:
        db = db.broken("a write by a stale hand")
    row = db.row._replace(expired=False) if db.row is not None and db.row.expired else db.row
    return db._replace(row=row, seen=len(db.inputs) if made else db.seen)
