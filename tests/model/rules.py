"""The rules of the ownership protocol, each with the smallest scenario in which leaving it out breaks a promise.

Not here, and why:

- update in place (a claim is taken over by UPDATE, never by delete and insert) and the order of the locks are about
  what a statement sees that waited; here a transaction is one atomic step. The races of `tests/store` show them.
- times: the lease's length, the sticky queue's time-out, how fast a cancellation arrives, one second between two runs,
  the scan's intervals. The model knows before and after, not how long.
- one continuation for each execution, by the key of its row, is redundant: an execution is reconciled once, and its
  settlement is repeated only through the ledger, which says whether one was recorded. The key is the second line.
- start once (the compare-and-set of a tool call) is the second line behind the one attempt that tools have. Leaving it
  out shows only where an activity is begun twice all the same (`twice`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.model.scene import Scenario


@dataclass(frozen=True)
class Rule:
    """What the rule says, where it is seen to be needed, and how."""

    says: str
    scenario: Scenario
    violation: str

    def off(self, name: str) -> Scenario:
        """Give the scenario without the rule of this name."""
        return replace(self.scenario, off=frozenset({name}))


def of(*kinds: str, faults: int = 1, client: tuple[str, ...] = (), scan: bool = True, old: bool = False) -> Scenario:
    """Give a scenario with so many faults of these kinds."""
    return Scenario(faults=faults if kinds else 0, kinds=frozenset(kinds), client=client, scan=scan, old=old)


_LETTER = ("letter",)
_UNSEEN = "an input lost: nobody looks at it"
_STALE = "a tool's effect begun after its own run had taken over"
_STOPPED = "an input lost: stopped, though no user wanted that"
_UNANSWERED = "an input lost: promoted, and never answered"

RULES: dict[str, Rule] = {
    "token": Rule("every write holds the row with its token", of("pause"), _STALE),
    "ledger": Rule("what an execution has passed is answered from its ledger", of("redo"), _UNANSWERED),
    "decide_after_locks": Rule("the inbox is looked at after both locks", of(client=_LETTER, scan=False), _UNSEEN),
    "release_repeatable": Rule(
        "a release asked again is answered",
        of("redo", "strict"),
        "a run is told that it lost a session that nobody took",
    ),
    "release_names_its_step": Rule(
        "a release keeps what a later step has promoted", of("redo", client=_LETTER), _UNANSWERED
    ),
    "one_reconcile": Rule(
        "reconciled in the transaction that deletes the row", of("reset"), "a step without exactly one terminal event"
    ),
    "ask_temporal": Rule(
        "Temporal is always asked about an owner", of("expire"), "an open run loses its session to a scan"
    ),
    "start_once": Rule("a call is started by compare-and-set", of("twice"), "a tool's effect happened twice"),
    "rest_before_take_over": Rule(
        "healthy siblings rest before a new id fences them", of("crash"), "a healthy tool is fenced by its own run"
    ),
    "new_execution_id": Rule("each claim has an id of its own", of("pause"), "a write by a stale hand"),
    "announcements": Rule(
        "announcements are of the current step", of("pause"), "a call of a stale hand is started by a run"
    ),
    "ids_of_signals": Rule(
        "ids of input come from its place in the history",
        of(client=("letter", "letter")),
        "an input admitted twice, and answered twice",
    ),
    "interrupt_reason": Rule(
        "what a user stopped is not gone on with",
        of(client=("stop", "letter")),
        "a continuation of a turn that was stopped or answered",
    ),
    "admit_before_return": Rule(
        "what was signalled is admitted before a run returns",
        of(client=_LETTER, scan=False),
        "a run ends before it has admitted what it was sent",
    ),
    "wake_until_promoted": Rule(
        "input asks for execution until it is promoted", of("timeout"), "an input lost: nobody asks for it any more"
    ),
    "beats": Rule("who stood still asks again before an effect", of("pause"), _STALE),
    "repair": Rule("a repair counts as lost, not as a user's end", of("repair"), _STOPPED),
    "drain": Rule("a worker's shutdown is no user's interrupt", of("drain"), _STOPPED),
    "attempts_counted": Rule(
        "continuations are counted", of("crash", faults=2), "a turn goes on more often than its limit"
    ),
    "repeats_are_told": Rule(
        "a claim that answers from its record says so, and is made anew",
        of(client=("stop", "letter"), scan=False),
        _UNSEEN,
    ),
    "signal_only_if_no_claim": Rule(
        "the admission itself says whether a claim is there", of(client=_LETTER, scan=False), _UNSEEN
    ),
}

KNOWN: dict[str, Rule] = {
    "early interrupt": Rule(
        "a twin of an interruption settles the step while its run, doing the task again, has not heard of it: goes on",
        of("twin", client=("stop",)),
        "a healthy tool is fenced by its own run",
    ),
}
"""Violations with all rules on. When one is mended its entry goes, and its scenario joins the others."""

KINDS = ("redo", "twin", "crash", "pause", "drain", "cut", "refuse", "expire", "lose", "twice")
ENDS = ("terminate", "timeout", "gone", "repair", "cancel", "reset")

SMALL: tuple[Scenario, ...] = (
    *(of(kind, client=client) for kind in KINDS for client in ((), _LETTER)),
    *(of(kind) for kind in ENDS),
    of("redo", client=_LETTER, old=True),
    of("redo", client=("stop", "letter")),
)
"""With all rules on none of these breaks a promise."""

WIDE: tuple[Scenario, ...] = (
    *(of(kind, client=("stop",)) for kind in (*KINDS, *ENDS) if kind not in ("twin", "reset")),
    *(of(kind, client=_LETTER) for kind in ENDS),
    *(of(kind, client=_LETTER, old=True) for kind in (*KINDS, "timeout", "cancel")),
    *(of(one, other, faults=2) for n, one in enumerate(KINDS) for other in KINDS[n:]),
    *(of(one, other, faults=2) for one in ENDS[:-1] for other in KINDS),
    of("redo", "crash", faults=2, client=_LETTER),
    of("drain", faults=2, client=_LETTER),
)
"""The same, for somebody who has some minutes."""
