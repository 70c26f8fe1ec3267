"""Names and payloads of the recovery scan: its workflow, its schedule and its activity. All of it is internal."""

from __future__ import annotations

from pydantic import Field

from fencepost.domain.wire import WireModel

RECOVERY = "Recovery"
RECOVER_SESSIONS = "recover_sessions"
RECOVERY_SECONDS = 10
"""How often sessions are looked for that nobody works on and that somebody should."""


def recovery_id(deployment: str, task_queue: str) -> str:
    """Give the id of the recovery schedule, and the beginning of the ids of its runs: deployments that share a
    Temporal namespace differ in at least one of the two."""
    return f"fencepost-recovery-{deployment}-{task_queue}"


class RecoveryInput(WireModel):
    """`batch` bounds what one scan does of each kind."""

    batch: int = 50


class RecoveryResult(WireModel):
    """What one scan came to: how many sessions for each thing that was done; `cut_off` says why it ended early."""

    done: dict[str, int] = Field(default_factory=dict)
    cut_off: str | None = None
