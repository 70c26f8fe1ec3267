"""A session's work in the lines of `session list` and `session show`, and for programs."""

from __future__ import annotations

from fencepost.cli import listing
from fencepost.domain.inbox import Location
from fencepost.domain.messages import Tokens
from fencepost.domain.status import Activity, Claim
from fencepost.store.sessions import Session

SESSION = Session(
    id="ses_1",
    title="Title",
    location=Location(directory="/work"),
    agent=None,
    model=None,
    cost=0,
    tokens=Tokens(),
    time_created=0,
    time_updated=0,
    time_archived=None,
)
CLAIM = Claim("exe_1", "run-1", "ready", age=12_400, left=47_600, stage="requested", attempt=1)


def test_a_list_says_what_is_not_idle() -> None:
    idle = " ".join(listing.session_lines(SESSION, Activity("idle")))
    busy = " ".join(listing.session_lines(SESSION, Activity("busy", None, CLAIM)))

    assert "[" not in idle
    assert "  [busy]  Title" in busy


def test_a_session_in_full_shows_its_owner_and_the_lease() -> None:
    busy = list(listing.detail_lines(SESSION, [], Activity("busy", None, CLAIM), "none is open"))
    lapsed = Claim("exe_1", "run-1", "ready", age=72_000, left=-12_000)
    waiting = list(listing.detail_lines(SESSION, [], Activity("waiting", "why", lapsed), "none is open"))

    assert "status     busy" in busy
    assert "owner      run run-1 for 12 s, lease 48 s left" in busy
    assert "status     waiting: why" in waiting
    assert "owner      run run-1 for 72 s, lease ran out 12 s ago" in waiting


def test_programs_get_times_in_milliseconds() -> None:
    assert listing.session_json(SESSION, Activity("busy", None, CLAIM))["activity"] == {
        "state": "busy",
        "runID": "run-1",
        "executionID": "exe_1",
        "claimAge": 12_400,
        "leaseLeft": 47_600,
    }
    assert "activity" not in listing.session_json(SESSION)
