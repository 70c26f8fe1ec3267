"""`fencepost session` on the database alone: created, listed, shown, put away, deleted. No worker is anywhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from temporalio.client import Client as TemporalClient

from tests.cli.command import Command, Ended

Quick = Callable[..., Ended]

_NAMES = [
    "two words, \"quotes\" and 'more'",
    "two\nlines",
    "日本語のセッション、長い題名です。とても長い題名です。",
    "שלום עולם",
]


def test_a_session_is_created_listed_and_shown(quick: Quick, connected: Command) -> None:
    """The id alone is standard output, so that a script can take it; programs get everything as JSON."""
    made = quick("session", "create", "--title", "A title", "--agent", "plan", "--model", "openai/gpt-4o-mini")
    session = made.out.strip()
    listed, shown = quick("session", "list"), quick("session", "show", session)
    (as_json,) = quick("session", "show", session, "--json").objects()

    assert (made.code, listed.code, shown.code) == (0, 0, 0)
    assert session.startswith("ses_")
    assert session in made.complaint()
    assert listed.out.startswith(f"{session}  ")
    assert f"A title  ({connected.directory})" in listed.out
    told = shown.out.splitlines()
    for fact in (
        "title      A title",
        "agent      plan",
        "status     idle",
        "run        none is open",
        "inbox      empty",
    ):
        assert fact in told
    assert as_json | {"title": "A title", "agent": "plan", "model": "openai/gpt-4o-mini", "run": "none"} == as_json
    assert as_json["location"] == {"directory": str(connected.directory)}
    assert as_json["pending"] == []
    assert as_json["activity"] == {"state": "idle"}
    assert quick("session", "list", "--json").objects()[0]["activity"] == {"state": "idle"}


def test_an_id_of_ones_own_makes_one_session(quick: Quick) -> None:
    """Asked for again, it stays as it is, and that is said."""
    first = quick("session", "create", "--id", "ses_mine", "--title", "First")
    second = quick("session", "create", "--id", "ses_mine", "--title", "Second", "--json")

    assert (first.code, second.code) == (0, 0)
    assert second.objects()[0]["title"] == "First"
    assert second.complaint() == "session ses_mine was there already, and stays as it is"


def test_lists_are_filtered_and_come_in_pages(quick: Quick, connected: Command) -> None:
    """Search, directory, archived; a page says how the next one is got; --all gives every one."""
    other = connected.directory / "other"
    other.mkdir()
    for number in range(5):
        where = ["--directory", "other"] if number == 0 else []
        quick("session", "create", "--id", f"ses_{number}", "--title", f"Title {number}", *where)
    quick("session", "archive", "ses_4")

    def ids(*arguments: str) -> list[str]:
        return [each["id"] for each in quick("session", "list", "--json", *arguments).objects()]

    first = quick("session", "list", "--json", "--limit", "2")
    cursor = first.complaint().split("--cursor ")[1].split(",")[0]
    assert [each["id"] for each in first.objects()] == ["ses_3", "ses_2"]
    assert ids("--limit", "2", "--cursor", cursor) == ["ses_1", "ses_0"]
    assert ids("--all", "--limit", "1") == ["ses_3", "ses_2", "ses_1", "ses_0"]
    assert ids("--search", "title 2") == ["ses_2"]
    assert ids("--directory", str(other)) == ["ses_0"]
    assert ids("--archived") == ["ses_4"]
    assert quick("session", "archive", "ses_4", "--undo").out == "ses_4 is back in the list\n"
    assert ids("--archived") == []
    assert quick("session", "list", "--search", "nothing").complaint() == "no sessions that fit"
    assert quick("session", "list", "--cursor", "nope").code == 2


@pytest.mark.parametrize("name", _NAMES, ids=["quotes", "newline", "wide", "right-to-left"])
def test_any_name_is_kept_and_shown_in_one_line(quick: Quick, connected: Command, name: str) -> None:
    """Of titles and directories, also where a line has 40 columns."""
    (connected.directory / name).mkdir()
    made = quick("session", "create", "--title", name, "--directory", name, "--json")
    narrow = narrowed(quick, connected)
    listed = narrow("session", "list")

    assert made.code == 0
    assert made.objects()[0]["title"] == name
    assert made.objects()[0]["location"]["directory"] == str(connected.directory / name)
    assert len(quick("session", "list", "--directory", name, "--json").objects()) == 1
    lines = listed.out.splitlines()
    assert (listed.code, len(lines)) == (0, 3)
    assert max(cell_len(line) for line in lines) <= 40
    assert " ".join(name.split())[:8] in lines[1]


def narrowed(quick: Quick, connected: Command) -> Quick:
    """Give the command as a terminal of 40 columns has it."""
    nursery = quick.func  # type: ignore[attr-defined]
    return lambda *arguments: nursery(connected.given(COLUMNS="40"), *arguments)


def test_an_unknown_session_is_one_line_that_says_where_to_look(quick: Quick) -> None:
    """For every command, and exit code 2; so is what is no session id at all."""
    for arguments in (
        *(["show"], ["messages"], ["events"], ["events", "--follow"], ["archive"], ["delete", "--yes"], ["move"]),
        *(["prompt", "--no-resume"], ["prompt"], ["steer"], ["queue"], ["resume"], ["interrupt"]),
    ):
        text = ["hi"] if arguments[0] in {"prompt", "steer", "queue"} else ["."] if arguments[0] == "move" else []
        unknown = quick("session", arguments[0], "ses_nope", *text, *arguments[1:])
        wrong = quick("session", arguments[0], "nope", *text, *arguments[1:])

        assert (unknown.code, wrong.code) == (2, 2), arguments
        assert unknown.complaint().startswith("fencepost: no session ses_nope")
        assert "`fencepost session list`" in unknown.complaint()
        assert "'nope' is no session id" in wrong.complaint()


def test_deletion_is_asked_for(quick: Quick) -> None:
    """Where nobody can answer it needs --yes."""
    quick("session", "create", "--id", "ses_gone")
    refused = quick("session", "delete", "ses_gone")
    done = quick("session", "delete", "ses_gone", "--yes", "--json")

    assert refused.code == 2
    assert "--yes" in refused.complaint()
    assert done.objects() == [{"id": "ses_gone", "deleted": True}]
    assert quick("session", "show", "ses_gone").code == 2


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 130, 0), ("y", 0, 2)])
def test_on_a_terminal_deletion_asks(quick: Quick, connected: Command, answer: str, code: int, left: int) -> None:
    """Anything but yes leaves everything as it is."""
    quick("session", "create", "--id", "ses_asked")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fencepost.cli", "session", "delete", "ses_asked"],
        cwd=connected.directory,
        env=connected.environ(),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        asked = os.read(ours, 1000)
        os.write(ours, f"{answer}\n".encode())
        out, _ = process.communicate(timeout=50)
    os.close(ours)

    assert b"Delete ses_asked" in asked
    assert process.returncode == code
    assert out == (b"" if code else b"ses_asked is deleted\n")
    assert quick("session", "show", "ses_asked").code == left


async def test_an_open_run_is_shown_and_guards_its_session(
    quick: Quick, temporal_client: TemporalClient, task_queue: str
) -> None:
    """Also when no worker is there to say what it does: interrupt reaches the run, delete is refused."""
    quick("session", "create", "--id", f"ses_{task_queue}")
    run = await temporal_client.start_workflow("SessionTurn", {}, id=f"ses_{task_queue}", task_queue=task_queue)
    shown = quick("session", "show", f"ses_{task_queue}", "--json")
    deleted = quick("session", "delete", f"ses_{task_queue}", "--yes")
    told = quick("session", "interrupt", f"ses_{task_queue}", "--reason", "enough")
    await run.terminate()
    idle = quick("session", "interrupt", f"ses_{task_queue}", "--json")

    assert shown.objects()[0]["run"] == "open"
    assert deleted.code == 1
    assert "interrupt it, and delete it then" in deleted.complaint()
    assert (told.code, told.out) == (0, f"ses_{task_queue} was told to stop\n")
    assert idle.objects() == [{"sessionID": f"ses_{task_queue}", "interrupted": False}]
    assert "idle" in idle.complaint()
    assert quick("session", "interrupt", f"ses_{task_queue}", "--reason", "x" * 1001).code == 2


def test_reading_needs_no_temporal(quick: Quick, connected: Command) -> None:
    """`show` gives what the database knows, and says that it does not know the run; what needs Temporal ends with 3."""
    nursery = quick.func  # type: ignore[attr-defined]
    cut = connected.given(TEMPORAL_ADDRESS="127.0.0.1:9")
    quick("session", "create", "--id", "ses_alone")
    shown = nursery(cut, "session", "show", "ses_alone")

    assert shown.code == 0
    assert "status     idle" in shown.out.splitlines()
    assert "run        unknown: Temporal at 127.0.0.1:9 cannot be reached" in shown.out
    for arguments in (["list"], ["messages", "ses_alone"], ["events", "ses_alone"], ["archive", "ses_alone"]):
        assert nursery(cut, "session", *arguments).code == 0
    for arguments in (["interrupt", "ses_alone"], ["delete", "ses_alone", "--yes"], ["prompt", "ses_alone", "hi"]):
        away = nursery(cut, "session", *arguments)
        assert away.code == 3
        assert "Temporal at 127.0.0.1:9 cannot be reached" in away.complaint()


def test_a_reader_that_leaves_a_list_ends_it_quietly(quick: Quick, connected: Command) -> None:
    """As in `fencepost session list | head -1`."""
    quick("session", "create")
    with connected.started("session", "list") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        code = process.wait(timeout=50)

    assert (code, said) == (0, "")


def test_text_that_is_none_is_refused(quick: Quick, connected: Command) -> None:
    """An argument that is not UTF-8 could be stored nowhere."""
    line = [sys.executable, "-m", "fencepost.cli", "session", "create", "--title", "\udcff"]
    done = subprocess.run(line, check=False, capture_output=True, env=connected.environ(), cwd=connected.directory)

    assert done.returncode == 2
    assert done.stderr.startswith(b"fencepost: argument 4, '\\udcff', is not text in UTF-8")
