"""What is said to a session: recorded once, refused in one line, read back as events and messages."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from fencepost.local.postgres import PostgresServer
from tests.cli.command import Command, Ended, ended, left_behind, read_until
from tests.cli.nursery import Nursery

Quick = Callable[..., Ended]

_MEGABYTE = 1_000_000


@pytest.fixture
def session(quick: Quick) -> str:
    """A session that nothing was said to."""
    return quick("session", "create").out.strip()


def test_recorded_input_has_a_receipt_and_waits(quick: Quick, session: str) -> None:
    """No worker is needed, and the same id with the same words counts once."""
    told = ("session", "prompt", session, "Hello\nthere", "--no-resume", "--id", "msg_1", "--delivery", "queue")
    first, again = quick(*told), quick(*told, "--json")
    shown, events = quick("session", "show", session), quick("session", "events", session, "--json")

    assert (first.code, first.out) == (0, "msg_1: recorded at 1 (queue)\n")
    assert "it is seen with the session's next input" in first.complaint()
    assert again.objects()[0] | {"id": "msg_1", "admittedSeq": 1, "delivery": "queue"} == again.objects()[0]
    assert "inbox      1 waiting\n  queue msg_1  Hello there\n" in shown.out
    log = [(0, "session.created.1"), (1, "session.next.prompt.admitted.1")]
    assert [(each["seq"], each["type"]) for each in events.objects()] == log
    assert [each["seq"] for each in quick("session", "events", session, "--after", "0", "--json").objects()] == [1]
    assert quick("session", "events", session, "--after", "1").out == ""


def test_an_id_that_stands_for_something_else_is_refused(quick: Quick, session: str) -> None:
    """Other words, and input of another session, which the message names."""
    other = quick("session", "create").out.strip()
    quick("session", "prompt", session, "Hello", "--no-resume", "--id", "msg_1")
    changed = quick("session", "prompt", session, "Goodbye", "--no-resume", "--id", "msg_1")
    elsewhere = quick("session", "prompt", other, "Hello", "--no-resume", "--id", "msg_1")

    assert (changed.code, elsewhere.code) == (2, 2)
    assert "msg_1 stands for something else than this prompt" in changed.complaint()
    assert f"msg_1 belongs to another session, {session}" in elsewhere.complaint()


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ([""], "", "no prompt: it is empty"),
        (["-"], " \n", "no prompt: standard input held none"),
        (["hi", "--id", "nope"], "", "--id: 'nope' is no input id"),
        (["hi", "--wait"], "", "--wait and --no-resume"),
        (["hi", "--file", "missing.txt"], "", "--file: missing.txt cannot be read: No such file or directory"),
        (["hi", "--file", "."], "", "is a directory: name it in the prompt"),
        (["hi", "--delivery", "later"], "", "'later' is not one of"),
        (["-"], "x" * (_MEGABYTE + 1), "is 1000001 bytes, more than 1000000: attach a file instead, with --file PATH"),
    ],
    ids=["empty", "blank", "bad-id", "wait", "no-file", "directory", "delivery", "too-long"],
)
def test_input_that_cannot_be_taken_is_one_line(
    quick: Quick, session: str, arguments: list[str], stdin: str, words: str
) -> None:
    """Exit code 2, and nothing is recorded."""
    done = quick("session", "prompt", session, "--no-resume", *arguments, stdin=stdin)

    assert done.code == 2
    assert words in done.complaint()
    assert len(quick("session", "events", session).out.splitlines()) == 1  # its creation


def test_a_prompt_of_a_megabyte_and_files_are_recorded(quick: Quick, connected: Command, session: str) -> None:
    """The text as it was, each file with its content and what it is; what is too large is named."""
    (connected.directory / "note with 'quotes'.md").write_text("# héron\n", encoding="utf-8")
    (connected.directory / "LICENSE").write_text("plain text without an extension\n")
    with (connected.directory / "large.bin").open("wb") as large:
        large.truncate(15_000_001)
    files = ["--file", "note with 'quotes'.md", "--file", "LICENSE"]
    done = quick("session", "prompt", session, "-", "--no-resume", *files, "--json", stdin="x" * _MEGABYTE)
    refused = quick("session", "prompt", session, "hi", "--no-resume", "--file", "large.bin")

    prompt = done.objects()[0]["prompt"]
    assert len(prompt["text"]) == _MEGABYTE
    assert [(each["name"], each["mime"]) for each in prompt["files"]] == [
        ("note with 'quotes'.md", "text/markdown"),
        ("LICENSE", "text/plain"),
    ]
    assert prompt["files"][0]["uri"] == "data:text/markdown;base64,IyBow6lyb24K"
    assert refused.code == 2
    assert "put the files into the session's directory, and name them" in refused.complaint()


def test_events_are_followed_until_ctrl_c(quick: Quick, connected: Command, session: str) -> None:
    """What was there, then what comes; nothing but events is written."""
    quick("session", "prompt", session, "One", "--no-resume")
    with connected.started("session", "events", session, "--follow", "--json") as process:
        read_until(process.stdout, '"One"')
        quick("session", "prompt", session, "Two", "--no-resume")
        read_until(process.stdout, '"Two"')
        process.send_signal(signal.SIGINT)
        done = ended(process)

    assert (done.code, done.out, done.err) == (130, "", "")


def test_following_ends_when_nobody_reads(quick: Quick, connected: Command, session: str) -> None:
    """Also in a session where nothing happens any more."""
    quick("session", "prompt", session, "One", "--no-resume")
    with connected.started("session", "events", session, "--follow") as process:
        assert "prompt.admitted  One" in read_until(process.stdout, "One")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        code = process.wait(timeout=50)

    assert (code, said) == (0, "")


@pytest.mark.timeout(90)
def test_following_outlives_a_database_that_dies(nursery: Nursery, alone: Command) -> None:
    """On this machine's own PostgreSQL, which is started again, without Temporal; no event is missed or shown twice."""
    session = nursery(alone, "session", "create").out.strip()
    with alone.started("session", "events", session, "--follow", "--json") as process:
        nursery(alone, "session", "prompt", session, "One", "--no-resume")
        read_until(process.stdout, '"One"')
        pid = PostgresServer(alone.home).pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert "waiting for it" in read_until(process.stderr, "waiting for it")
        read_until(process.stderr, "PostgreSQL is back")
        nursery(alone, "session", "prompt", session, "Two", "--no-resume")
        after = read_until(process.stdout, '"Two"')
        process.send_signal(signal.SIGINT)
        done = ended(process)

    assert [json.loads(line)["seq"] for line in after.splitlines()] == [2]
    assert done.code == 130
    assert left_behind(alone.home) == []
