"""What people see of a turn while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from temporalio import workflow
from temporalio.common import SearchAttributeKey

with workflow.unsafe.imports_passed_through():
    from fencepost.domain.contracts import Plan
    from fencepost.domain.messages import CacheTokens, Tokens


Phase: TypeAlias = Literal["idle", "busy", "retrying", "waiting"]


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
    phase: Phase = "idle"
    steps: int = 0
    step: int = 0
    attempt: int = 0
    plan: Plan | None = None
    running: dict[str, str] = field(default_factory=dict)
    # Zeros that were set: a default would be left out of what clients get.
    tokens: Tokens = field(default_factory=lambda: added(Tokens(), Tokens()))
    cost: float = 0
    waiting_for: str | None = None
    waits: dict[str, str] = field(default_factory=dict)
    """By tool call: what each of those waits for that no worker has taken."""
    error: str | None = None
    _before: Phase = "busy"

    @property
    def reason(self) -> str | None:
        """What the turn waits for, if it does."""
        return self.waiting_for or next(iter(self.waits.values()), None)

    @property
    def state(self) -> Phase:
        """The phase, in which a call that no worker has taken counts as waiting."""
        return "waiting" if self.phase == "busy" and self.waits else self.phase

    def wait_for_service(self, what: str | None) -> None:
        """Show what a turn that runs waits for, or that it goes on."""
        if what == self.waiting_for:
            return
        if self.waiting_for is None:
            self._before = self.phase
        self.waiting_for, self.phase = what, "waiting" if what else self._before
        self.show()

    def attribute(self, known: tuple[str, ...]) -> None:
        """Make the run findable by what it runs. Only by attributes that the server has: an unknown one would fail the
        workflow task for ever."""
        assert self.plan is not None, "a step has its plan"
        updates = []
        for name, value in (("FencepostAgent", self.plan.agent), ("FencepostModel", str(self.plan.model))):
            if name in known:
                key = SearchAttributeKey.for_keyword(name)
                if workflow.info().typed_search_attributes.get(key) != value:
                    updates.append(key.value_set(value))
        if updates:
            workflow.upsert_search_attributes(updates)

    def show(self) -> None:
        """Put it where the Temporal UI shows it."""
        lines = [f"**{self.state}**, step {self.steps}" + (f", attempt {self.attempt}" if self.attempt > 1 else "")]
        if self.plan is not None:
            lines.append(f"- agent {self.plan.agent}, model {self.plan.model}")
        lines += [f"- running: {summary}" for summary in self.running.values()]
        lines.append(f"- tokens so far: {self.tokens.input} in, {self.tokens.output} out")
        if self.reason:
            lines.append(f"- waiting: {self.reason}")
        if self.error:
            lines.append(f"- error: {self.error}")
        workflow.set_current_details("\n".join(lines))
