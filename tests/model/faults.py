"""What may befall the runs of a session and their activities, from outside."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.domain.ownership import OwnerRun
from tests.model import turns
from tests.model.scene import Run, Scenario, State, Step, expired, local, put, with_run
from tests.model.turns import Hand


def faults(state: State, scenario: Scenario) -> Iterator[Step]:
    """Give what one more fault leads to."""
    kinds, off = scenario.kinds, scenario.off
    place = len(state.runs) - 1
    run = state.runs[place]
    if run.status == "open":
        if run.turn.pc in turns.LOCAL:
            yield from _local_faults(state, place, run, scenario)
        yield from _ends(state, place, run, scenario)
    for hand in state.hands:
        if hand.lost or hand.kind == "local" or run.status != "open" or hand.run != place:
            continue
        others = tuple(one for one in state.hands if one is not hand)
        gone = turns.report(run.turn, hand, "lost", off)
        if "crash" in kinds:
            yield f"{hand.label}: its worker dies", put(state._replace(hands=others), place, gone, off, task=True)
        if "pause" in kinds:
            frozen = state._replace(hands=tuple(sorted((*others, hand._replace(lost=True)))))
            yield f"{hand.label}: its worker stands still", put(frozen, place, gone, off, task=True)
        if "twice" in kinds and hand.first:
            twin = hand._replace(lost=True)
            yield f"{hand.label}: is begun twice", state._replace(hands=tuple(sorted((*state.hands, twin))))
        if "drain" in kinds:
            drained = turns.report(run.turn, hand, "drained", off)
            yield f"{hand.label}: its worker drains", put(state._replace(hands=others), place, drained, off, task=True)
        if "cut" in kinds and hand.kind == "stream" and hand.pc == "end":
            cut = turns.report(run.turn, hand, "cut", off)
            yield f"{hand.label}: the answer is cut off", put(state._replace(hands=others), place, cut, off, task=True)
        if "refuse" in kinds and hand.kind == "stream" and hand.pc == "said":
            yield (
                f"{hand.label}: the provider refuses",
                state._replace(hands=tuple(sorted((*others, hand._replace(pc="refused"))))),
            )
    row = state.db.row
    working = any(not one.lost and not one.first for one in state.hands)
    if "expire" in kinds and row is not None and not row.expired and (not working or "beats" in off):
        yield "the lease runs out", expired(state)
    if "lose" in kinds and state.client[:1] in (("wake",), ("letter",)):
        yield f"the client dies before it says {state.client[0]}", state._replace(client=state.client[1:])


def _local_faults(state: State, place: int, run: Run, scenario: Scenario) -> Iterator[Step]:
    back = with_run(state, place, run._replace(turn=run.kept))
    name = turns.name(run.turn)
    if "redo" in scenario.kinds:
        done = local(state, place, run.turn, scenario)
        db = state.db if done is None else done[0]
        yield f"run {place}: {name}, and its worker dies before it says so", back._replace(db=db)
    if "twin" in scenario.kinds:
        twin = Hand("local", place, turn=run.turn, lost=True)
        yield f"run {place}: {name} stands still", back._replace(hands=tuple(sorted((*state.hands, twin))))


def _ends(state: State, place: int, run: Run, scenario: Scenario) -> Iterator[Step]:
    """The run ends from outside."""
    ends: tuple[tuple[str, OwnerRun], ...] = (("terminate", "terminated"), ("timeout", "closed"), ("gone", "not-found"))
    for kind, status in ends:
        if kind in scenario.kinds:
            yield f"run {place}: {kind}", with_run(state, place, run._replace(status=status, turn=turns.OVER))
    if "cancel" in scenario.kinds and not run.turn.cancelled and "cancel" not in run.signals:
        yield (
            f"run {place}: cancelled from outside",
            with_run(state, place, run._replace(signals=(*run.signals, "cancel"))),
        )
    if "repair" in scenario.kinds:
        status = "terminated" if "repair" in scenario.off else "closed"
        yield f"run {place}: repaired", with_run(state, place, run._replace(status=status, turn=turns.OVER))
    if "reset" in scenario.kinds:
        ended = with_run(state, place, run._replace(status="reset", turn=turns.OVER))
        points = dict.fromkeys((turns.reset(run.kept), run.first))
        for turn in points:
            whole = turn.pc == "admit"
            again = tuple(one for one in (run.history if whole else run.signals) if one != "cancel")
            new = Run("open", turn, turn, run.first, again, run.history)
            begun = put(ended._replace(runs=(*ended.runs, new)), place + 1, turn, scenario.off, task=True)
            yield f"run {place}: reset to {'its beginning' if whole else 'its last task'}", begun
