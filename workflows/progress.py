"""What people see of a turn while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from fencepost.domain.contracts import Plan
    from fencepost.domain.messages import CacheTokens, Tokens


def added(left: Tokens, right: Tokens) -> Tokens:
    """Sum two counts."""
    return Tokens(
        input=left.input + right.input,
        output=left.output + right.output,
        reasoning=left.reasoning + right.reasoning,
        cache=CacheTokens(read=left.cache.read + right.cache.read, write=left.cache.write + right.cache.write),
    )


@dataclass
class Progress:
    """What people see of a turn; lives as long as the run."""

    session_id: str
    phase: Literal["idle", "busy", "retrying", "waiting"] = "idle"
    steps: int = 0
    step: int = 0
    attempt: int = 0
    plan: Plan | None = None
    running: dict[str, str] = field(default_factory=dict)
    # Zeros that were set: a default would be left out of what clients get.
    tokens: Tokens = field(default_factory=lambda: added(Tokens(), Tokens()))
    cost: float = 0
    waiting_for: str | None = None
    error: str | None = None

    def show(self) -> None:
        """Put it where the Temporal UI shows it."""
        lines = [f"**{self.phase}**, step {self.steps}" + (f", attempt {self.attempt}" if self.attempt > 1 else "")]
        if self.plan is not None:
            lines.append(f"- agent {self.plan.agent}, model {self.plan.model}")
        lines += [f"- running: {summary}" for summary in self.running.values()]
        lines.append(f"- tokens so far: {self.tokens.input} in, {self.tokens.output} out")
        if self.waiting_for:
            lines.append(f"- waiting: {self.waiting_for}")
        if self.error:
            lines.append(f"- error: {self.error}")
        workflow.set_current_details("\n".join(lines))
