"""A workflow run and its activities: what `workflows` and `activities` do between two transactions."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.domain.ownership import OwnerRun
from tests.model import claims, steps
from tests.model.rows import Db, Off, RefusedError, Token, hold


class Turn(NamedTuple):
    """A workflow's state. `pc` is where it is; `stop` the place of an interrupt that came, -1 without, and `why` its
    reason; `result` and `tool` what the step's activities came to. `early` is a look at the inbox that was made before
    the locks. An `old` run continues as new where it may."""

    pc: str
    start: str = ""
    claimed: int = 0
    token: Token | None = None
    step: int = 0
    attempt: int = 1
    going: bool = False
    wanted: bool = False
    settled: bool = True
    stop: int = -1
    stopped: bool = False
    fresh_stop: bool = False
    result: str = ""
    tool: str = ""
    lost: bool = False
    reason: str = "lost"
    mail: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    seen: tuple[int, int, OwnerRun] | None = None
    early: bool | None = None
    why: str = "user"
    cancelled: bool = False
    old: bool = False


class Hand(NamedTuple):
    """An activity at work. `lost`: Temporal expects it no more, and what it says goes nowhere."""

    kind: str
    run: int
    token: Token = Token(-1, -1, -1)
    step: int = 0
    attempt: int = 1
    pc: str = ""
    called: bool = False
    lost: bool = False
    turn: Turn | None = None

    @property
    def first(self) -> bool:
        """Say whether it has done nothing yet."""
        return self.pc in ("request", "start")

    @property
    def label(self) -> str:
        """Name it in a trace."""
        return (
            f"{'zombie ' if self.lost else ''}{self.kind} of run {self.run}, claim {self.token.claim}, step {self.step}"
        )


OVER = Turn("over")
HEAD = 99
"""The log's end, as the place of an interrupt that names none."""
LOCAL = frozenset({"admit", "first-claim", "claim", "replace", "renew", "prepare", "settle", "interrupt", "release"})
_IN_TURN = frozenset({"prepare", "wait", "renew", "settle", "interrupt", "release"})
_QUIET = {"result": "", "tool": "", "lost": False}


def name(turn: Turn) -> str:
    """Name what a local activity does."""
    of = f" step {turn.step + (turn.pc == 'prepare')}" if turn.pc in ("prepare", "settle", "interrupt") else ""
    claim = f" {turn.claimed}" if "claim" in turn.pc else ""
    return f"{turn.pc}{of}{claim}{' ' + turn.result if turn.pc == 'settle' else ''}"


def execution_of(run: int, ordinal: int) -> int:
    """Name an execution by its run and the ordinal of its claim."""
    return run * 100 + ordinal


def deliver(turn: Turn, signals: tuple[str, ...]) -> Turn:
    """Take signals, in their order."""
    for signal in signals:
        if signal == "cancel":
            turn = turn._replace(cancelled=True)
            if turn.wanted or turn.pc in _IN_TURN or turn.pc in ("claim", "replace", "admit", "first-claim"):
                turn = _halt(turn, HEAD, "cancelled")
        elif signal == "wake":
            turn = turn._replace(wanted=True, pc="idle" if turn.pc == "return" else turn.pc)
        elif signal != "stop" or "stop" not in turn.known:
            known = (*turn.known, signal) if signal == "stop" else turn.known
            turn = turn._replace(mail=(*turn.mail, signal), known=known)
    return turn


def mail(db: Db, turn: Turn, run: int, off: Off) -> tuple[Db, Turn]:
    """Handle the first thing that came: admit input, or find an interrupt's place."""
    first, turn = turn.mail[0], turn._replace(mail=turn.mail[1:])
    if first != "stop":
        db, _ = claims.admit(db, f"letter of {run}" if "ids_of_signals" in off else first, "steer")
        return db, turn._replace(wanted=True, pc="idle" if turn.pc == "return" else turn.pc)
    busy = turn.pc in _IN_TURN or turn.pc in ("claim", "replace")
    if db.interrupted_by not in (-1, run) or not (busy or turn.wanted):
        return db, turn
    return db, _halt(turn, len(db.inputs), "user")


