"""Permission rules: pure evaluation. The last matching rule wins; a deny of any resource denies the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Effect: TypeAlias = Literal["allow", "deny", "ask"]


class Rule(BaseModel):
    """One rule: for this action and resource, this effect. `*` matches any text, `?` one character."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str = Field(min_length=1)
    resource: str = "*"
    effect: Effect


@lru_cache(maxsize=1024)
def _pattern(text: str) -> re.Pattern[str]:
    text = text.replace("\\", "/")
    optional_tail = text.endswith(" *")  # `git *` also matches plain `git`
    body = re.escape(text[:-2] if optional_tail else text).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(body + (r"( .*)?" if optional_tail else "") + r"\Z", re.DOTALL)


def matches(pattern: str, text: str) -> bool:
    """Say whether the wildcard pattern covers the text; a backslash counts as a slash."""
    return _pattern(pattern).match(text.replace("\\", "/")) is not None


def effect_of(rules: Sequence[Rule], action: str, resource: str) -> Effect:
    """Give the effect of the last rule that matches action and resource, `ask` when none does."""
    for rule in reversed(rules):
        if matches(rule.action, action) and matches(rule.resource, resource):
            return rule.effect
    return "ask"


def evaluate(rules: Sequence[Rule], action: str, resources: Iterable[str]) -> Effect:
    """Give one effect for several resources: any deny denies, else any ask asks, else allow."""
    effects = {effect_of(rules, action, resource) for resource in resources}
    return "deny" if "deny" in effects else "ask" if "ask" in effects else "allow"


def hides_tool(rules: Sequence[Rule], action: str) -> bool:
    """Say whether a tool with this permission action is left out of the catalogue: the last rule for it denies all."""
    for rule in reversed(rules):
        if matches(rule.action, action):
            return rule.effect == "deny" and rule.resource == "*"
    return False
