"""Ownership of a session: the token that every fenced call carries, and who may take it from whom. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from fencepost.domain.wire import WireModel

Phase: TypeAlias = Literal["ready", "unknown"]
Stage: TypeAlias = Literal["claimed", "prepared", "requested", "settled", "released"]

STAGES: tuple[Stage, ...] = ("claimed", "prepared", "requested", "settled", "released")

OwnerRun: TypeAlias = Literal["open", "closed", "reset", "terminated", "cancelled", "not-found", "unreachable"]
"""What Temporal says of the run that owns a session. `reset` and the two after it are closed runs, told apart because
what they owe differs: a reset goes on, while terminating or cancelling from outside is a user's interrupt."""

TakeoverReason: TypeAlias = Literal["lost", "shutdown", "reset", "terminated", "cancelled", "moved"]


class Token(WireModel):
    """(session, execution, owner): the right to write to a session. `owner_id` is the id of the owning run."""

    session_id: str
    execution_id: str
    owner_id: str


def may_take_over(owner: OwnerRun, *, lease_expired: bool) -> bool:
    """Say whether a claim may take a session from another run."""
    match owner:
        case "closed" | "reset" | "terminated" | "cancelled":
            return True
        case "not-found":
            return lease_expired
        case "open" | "unreachable":
            return False
        case _:
            assert_never(owner)


def takeover_reason(owner: OwnerRun) -> TakeoverReason:
    """Give the reason that the log records for a step whose owner's run ended like this."""
    return owner if owner in ("reset", "terminated", "cancelled") else "lost"


def continues(reason: str) -> bool:
    """Say whether an interrupted turn goes on by itself: always, unless a user wanted it to stop."""
    return reason not in ("user", "cancelled", "terminated")


def is_before(step: int, stage: Stage, other_step: int, other_stage: Stage) -> bool:
    """Say whether (step, stage) lies before the other in an execution. A ledger only moves forward."""
    return (step, STAGES.index(stage)) < (other_step, STAGES.index(other_stage))
