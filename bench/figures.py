"""What was measured, beside what is promised of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WIDTH = 58


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and its bound: the most it may be, or with `at_least` the least.

    `detail` holds the plain values that it was worked out from, by their names.
    """

    subject: str
    name: str
    value: float
    bound: float
    unit: str = ""
    at_least: bool = False
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Say whether the value keeps to its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """Give the figure as plain values."""
        return {**asdict(self), "met": self.met}


def number(value: float) -> str:
    """Write a number with as many digits as somebody reads: a whole one in full, else two behind the point."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.2f}"


def table(figures: Sequence[Figure]) -> str:
    """Give the figures for people: value, bound, whether it is met, and what the value was worked out from."""
    lines = [f"{'':{WIDTH}}{'value':>10} {'bound':>12}  met"]
    subject = ""
    for one in figures:
        if one.subject != subject:
            subject = one.subject
            lines.append(subject)
        bound = f"{'>=' if one.at_least else '<='} {number(one.bound)}"
        unit = f" [{one.unit}]" if one.unit else ""
        detail = ", ".join(f"{name} {number(value)}" for name, value in one.detail.items())
        line = f"{'  ' + one.name + unit:{WIDTH}}{number(one.value):>10} {bound:>12}  {'yes' if one.met else 'NO '}"
        lines.append(f"{line}  {detail}".rstrip())
    missed = sum(not one.met for one in figures)
    lines.append(f"{len(figures) - missed} of {len(figures)} bounds met")
    return "\n".join(lines)
