"""What a turn does next."""

from __future__ import annotations

import pytest

from fencepost.domain import decisions
from fencepost.domain.contracts import StreamResult


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (StreamResult(ok=True), "yield"),
        (StreamResult(ok=True, local_calls=1), "continue"),
        (StreamResult(ok=False, local_calls=1), "yield"),
    ],
)
def test_a_turn_goes_on_when_the_model_has_results_to_see(result: StreamResult, expected: str) -> None:
    """And never after a failure."""
    assert decisions.after_step(result) == expected


@pytest.mark.parametrize(
    ("changes", "attempt", "expected"),
    [
        ({}, 1, True),
        ({}, 2, True),
        ({}, 3, False),
        ({"transient": False}, 1, False),
        ({"output": True}, 1, False),
        ({"ok": True}, 1, False),
        ({"retry_after": 900.0}, 1, True),
        ({"retry_after": 901.0}, 1, False),
    ],
)
def test_a_request_is_repeated_only_while_nothing_of_it_is_durable(
    changes: dict[str, object], attempt: int, expected: bool
) -> None:
    """The cause has to be one that passes, tries have to be left, and the wait has to be bearable."""
    result = StreamResult.model_validate({"ok": False, "transient": True, **changes})

    assert decisions.may_repeat(result, attempt, 3) is expected


def test_pauses_double_up_to_a_limit_and_never_undercut_the_provider() -> None:
    """Half a second, one, two, and so on."""
    assert [decisions.back_off(n, None) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert decisions.back_off(50, None) == decisions.LONGEST_BACK_OFF
    assert decisions.back_off(1, 20.0) == 20.0
    assert decisions.back_off(3, 0.1) == 2.0