def _halt(turn: Turn, place: int, why: str) -> Turn:
    busy = turn.pc in _IN_TURN or turn.pc in ("claim", "replace")
    if turn.stopped:
        return turn  # it is being settled: the same one
    if _halted(turn):
        place, why = max(place, turn.stop), turn.why
    return turn._replace(stop=place, fresh_stop=True, wanted=turn.wanted and not busy, why=why)


def go(turn: Turn, run: int, off: Off) -> tuple[Turn, list[Hand]]:
    """Go on until there is something to wait for. Gives the activities that are started."""
    while True:
        before = turn
        if turn.pc == "idle" and not turn.mail:
            if turn.wanted and not (turn.cancelled and not _halted(turn)):
                turn = turn._replace(pc="claim", claimed=turn.claimed + 1, wanted=False, fresh_stop=False, seen=None)
                if "new_execution_id" in off and turn.token is not None and turn.token.owner == run:
                    turn = turn._replace(claimed=turn.token.execution % 100)
            else:
                turn = turn._replace(pc="return")
        elif turn.pc == "old" and (_halted(turn) or turn.cancelled):
            turn = turn._replace(pc="idle")
        elif turn.pc == "loop":
            turn = turn._replace(pc="interrupt" if _halted(turn) else "prepare", early=None)
        elif turn.pc == "request":
            hand = _stream(turn, run)
            if _halted(turn):
                turn = turn._replace(pc="wait", result="none")
            else:
                return turn._replace(pc="wait", result="", attempt=hand.attempt), [hand]
        elif turn.pc == "wait":
            turn, started = _wait(turn, run, off)
            if started:
                return turn, started
        if turn == before:
            return turn, []


def _halted(turn: Turn) -> bool:
    return turn.stop >= 0 and not turn.stopped


def _stream(turn: Turn, run: int) -> Hand:
    assert turn.token is not None
    return Hand("stream", run, turn.token, turn.step, turn.attempt, "request")


def _tool(turn: Turn, run: int) -> tuple[Turn, list[Hand]]:
    assert turn.token is not None
    return turn._replace(tool="open"), [Hand("tool", run, turn.token, turn.step, pc="start")]


def _wait(turn: Turn, run: int, off: Off) -> tuple[Turn, list[Hand]]:
    """What the workflow does with what its activities came to."""
    if turn.tool in ("due", "expired"):
        if _halted(turn):
            return turn._replace(tool="rest"), []
        return _tool(turn, run) if turn.tool == "due" else (turn._replace(pc="renew"), [])
    if not turn.result:
        return turn, []
    if turn.result == "turned":
        return (turn if turn.tool == "open" and "rest_before_take_over" not in off else lost(turn)), []
    stopping = _halted(turn)
    if not stopping and turn.result == "expired":
        return turn._replace(pc="renew"), []
    if not stopping and turn.result == "refused":
        return turn._replace(pc="request", attempt=turn.attempt + 1), []
    if turn.tool == "open" and not ("rest_before_take_over" in off and turn.result == "lost"):
        return turn, []
    if stopping:
        return turn._replace(pc="interrupt"), []
    if turn.result in ("lost", "none"):
        return _take_over(turn), []
    if turn.result in ("tools", "cut-tools") and not turn.tool:
        return _tool(turn, run)
    return (_take_over(turn) if turn.lost else turn._replace(pc="settle")), []


def _take_over(turn: Turn) -> Turn:
    return turn._replace(pc="idle", wanted=True, settled=True, **_QUIET)  # type: ignore[arg-type]


