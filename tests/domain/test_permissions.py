"""Permission rules."""

from __future__ import annotations

import pytest

from fencepost.domain.permissions import Effect, Rule, effect_of, evaluate, hides_tool, matches


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("*", "", True),
        ("*", "any\nthing", True),
        ("git *", "git", True),
        ("git *", "git push", True),
        ("git *", "gitk", False),
        ("git*", "gitk", True),
        ("src/*.py", "src/deep/er.py", True),
        ("src/*.py", "src/a.txt", False),
        ("?.txt", "a.txt", True),
        ("?.txt", "ab.txt", False),
        ("a.b", "axb", False),
        ("a(b", "a(b", True),
        ("src\\*", "src/a", True),
        ("src/*", "src\\a", True),
        ("read", "READ", False),
        ("read", "read ", False),
    ],
)
def test_a_pattern_covers_a_text(pattern: str, text: str, expected: bool) -> None:
    """A star is any text, a question mark one character, and ` *` at the end may also be nothing."""
    assert matches(pattern, text) is expected


RULES = (
    Rule(action="*", effect="allow"),
    Rule(action="bash", resource="git *", effect="ask"),
    Rule(action="bash", resource="git push *", effect="deny"),
    Rule(action="bash", resource="git push --dry-run", effect="allow"),
)


@pytest.mark.parametrize(
    ("action", "resource", "expected"),
    [
        ("read", "a", "allow"),
        ("bash", "ls", "allow"),
        ("bash", "git", "ask"),
        ("bash", "git push", "deny"),
        ("bash", "git push --dry-run", "allow"),
    ],
)
def test_the_last_rule_that_fits_wins(action: str, resource: str, expected: Effect) -> None:
    """Whatever the ones before it say."""
    assert effect_of(RULES, action, resource) == expected


def test_without_a_rule_somebody_is_asked() -> None:
    """Nothing is allowed by silence."""
    assert effect_of((), "bash", "ls") == "ask"
    assert effect_of((Rule(action="read", effect="allow"),), "bash", "ls") == "ask"


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (["ls"], "allow"),
        (["ls", "git"], "ask"),
        (["ls", "git", "git push"], "deny"),
        (["git push", "ls"], "deny"),
        (["ls", "read"], "allow"),
    ],
)
def test_several_resources_are_as_good_as_the_worst(resources: list[str], expected: Effect) -> None:
    """A deny of any denies the whole, then an ask asks."""
    assert evaluate(RULES, "bash", resources) == expected


@pytest.mark.parametrize(
    ("rules", "hidden"),
    [
        ([], False),
        ([Rule(action="bash", effect="deny")], True),
        ([Rule(action="*", effect="deny")], True),
        ([Rule(action="bash", resource="rm *", effect="deny")], False),
        ([Rule(action="bash", effect="deny"), Rule(action="bash", resource="ls", effect="allow")], False),
        ([Rule(action="bash", effect="allow"), Rule(action="bash", effect="deny")], True),
        ([Rule(action="bash", effect="deny"), Rule(action="read", effect="allow")], True),
    ],
)
def test_a_tool_is_hidden_when_the_last_rule_for_it_denies_all(rules: list[Rule], hidden: bool) -> None:
    """A tool that may do something is shown."""
    assert hides_tool(rules, "bash") is hidden
