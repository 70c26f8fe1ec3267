"""What a turn does next: pure functions of what is known after a stage."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fencepost.domain.contracts import StreamResult

Next: TypeAlias = Literal["continue", "yield"]

FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 60.0
LONGEST_RETRY_AFTER = 900.0


def after_step(result: StreamResult) -> Next:
    """Say whether the turn goes on after a settled step: only when the model called local tools and did not fail."""
    return "continue" if result.ok and result.local_calls else "yield"


def may_repeat(result: StreamResult, attempt: int, max_attempts: int) -> bool:
    """Say whether the step's request may be made again: nothing of it is durable, the cause may pass, tries are left,
    and the provider does not ask for a longer wait than anybody would want."""
    if result.ok or result.output or not result.transient or attempt >= max_attempts:
        return False
    return result.retry_after is None or result.retry_after <= LONGEST_RETRY_AFTER


def back_off(attempt: int, retry_after: float | None) -> float:
    """Give the seconds to wait after the attempt (from 1): doubling, and never less than the provider asks for."""
    own = min(FIRST_BACK_OFF * 2.0 ** (attempt - 1), LONGEST_BACK_OFF)
    return max(own, retry_after or 0.0)