def lost(turn: Turn) -> Turn:
    """The session was lost: claim again."""
    if turn.pc == "admit":
        return turn
    if turn.pc == "first-claim":
        return turn._replace(pc="idle", seen=None)
    again = turn._replace(pc="idle", wanted=True, reason="lost", going=False, attempt=1, **_QUIET)  # type: ignore[arg-type]
    return again._replace(stop=-1, stopped=False) if turn.stopped else again


def reset(kept: Turn) -> Turn:
    """Where a new run begins when the old one is reset to its last workflow task: its token is another run's."""
    return kept if kept.pc in ("admit", "idle", "return", "old") else lost(kept)


def is_over(turn: Turn, hand: Hand) -> bool:
    """Say whether a workflow waits for this activity no more."""
    return turn.token != hand.token or turn.step != hand.step or turn.pc not in ("wait", "renew")


def report(turn: Turn, hand: Hand, said: str, off: Off) -> Turn:
    """An activity ends, and the workflow hears how."""
    if said == "drained" and "drain" in off:
        # A rule left out: the end of a worker counts like a cancellation from outside.
        turn, said = _halt(turn, HEAD, "cancelled"), "cancelled"
    if hand.kind == "tool":
        gone = said in ("lost", "drained", "turned")
        turn = turn._replace(tool="expired" if said == "expired" else "rest", lost=turn.lost or gone)
    else:
        turn = turn._replace(result="lost" if said in ("cancelled", "drained") else said)
    reason = "shutdown" if said == "drained" else turn.reason
    return turn._replace(reason=reason)


def work(db: Db, hand: Hand, *, calls: bool, off: Off) -> tuple[Db, Hand | None, str]:
    """Do an activity's next step. Gives the activity as it is then, or None and what it says at its end."""
    token, step, attempt = hand.token, hand.step, hand.attempt
    match hand.pc:
        case "request":
            return steps.request(db, token, step, attempt, off=off), hand._replace(pc="said"), ""
        case "refused":
            return steps.attempt_failed(db, token, step, attempt, off=off), None, "refused"
        case "said":
            what = "tools" if calls else "said"
            db = steps.publish(db, token, step, attempt, what, off=off)
            return db, hand._replace(pc="end", called=calls), ""
        case "end":
            return db, None, "tools" if hand.called else "said"
        case "start":
            return steps.start_tool(db, token, step, off=off), hand._replace(pc="effect"), ""
        case "effect":
            if hand.lost and "beats" not in off:
                hold(db, token, off, unexpired=True)  # who stood still asks again
            return steps.effect(db, token, step), hand._replace(pc="settle"), ""
    return steps.settle_tool(db, token, step, off=off), None, "rest"


# Local activities


def local(db: Db, turn: Turn, run: int, limit: int, off: Off) -> tuple[Db, Turn]:
    """Do a local activity, and give what the workflow does with its answer. Raises RefusedError."""
    if turn.pc == "admit":
        return _admit(db, turn, run, limit, off)
    if turn.pc in ("first-claim", "claim", "renew"):
        return _claim(db, turn, run, limit, off)
    assert turn.token is not None
    if turn.token.owner != run:
        raise RefusedError("lost")
    if turn.pc == "prepare":
        db, begun = steps.prepare(db, turn.token, turn.step + 1, queued=not turn.going, off=off)
        if db.cuts > limit:
            db = db.broken("a turn goes on more often than its limit")
        return db, _begun(turn, begun)
    if turn.pc == "settle":
        return _settle(db, turn, limit, off)
    if turn.pc == "interrupt":
        step = turn.step + 1 if turn.settled else turn.step
        db, _ = steps.settle(db, turn.token, step, turn.why, up_to=turn.stop, off=off)
        return db, turn._replace(pc="release", step=step, settled=True, stopped=True, **_QUIET)  # type: ignore[arg-type]
    if "decide_after_locks" in off and turn.early is None:
        return db, turn._replace(early=db.pending(waking_only=turn.stopped))
    db, state = claims.release(db, turn.token, turn.step, interrupted=turn.stopped, looked=turn.early, off=off)
    return db, _released(turn, state)


