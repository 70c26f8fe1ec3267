"""Whatever is wrong: one line that says what to do, the right exit code, no traceback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from fencepost.store.migrate import wanted_version
from tests.cli.command import Command, Ended, ended, read_until
from tests.cli.nursery import Nursery

_NOBODY = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "hi"], "needs a key: set OPENAI_API_KEY"),
        (["run", "--model", "nope/x", "hi"], "no provider 'nope': there are openai, scripted, and --base-url or"),
        (["run", "--model", "opnai/x", "hi"], "no provider 'opnai' (did you mean openai?)"),
        (["run", "--model", "nope/x", "--session", "ses_x", "hi"], "no provider 'nope'"),
        (["run", "--session", "ses_x", "--continue", "hi"], "so give one of them"),
        (["run", "--session", "ses_x", "--directory", ".", "hi"], "--directory is for a new session"),
        (["run", "--file", "/no/such/file", "hi"], "cannot be read: No such file or directory"),
        (["session", "create", "--model", "nope/x"], "no provider 'nope'"),
        (["session", "create", "--agent", "bild"], "did you mean build?"),
        (["session", "create", "--id", "mine"], "--id: 'mine' is no session id"),
        (["session", "list", "--limit", "0"], "Invalid value for '--limit'"),
        (["session", "events", "ses_x", "--after", "-2"], "Invalid value for '--after'"),
        (["session", "events", "ses_x", "--after", "x"], "'--after': must be a whole number, not 'x'"),
        (["session", "nope"], "No such command"),
        (["run", "--model", "nope", "hi"], "write it as provider/model"),
        (["run", "--agent", "bild", "hi"], "did you mean build?"),
        (["run", "--session", "nope", "hi"], "is no session id"),
        (["run", "--directory", "/no/such/place", "hi"], "is not a directory: create it first"),
        (["run", "--base-url", "here", "hi"], "must start with http:// or https://"),
        (["run", "  "], "no prompt"),
        (["run", "--bogus"], "No such option: --bogus (see `fencepost run --help`)"),
        (["run"], "Missing argument"),
        (["nope"], "No such command"),
        (["--config", "/no/such/file", "run", "hi"], "there is no such file"),
        (["run", "--config", "/no/such/file", "hi"], "there is no such file"),
    ],
)
def test_bad_input_is_one_line(nursery: Nursery, alone: Command, arguments: list[str], words: str) -> None:
    """Found before anything is started, so that it is known at once."""
    done = nursery(alone, *arguments)

    assert done.code == 2
    assert words in done.complaint()
    assert done.out == ""
    assert not (alone.home / "stack.json").exists()


def test_services_that_are_away_are_named(nursery: Nursery, connected: Command) -> None:
    """At start there is nothing to wait for: exit code 3."""
    away = nursery(connected.given(FENCEPOST_DATABASE_URL=f"postgresql://u:secret@{_NOBODY}/x"), "run", "hi")
    assert away.code == 3
    assert f"PostgreSQL at {_NOBODY}/x cannot be used" in away.complaint()
    assert "secret" not in away.err

    away = nursery(connected.given(TEMPORAL_ADDRESS=_NOBODY), "run", "hi")
    assert away.code == 3
    assert f"Temporal at {_NOBODY} cannot be reached" in away.complaint()


def test_a_model_of_local_mode_is_refused_elsewhere(quick: Callable[..., Ended]) -> None:
    """At once: no worker elsewhere could have it, and none is waited for."""
    done = quick("run", "--model", "scripted/demo", "hi")

    assert done.code == 2
    assert "model scripted/demo is there on this machine's own services only" in done.complaint()


def test_a_missing_worker_is_named(quick: Callable[..., Ended], connected: Command) -> None:
    """Nothing is sent that nobody would take."""
    done = quick("run", "hi")

    assert done.code == 3
    queue = connected.variables["FENCEPOST_TASK_QUEUE"]
    assert done.err.splitlines()[-1] == (
        f"fencepost: no worker serves task queue {queue}: start one with `python -m worker`"
    )


def test_a_worker_that_cannot_start_says_why_as_a_command_does(connected: Command) -> None:
    """2 for its configuration, 3 for a service."""
    wrong = {"FENCEPOST_LIMITS__MAX_CONTINUATIONS": "many"}
    for variables, code, words in (
        (wrong, 2, "FENCEPOST_LIMITS__MAX_CONTINUATIONS: must be a whole number, not 'many'"),
        ({"TEMPORAL_ADDRESS": _NOBODY}, 3, f"Temporal at {_NOBODY} cannot be reached"),
    ):
        line = [sys.executable, "-P", "-m", "worker"]
        environ = connected.given(**variables).environ()
        done = subprocess.run(line, check=False, capture_output=True, text=True, env=environ, cwd=connected.directory)
        assert done.returncode == code
        assert words in done.stderr


def test_an_interrupt_during_the_start_says_that_nothing_was_sent(alone: Command) -> None:
    """What is started is told, although standard error is no terminal."""
    with alone.started("run", "--model", "scripted/demo", "hi") as process:
        read_until(process.stderr, "starting PostgreSQL")
        process.send_signal(signal.SIGINT)
        done = ended(process)

    assert done.code == 130
    assert "interrupted before anything was sent" in done.err
    assert done.out == ""


def test_one_service_without_the_other_is_refused(nursery: Nursery, alone: Command) -> None:
    """A session's state would be in two places that live and die separately."""
    done = nursery(alone.given(TEMPORAL_ADDRESS=_NOBODY), "run", "hi")

    assert done.code == 2
    assert "set FENCEPOST_DATABASE_URL too" in done.complaint()


def test_another_migration_is_named_and_upgraded(nursery: Nursery, connected: Command, empty_database_url: str) -> None:
    """`db check` and `run` say what to do, and `db upgrade` does it."""
    empty = connected.given(FENCEPOST_DATABASE_URL=empty_database_url)
    for arguments in (["db", "check"], ["run", "hi"]):
        done = nursery(empty, *arguments)
        assert done.code == 2
        assert "run `fencepost db upgrade`" in done.complaint()

    upgraded = [nursery(empty, "db", "upgrade"), nursery(empty, "db", "check")]
    assert [each.code for each in upgraded] == [0, 0]
    assert {wanted_version() in each.out for each in upgraded} == {True}


def test_a_port_in_use_is_named(alone: Command) -> None:
    """One that was asked for; others are replaced by a free one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = alone("dev", "--port", str(port))

    assert done.code == 2
    assert f"port {port} for Temporal is in use" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_debug_shows_where(alone: Command) -> None:
    """Only then, and wherever the option stands."""
    for arguments in (["--debug", "run", "--model", "nope", "hi"], ["run", "--debug", "--model", "nope", "hi"]):
        done = alone(*arguments)
        assert done.code == 2
        assert "Traceback" in done.err


def test_version_and_help(alone: Command) -> None:
    """Both are data, and cost little: nothing but the command line is imported."""
    version, help_text, bare = alone("--version"), alone("run", "--help"), alone()

    assert (version.code, help_text.code, bare.code) == (0, 0, 0)
    assert version.out.startswith("fencepost ")
    assert "--session" in help_text.out
    assert "130 interrupted" in " ".join(bare.out.split())
    code = (
        "import sys; import fencepost.cli.app; print(sorted({'temporalio', 'sqlalchemy', 'httpx2'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"
