"""Who may take a session from whom, and how far an execution has come."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from fencepost.domain.events import InterruptReason
from fencepost.domain.ownership import (
    STAGES,
    OwnerRun,
    Stage,
    TakeoverReason,
    continues,
    is_before,
    may_take_over,
    takeover_reason,
)


@pytest.mark.parametrize(
    ("run", "running", "expired"),
    [
        ("open", False, False),
        ("closed", True, True),
        ("reset", True, True),
        ("terminated", True, True),
        ("cancelled", True, True),
        ("not-found", False, True),
        ("unreachable", False, False),
    ],
)
def test_the_owners_run_decides_and_the_lease_only_when_it_is_unknown(
    run: OwnerRun, running: bool, expired: bool
) -> None:
    """The expired lease of an open run lets nobody in."""
    assert may_take_over(run, lease_expired=False) is running
    assert may_take_over(run, lease_expired=True) is expired


def test_every_state_of_a_run_has_an_answer_and_a_reason() -> None:
    """No state is forgotten when one is added."""
    for run in get_args(OwnerRun):
        assert may_take_over(run, lease_expired=True) in (True, False)
        assert takeover_reason(run) in get_args(TakeoverReason)
    assert [takeover_reason(run) for run in ("reset", "terminated", "cancelled", "closed", "not-found")] == [
        "reset", "terminated", "cancelled", "lost", "lost"
    ]  # fmt: skip


def test_only_what_a_user_stopped_does_not_go_on() -> None:
    """Stopped inside or from outside."""
    stopped = {reason for reason in get_args(InterruptReason) if not continues(reason)}

    assert stopped == {"user", "cancelled", "terminated"}


def test_a_ledger_has_one_direction() -> None:
    """Steps in order, and the stages of a step in order."""
    places: list[tuple[int, Stage]] = [(step, stage) for step in (1, 2) for stage in STAGES]

    for (n, left), (k, right) in itertools.product(enumerate(places), repeat=2):
        assert is_before(*left, *right) is (n < k)
