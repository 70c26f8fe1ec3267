"""`fencepost session` where workers are: turns begun, joined, steered and stopped, beside `fencepost dev` and alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.command import Command, Ended, ended, left_behind, read_until
from tests.cli.nursery import Nursery

Quick = Callable[..., Ended]

_SLOW = "delay_ms: 50\nwords: 400"


@pytest.fixture
def here(nursery: Nursery, beside: Command) -> Quick:
    """The command beside `fencepost dev`, quickly."""
    return functools.partial(nursery, beside)


def test_a_prompt_leaves_its_turn_to_the_workers(here: Quick, nursery: Nursery, beside: Command) -> None:
    """Its receipt is all; the turn can be joined, and then read as messages and events, in 40 columns too."""
    (beside.directory / "note.txt").write_text("the word is heron\n")
    session = here("session", "create").out.strip()
    sent = here("session", "prompt", session, "Read note.txt and write down what it says in WORD.md", "--json")
    joined = here("session", "resume", session, "--json")
    said = here("session", "messages", session)
    columns = beside.given(COLUMNS="40")
    narrow = {name: nursery(columns, "session", name, session) for name in ("messages", "events", "show")}

    assert (sent.code, sent.err) == (0, "")
    assert sent.objects()[0]["sessionID"] == session
    assert joined.code == 0
    assert joined.objects()[-1] | {"type": "result", "outcome": "done"} == joined.objects()[-1]
    assert said.out.startswith("> Read note.txt and write down what it says in WORD.md\n")
    assert "● read note.txt\n  └ the word is heron\n" in said.out
    assert "\x1b" not in said.out
    assert {name: (done.code, done.err) for name, done in narrow.items()} == dict.fromkeys(narrow, (0, ""))
    assert max(len(line) for line in narrow["events"].out.splitlines()) <= 40
    assert any(line.endswith("…") for line in narrow["events"].out.splitlines())


def test_a_prompt_that_waits_shows_its_turn(here: Quick) -> None:
    """As `run` does; only the newest messages, when that is asked for."""
    session = here("session", "create").out.strip()
    first = here("session", "prompt", session, "say: one", "--wait")
    failed = here("session", "queue", session, "fail: 401", "--wait")
    newest = here("session", "messages", session, "--limit", "1", "--json")
    everything = here("session", "messages", session, "--all", "--json")

    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("one\n✓ step 1 settled, stop")
    assert failed.code == 1
    assert "failed: scripted failure 401" in failed.complaint()
    assert len(newest.objects()) == 1
    assert "only the newest 1 messages" in newest.complaint()
    assert [each["type"] for each in everything.objects()] == ["user", "assistant", "user", "assistant"]


def test_a_turn_is_watched_steered_and_interrupted(here: Quick, beside: Command) -> None:
    """By other commands than the one that waits for it, which ends with 130."""
    session = here("session", "create").out.strip()
    with beside.started("session", "prompt", session, _SLOW, "--wait", "--json") as process:
        read_until(process.stdout, '"delta"')
        (shown,) = here("session", "show", session, "--json").objects()
        deleted = here("session", "delete", session, "--yes")
        steered = here("session", "steer", session, "Stop counting.")
        (waiting,) = here("session", "show", session, "--json").objects()
        told = here("session", "interrupt", session, "--reason", "enough")
        done = ended(process)

    assert (shown["run"], shown["status"]["phase"]) == ("open", "busy")
    assert deleted.code == 1
    assert "(steer)" in steered.out
    assert [each["prompt"]["text"] for each in waiting["pending"]] == ["Stop counting."]
    assert told.code == 0
    assert done.code == 130
    assert done.objects()[-1]["outcome"] == "interrupted"


def test_run_takes_files_and_goes_on_with_the_newest_session(here: Quick, beside: Command) -> None:
    """Of the directory it is called in. Where there is none, that is said."""
    (beside.directory / "note.txt").write_text("heron\n")
    none = here("run", "--continue", "hi")
    first = here("run", "--file", "note.txt", "--json", "say: one")
    here("session", "create", "--directory", "/")
    second = here("run", "--continue", "--json", "say: two")
    both = here("run", "--continue", "--session", "ses_x", "hi")
    session = first.objects()[-1]["sessionID"]

    assert none.code == 2
    assert f"there is no session of {beside.directory}" in none.complaint()
    assert second.objects()[-1]["sessionID"] == session
    assert both.code == 2
    assert "--session and --continue" in both.complaint()
    assert "  + note.txt (text/plain)\n" in here("session", "messages", session).out


def test_a_large_file_goes_along_with_a_new_session(here: Quick, beside: Command) -> None:
    """More than Temporal takes: such input goes into the database itself."""
    (beside.directory / "large.bin").write_bytes(bytes(2_000_000))
    done = here("run", "--file", "large.bin", "--json", "say: large")

    assert (done.code, done.objects()[-1]["outcome"]) == (0, "done")


def test_what_a_session_keeps_is_refused_at_once(quick: Quick) -> None:
    """Before anybody waits for a worker: there is none here."""
    quick("session", "create", "--id", "ses_kept", "--agent", "plan", "--model", "openai/gpt-4o-mini")
    for option, value, words in (
        ("--model", "openai/other", "--model is for a new session: ses_kept runs with openai/gpt-4o-mini"),
        ("--agent", "build", "--agent is for a new session: ses_kept runs with agent plan"),
        ("--model", "nope", "write it as provider/model"),
        ("--model", "scripted/demo", "is there on this machine's own services only"),
    ):
        done = quick("run", "--session", "ses_kept", option, value, "hi")
        assert done.code == 2
        assert words in done.complaint()


def test_every_failed_attempt_is_told(nursery: Nursery, beside: Command) -> None:
    """Of a provider that cannot be reached, from the first one on."""
    own = Command(beside.home, beside.directory, {"FENCEPOST_LIMITS__MAX_PROVIDER_ATTEMPTS": "4"})
    done = nursery(own, "run", "--model", "local/x", "--base-url", "http://127.0.0.1:9/v1", "hi")

    assert done.code == 1
    assert [line for line in done.err.splitlines() if line.startswith("attempt")][:2] == [
        "attempt 1 at the provider failed: attempt 2 is on its way",
        "attempt 2 at the provider failed: attempt 3 is on its way",
    ]


def test_two_at_once_beside_dev(here: Quick, beside: Command) -> None:
    """Each has its session and its answer."""
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda text: beside("run", f"say: {text}"), ["one", "two"]))

    assert [(each.code, each.out.splitlines()[0]) for each in done] == [(0, "one"), (0, "two")]
    assert here("session", "list", "--directory", ".").out.count("ses_") == 2


@pytest.mark.timeout(120)
def test_without_dev_a_prompt_stays_until_its_turn_has_ended(nursery: Nursery, alone: Command) -> None:
    """Its worker would go with it. Two such commands at once share what is there, and nothing stays behind."""
    sessions = [nursery(alone, "session", "create", "--model", "scripted/demo").out.strip() for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        commands = ["session", "prompt"], ["run", "--session"]
        words = list(zip(commands, sessions, ("say: one", "say: two"), strict=True))
        sent, ran = pool.map(lambda each: alone(*each[0], *each[1:]), words)
    assert (sent.code, ran.code) == (0, 0), (sent, ran)
    said = [nursery(alone, "session", "messages", session).out.splitlines()[1] for session in sessions]

    assert sent.out.endswith("(steer)\n")
    assert "staying until the turn has ended" in sent.err
    assert "not so beside" not in sent.err
    assert ran.out.startswith("two\n")
    assert said == ["one", "two"]
    assert left_behind(alone.home) == []
