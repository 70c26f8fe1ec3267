"""The ownership protocol in small scenarios: nothing breaks with all rules on, something does without each of them."""

from __future__ import annotations

import pytest

from tests.model.explorer import explore
from tests.model.rules import KNOWN, RULES, SMALL
from tests.model.scene import Scenario

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", RULES)
def test_without_a_rule_a_promise_is_broken(name: str) -> None:
    """The model is fine enough to need every rule, and with all of them the same scenario is safe."""
    rule = RULES[name]
    assert explore(rule.off(name)).violation == rule.violation
    on = explore(rule.scenario)
    assert on.violation is None, "\n".join(on.trace)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_still_so(name: str) -> None:
    """When it is mended, its entry goes."""
    assert explore(KNOWN[name].scenario).violation == KNOWN[name].violation


def _id(scenario: Scenario) -> str:
    return "-".join((*sorted(scenario.kinds), *scenario.client, *(["old"] if scenario.old else [])))


@pytest.mark.parametrize("scenario", SMALL, ids=_id)
def test_with_all_rules_nothing_is_broken(scenario: Scenario) -> None:
    """One fault of each kind, wherever it may fall."""
    found = explore(scenario)
    assert found.violation is None, "\n".join(found.trace)
    assert not found.cut
