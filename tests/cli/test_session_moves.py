"""`fencepost session move`: on the database alone, and under a turn that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.cli.command import Command, Ended, ended, read_until
from tests.cli.nursery import Nursery

Quick = Callable[..., Ended]


@pytest.fixture
def here(nursery: Nursery, beside: Command) -> Quick:
    """The command beside `fencepost dev`, quickly."""
    return functools.partial(nursery, beside)


def test_a_session_is_moved_and_shown_where_it_is(quick: Quick, connected: Command) -> None:
    """To a directory with a line break in its name, too. Again it changes nothing, and that is said."""
    there = connected.directory / "two\nlines"
    there.mkdir()
    quick("session", "create", "--id", "ses_moved")
    moved = quick("session", "move", "ses_moved", str(there))
    again = quick("session", "move", "ses_moved", "two\nlines/", "--json")
    far = quick("session", "move", "ses_moved", "/not/on/this/machine", "--workspace", "build-3", "--json")
    shown = quick("session", "show", "ses_moved")
    back = quick("session", "move", "ses_moved", ".")

    assert (moved.code, moved.out.count("\n"), moved.err) == (0, 1, "")
    assert moved.out.startswith("ses_moved works in ")
    assert moved.out.endswith("(all workers)\n")
    [told] = again.objects()
    assert (told["moved"], told["location"]) == (False, {"directory": str(there)})
    assert again.complaint() == "it was there already: nothing has changed"
    [told] = far.objects()
    assert (told["moved"], far.err) == (True, "")
    assert told["location"] == {"directory": "/not/on/this/machine", "workspaceID": "build-3"}
    assert "directory  /not/on/this/machine" in shown.out.splitlines()
    assert "workspace  build-3" in shown.out.splitlines()
    assert back.code == 0
    assert "not bound to workspace build-3 any more" in back.complaint()
    assert [event["type"] for event in quick("session", "events", "ses_moved", "--json").objects()] == [
        "session.created.1",
        *["session.next.moved.1"] * 3,
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/at/all"], "DIRECTORY: /nowhere/at/all is not a directory: create it first"),
        ([".", "--workspace", "a\nb"], "'a\\nb' is no workspace id"),
        ([".", "--workspace", ""], "'' is no workspace id"),
        ([], "Missing argument 'DIRECTORY'"),
    ],
)
def test_what_is_no_place_is_refused(quick: Quick, arguments: list[str], said: str) -> None:
    """In one line, and the session stays where it is."""
    quick("session", "create", "--id", "ses_stays")
    refused = quick("session", "move", "ses_stays", *arguments)

    assert refused.code == 2
    assert said in refused.complaint()
    assert len(quick("session", "events", "ses_stays", "--json").objects()) == 1


def test_one_is_told_that_nobody_serves_the_workspace_and_helps_by_a_move(here: Quick, beside: Command) -> None:
    """The notice names the error and the command, and the turn goes on where it then is. An archived session moves."""
    (beside.directory / "note.txt").write_text("the word is heron\n")
    session = here("session", "create").out.strip()
    here("session", "archive", session)
    here("session", "move", session, str(beside.directory), "--workspace", "nowhere")
    with beside.started("session", "prompt", session, "Read note.txt", "--wait", "--json") as turn:
        notice = read_until(turn.stderr, "no worker of workspace nowhere").splitlines()[-1]
        shown = here("session", "show", session)
        moved = here("session", "move", session, str(beside.directory))
        done = ended(turn)

    assert notice.startswith("waiting: WorkspaceUnavailableError: no worker of workspace nowhere (task queue ")
    assert f"`fencepost session move {session} DIRECTORY`" in notice
    assert "waiting: WorkspaceUnavailableError" in shown.out
    assert "the turn that ran was interrupted, and goes on there" in moved.err
    assert done.code == 0
    assert done.objects()[-1]["outcome"] == "done"
    assert here("session", "show", session, "--json").objects()[0]["location"] == {"directory": str(beside.directory)}


def test_a_deleted_session_is_not_moved(quick: Quick) -> None:
    """It is unknown."""
    quick("session", "create", "--id", "ses_gone")
    quick("session", "delete", "ses_gone", "--yes")
    assert quick("session", "move", "ses_gone", ".").complaint().startswith("fencepost: no session ses_gone")