def _admit(db: Db, turn: Turn, run: int, limit: int, off: Off) -> tuple[Db, Turn]:
    """Admit the start input, and claim in the same transaction if that needs no look at another run."""
    if turn.start:
        db, _ = claims.admit(db, "first", turn.start)
    if not (turn.start or turn.wanted):
        return db, turn._replace(pc="idle")
    turn = turn._replace(pc="first-claim", wanted=True, claimed=1)
    try:
        return _claim(db, turn, run, limit, off)
    except RefusedError:
        return db, turn


def _claim(db: Db, turn: Turn, run: int, limit: int, off: Off) -> tuple[Db, Turn]:
    execution = execution_of(run, turn.claimed)
    token = Token(execution, run, db.claims + 1)
    reason = "renew" if turn.pc == "renew" else turn.reason
    own = db.ledger(execution)
    repeated = own is not None and own.ended == "not-held" and "repeats_are_told" not in off
    db, held, _ = claims.claim(db, token, turn.seen, reason=reason, limit=limit, off=off)
    if turn.pc == "renew":
        if not held:
            raise RefusedError("lost")
        if turn.tool == "expired":
            return db, turn._replace(pc="wait", tool="due")
        return db, turn._replace(pc="request")
    if held:
        turn = turn._replace(wanted=False if turn.pc == "first-claim" else turn.wanted, seen=None, reason="lost")
        turn = turn._replace(token=token._replace(claim=db.claims), step=0, attempt=1, going=False, settled=True)
        return db, turn._replace(pc="loop", stopped=False, **_QUIET)  # type: ignore[arg-type]
    if turn.pc == "first-claim":
        return db, turn._replace(pc="idle", wanted=True, seen=None)
    wanted = turn.wanted or turn.fresh_stop or repeated
    return db, turn._replace(pc="idle", wanted=wanted, stop=turn.stop if wanted else -1, seen=None, reason="lost")


def _begun(turn: Turn, begun: tuple[int, bool]) -> Turn:
    turn = turn._replace(step=turn.step + 1, settled=False, attempt=1, early=None, **_QUIET)  # type: ignore[arg-type]
    if not (turn.going or any(begun)):
        return turn._replace(pc="release")
    return turn._replace(pc="request")


def _settle(db: Db, turn: Turn, limit: int, off: Off) -> tuple[Db, Turn]:
    assert turn.token is not None
    cut = turn.result == "cut"
    db, continued = steps.settle(
        db, turn.token, turn.step, "failed" if cut else turn.result, limit=limit if cut else None, off=off
    )
    token, turn = turn.token, turn._replace(settled=True)
    if continued:
        return db, _take_over(turn)
    if turn.result == "tools":
        db, begun = steps.prepare(db, token, turn.step + 1, queued=False, off=off)
        turn = turn._replace(going=True)
        if _halted(turn):
            return db, turn._replace(pc="loop")
        return db, _begun(turn, begun)
    if "decide_after_locks" in off:
        return db, turn._replace(pc="release", early=None)
    db, state = claims.release(db, token, turn.step, interrupted=False, off=off)
    return db, _released(turn, state)


def _released(turn: Turn, state: str) -> Turn:
    """The turn has ended; go on with what there is."""
    unsettled = _halted(turn)
    turn = turn._replace(early=None, going=False, **_QUIET)  # type: ignore[arg-type]
    if state != "more":
        wanted = turn.wanted or state == "lost" or unsettled
        # An interrupt that came during the release stops what the release did not see.
        return turn._replace(pc="idle", wanted=wanted, stop=turn.stop if unsettled else -1, stopped=False)
    again = turn._replace(pc="idle", wanted=True, stop=-1, stopped=False) if turn.stopped else turn._replace(pc="loop")
    return again._replace(pc="old", wanted=True) if turn.old else again
