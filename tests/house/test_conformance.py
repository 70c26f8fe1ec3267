"""The list of promised behaviours and the claims of the tests hold together."""

from __future__ import annotations

import ast
import json
from collections import Counter

from tests.conformance import LIST, MARK, behaviours
from tests.house.project import ROOT, test_modules, tree

DELIVERED = (1, 2, 3)
"""Milestones whose behaviours must all be claimed by a test."""


def _claims() -> dict[str, list[str]]:
    """Give each claimed id with the places that claim it, from the marks as written in the source."""
    claims: dict[str, list[str]] = {}
    for path in test_modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == MARK:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{where}: write the ids out, so that they can be found"
                    claims.setdefault(str(argument.value), []).append(where)
    return claims


def test_the_list_is_well_formed() -> None:
    """Every behaviour has an id of its own, a milestone and one line."""
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    counts = Counter(entry["id"] for entry in entries)

    assert [one for one, count in counts.items() if count > 1] == []
    assert all(set(entry) == {"id", "milestone", "line"} and "\n" not in entry["line"] for entry in entries)


def test_claimed_ids_are_in_the_list() -> None:
    """A claim of something that is not promised is a typing mistake."""
    assert {one: places for one, places in _claims().items() if one not in behaviours()} == {}


def test_delivered_behaviours_are_claimed() -> None:
    """What is delivered is shown by at least one test."""
    due = {one for one, milestone in behaviours().items() if milestone in DELIVERED}

    assert sorted(due - _claims().keys()) == []
