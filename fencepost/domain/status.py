"""What a session is doing, worked out from what is durable: true after any crash, without a worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fencepost.domain.ownership import Phase, Stage, continues

State: TypeAlias = Literal["busy", "retrying", "waiting", "idle", "interrupted", "failed"]
"""`busy` and `retrying` (a request that failed is made again): its run works on it. `waiting`: there is work, and no
run has it in hand now. The others are ways in which the last turn has ended, `idle` being the good one."""

GIVEN_UP = "the turn was cut off too often, and was given up: send a prompt to go on"
WITHOUT_RUN = "there is input, and no run has begun with it yet"
LEASE_RAN_OUT = "its run has not renewed the lease: it is away, or waits"


UNTAKEN_MS = 30_000
"""For so long a planned tool call may wait for a worker of its workspace without being worth a word."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An execution row as it is now. Times are in milliseconds; `left` is what the lease has, negative when it ran out,
    and `age` the time since the session was claimed."""

    execution_id: str
    run_id: str
    phase: Phase
    age: int
    left: int
    stage: Stage | None = None
    attempt: int = 0
    failed_attempt: int = 0
    answering: bool = False
    untaken: int | None = None
    """How long its oldest call has waited that has not been started and is for the workers of a workspace."""
    workspace: str | None = None
    put_aside: str | None = None
    """Why recovery does not touch it, when its row cannot be right."""

    @property
    def live(self) -> bool:
        """Say whether the lease runs."""
        return self.left > 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the tables say of a session: its claim, what asks for execution, and how its last step ended.

    `ended` is the kind of the log's last event that ended a step; `interruption` is why, when it was interrupted, and
    `error` what it failed with.
    """

    claim: Claim | None = None
    wakes: int = 0
    ended: Literal["ended", "failed", "interrupted"] | None = None
    interruption: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a session is doing, in a word, and why, where there is something to say. `claim` is its owner's."""

    state: State
    reason: str | None = None
    claim: Claim | None = None

    def to_wire(self) -> dict[str, Any]:
        """Give it for programs."""
        found: dict[str, Any] = {"state": self.state}
        if self.reason is not None:
            found["reason"] = self.reason
        if self.claim is not None:
            claim = self.claim
            found |= {"runID": claim.run_id, "executionID": claim.execution_id, "claimAge": claim.age}
            found["leaseLeft"] = claim.left
        return found


def activity(facts: Facts) -> Activity:
    """Work out what a session is doing."""
    claim = facts.claim
    if claim is None:
        return Activity("waiting", WITHOUT_RUN) if facts.wakes else _ended(facts)
    if claim.put_aside is not None and not claim.live:
        return Activity("failed", f"its claim is put aside until it is used again: {claim.put_aside}", claim)
    if claim.untaken is not None and claim.untaken > UNTAKEN_MS:
        seconds = claim.untaken // 1000
        reason = f"a tool call has waited {seconds} s for a worker of workspace {claim.workspace}: start one, or move"
        return Activity("waiting", reason, claim)
    if not claim.live:
        return Activity("waiting", LEASE_RAN_OUT, claim)
    if claim.phase == "unknown":
        # Between the end of an interrupted step and what becomes of the session: given back, or taken over.
        stopped = not continues(facts.interruption or "lost")
        return Activity("interrupted" if stopped else "waiting", facts.interruption, claim)
    repeats = claim.attempt > 1 or claim.failed_attempt == claim.attempt == 1
    if claim.stage == "requested" and repeats and not claim.answering:
        failed = max(claim.failed_attempt, claim.attempt - 1)
        return Activity("retrying", f"request {failed} of this step failed", claim)
    return Activity("busy", None, claim)


def _ended(facts: Facts) -> Activity:
    if facts.ended == "failed":
        return Activity("failed", facts.error)
    if facts.ended == "interrupted":
        reason = facts.interruption or "lost"
        return Activity("failed", GIVEN_UP) if continues(reason) else Activity("interrupted", reason)
    return Activity("idle")
