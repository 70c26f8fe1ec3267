"""`fencepost doctor`: what is right is said to be right, and what is wrong is named with its mend."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy.engine import make_url
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client

from fencepost.cli import service_checks
from fencepost.cli.findings import Check
from fencepost.config import Settings
from fencepost.store.migrate import wanted_version
from tests.cli.command import Command, Ended
from tests.cli.nursery import Nursery
from tests.cli.pooler import pooled

_NOBODY = "127.0.0.1:9"
_OPENAI_AWAY = {"FENCEPOST_PROVIDERS__OPENAI__BASE_URL": f"http://{_NOBODY}/v1"}
"""For tests whose default model is the usual one: nothing outside this machine is asked, or waited for."""


def _configured(tmp_path: Path, scripted_url: str, text: str = "") -> str:
    file = tmp_path / "named.toml"
    file.write_text(
        f'default_model = "scripted/test"\n{text}\n[providers.scripted]\nbase_url = "{scripted_url}"\n', "utf-8"
    )
    return str(file)


def _checks(done: Ended) -> dict[str, dict[str, Any]]:
    found = json.loads(done.out)["checks"]
    assert {tuple(each) for each in found} == {("name", "status", "detail", "mend")}
    for each in found:
        assert (each["mend"] is None) == (each["status"] == "ok"), each
    return {each["name"]: each for each in found}


def _named(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_a_first_look_finds_nothing_wrong_and_starts_nothing(
    nursery: Nursery, alone: Command, scripted_url: str, tmp_path: Path
) -> None:
    """Servers of local mode that do not run are no error: the commands start them."""
    done = nursery(alone, "doctor", "--json", "--config", _configured(tmp_path, scripted_url))

    checks = _checks(done)
    assert (done.code, done.err) == (0, "")
    assert {each["status"] for each in checks.values()} == {"ok"}
    for name in ("postgresql", "temporal"):
        assert checks[name]["detail"] == "not running: `fencepost run` and `fencepost dev` start it"
    assert checks["mode"]["detail"].startswith("local")
    assert list(alone.home.iterdir()) == []


def test_what_runs_is_said_with_its_version(beside: Command) -> None:
    """Beside `fencepost dev`, everything is there."""
    done = beside("doctor")

    lines = done.out.splitlines()
    assert done.code == 0, done.out
    assert lines[-1] == "everything is as it should be"
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
    for words in (
        "PostgreSQL 18.",
        f"at migration {wanted_version()}",
        "LISTEN and NOTIFY work",
        "Temporal 1.",
        "FencepostAgent",
        "on task queue fencepost",
        "fencepost dev (process",
        "scripted answers at http://127.0.0.1:",
    ):
        assert words in done.out


def test_forty_columns_are_enough(nursery: Nursery, alone: Command) -> None:
    """Nothing is cut off but a word that is longer than the line."""
    done = nursery(alone.given(COLUMNS="40", **_OPENAI_AWAY), "doctor")

    assert {len(line) <= 40 for line in done.out.splitlines()} == {True}
    assert "OPENAI_API_KEY is not set" in " ".join(done.out.split())
    assert "\x1b" not in done.out


def test_a_missing_key_is_wrong_and_one_that_is_there_is_not_shown(nursery: Nursery, alone: Command) -> None:
    """Only the variable's name."""
    away = alone.given(**_OPENAI_AWAY)
    missing = _checks(nursery(away, "doctor", "--json"))["model"]
    assert missing["status"] == "wrong"
    assert missing["mend"] == "export OPENAI_API_KEY=... before a worker is started"

    there = nursery(away.given(OPENAI_API_KEY="do-not-show"), "doctor", "--json")
    assert _checks(there)["model"]["status"] == "ok"
    assert "do-not-show" not in there.out + there.err


def test_a_model_that_is_not_there_is_wrong(
    nursery: Nursery, alone: Command, scripted_url: str, tmp_path: Path
) -> None:
    """The default one, and that of any other agent."""
    file = tmp_path / "fencepost.toml"
    file.write_text(
        f'default_model = "local/tiny"\n[providers.local]\nbase_url = "{scripted_url}"\nany_model = false\n'
        '[providers.local.models.small]\n[agents.other]\nmodel = "local/smal"\n'
    )
    done = nursery(alone, "doctor", "--json")

    checks = _checks(done)
    assert done.code == 1
    assert "has no model 'tiny'" in checks["model"]["detail"]
    assert "Did you mean 'small'" in checks["agent other"]["detail"]


def test_a_wrong_configuration_is_a_finding(nursery: Nursery, alone: Command, tmp_path: Path) -> None:
    """It is what everything else depends on, so nothing else is looked at."""
    (tmp_path / "fencepost.toml").write_text("[limits]\nlease_second = 3\n")
    done = nursery(alone, "doctor", "--json")

    checks = _checks(done)
    assert done.code == 1
    assert list(checks) == ["program", "configuration"]
    assert "limits.lease_second: there is no such key; did you mean lease_seconds?" in checks["configuration"]["detail"]


def test_one_service_without_the_other_is_wrong(
    nursery: Nursery, alone: Command, scripted_url: str, tmp_path: Path
) -> None:
    """As `run` says, with the mend."""
    file = _configured(tmp_path, scripted_url)
    done = nursery(alone.given(TEMPORAL_ADDRESS=_NOBODY), "doctor", "--json", "--config", file)

    check = _checks(done)["mode"]
    assert (done.code, check["status"]) == (1, "wrong")
    assert check["mend"].startswith("set FENCEPOST_DATABASE_URL too")


def test_services_that_are_away_are_named(
    nursery: Nursery, connected: Command, scripted_url: str, tmp_path: Path
) -> None:
    """Exit code 3, and no password."""
    variables = {
        "FENCEPOST_DATABASE_URL": f"postgresql://u:hush@{_NOBODY}/x",
        "TEMPORAL_ADDRESS": _NOBODY,
        "FENCEPOST_CONFIG": _configured(tmp_path, f"http://{_NOBODY}"),
    }
    away = nursery(connected.given(**variables), "doctor", "--json")

    checks = _checks(away)
    assert away.code == 3
    assert f"PostgreSQL at {_NOBODY}/x cannot be used" in checks["postgresql"]["detail"]
    assert "check that it runs" in checks["postgresql"]["mend"]
    assert f"Temporal at {_NOBODY} cannot be reached" in checks["temporal"]["detail"]
    assert "TEMPORAL_ADDRESS" in checks["temporal"]["mend"]
    assert checks["provider"]["status"] == "warning"  # workers elsewhere may reach it
    assert "schema" not in checks
    assert "hush" not in away.out + away.err


def test_services_that_never_answer_take_bounded_time(nursery: Nursery, connected: Command, tmp_path: Path) -> None:
    """All at once, each with its time-out."""
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
        silent = connected.given(
            FENCEPOST_DATABASE_URL=f"postgresql://u@127.0.0.1:{ports[0]}/x",
            TEMPORAL_ADDRESS=f"127.0.0.1:{ports[1]}",
            FENCEPOST_CONFIG=_configured(tmp_path, f"http://127.0.0.1:{ports[2]}"),
        )
        begun = time.monotonic()
        done = nursery(silent, "doctor", "--json")
        took = time.monotonic() - begun

    checks = _checks(done)
    assert done.code == 3
    assert [checks[name]["status"] for name in ("postgresql", "temporal", "provider")] == ["wrong", "wrong", "warning"]
    assert took < 20


def test_without_a_worker_nothing_would_happen(
    quick: Callable[..., Ended], connected: Command, scripted_url: str, tmp_path: Path
) -> None:
    """Beside configured services a worker has to be there already; its workspace's too."""
    file = _configured(tmp_path, scripted_url, '[workspace]\nid = "here"')
    done = quick("doctor", "--json", "--config", file)

    checks, queue = _checks(done), connected.variables["FENCEPOST_TASK_QUEUE"]
    assert done.code == 3
    assert checks["workers"]["detail"] == f"no worker serves task queue {queue}"
    assert checks["workspace workers"]["detail"] == f"no worker serves task queue {queue}-workspace-here"
    assert checks["workers"]["mend"] == "start one with `python -m worker`"
    wrong = [name for name, check in checks.items() if check["status"] == "wrong"]
    assert wrong == ["workers", "workspace workers"]


@pytest.mark.parametrize(
    ("statements", "words", "mend"),
    [
        ((), "as it should be", None),
        (("UPDATE fencepost_version SET version_num = '9999'",), "does not know", "install the newer fencepost"),
        (("DROP TABLE fencepost_version",), "no migration is recorded", "restore the database whole"),
        (("DELETE FROM fencepost_version",), "no migration is recorded", "restore the database whole"),
        (("INSERT INTO fencepost_version VALUES ('0000')",), "several migrations at once: 0000, ", "delete all rows"),
        (("DROP TABLE live_part",), "half of it: live_part missing", "restore the database whole"),
        (("ALTER TABLE session DROP COLUMN title CASCADE",), "half of it: session.title missing", "restore"),
        (
            ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'todo_session_idx'::regclass",),
            "not made to its end: todo_session_idx",
            "REINDEX INDEX todo_session_idx",
        ),
    ],
)
async def test_a_schema_that_is_not_whole_is_named(
    database_url: str, statements: tuple[str, ...], words: str, mend: str | None
) -> None:
    """Ahead, without a record, half migrated, half restored."""
    await _execute(database_url, *statements)

    check = _named(await service_checks.postgresql(database_url))["schema"]

    assert words in check.detail
    assert check.status == ("ok" if mend is None else "wrong")
    assert mend is None or (check.mend is not None and mend in check.mend)


async def test_an_empty_database_is_behind(empty_database_url: str) -> None:
    """With the command that mends it."""
    check = _named(await service_checks.postgresql(empty_database_url))["schema"]

    assert (check.status, check.mend) == ("wrong", "run `fencepost db upgrade`")


async def test_a_read_only_database_is_wrong(database_url: str) -> None:
    """A replica is one too."""
    name = database_url.rpartition("/")[2].partition("?")[0]
    await _execute(database_url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")

    assert _named(await service_checks.postgresql(database_url))["writing"].status == "wrong"


async def test_a_user_without_rights_is_named(database_url: str) -> None:
    """In one line, with neither the statement nor the password."""
    role = f"nobody_{secrets.token_hex(4)}"
    await _execute(database_url, f"CREATE ROLE {role} LOGIN PASSWORD 'hush'")
    try:
        url = make_url(database_url).set(username=role, password="hush")
        (check,) = await service_checks.postgresql(url.render_as_string(hide_password=False))
    finally:
        await _execute(database_url, f"DROP ROLE {role}")

    assert check.detail == "the database cannot be read (permission denied for table fencepost_version)"
    assert "check the rights of the user" in (check.mend or "")


async def test_a_pooler_that_loses_notifications_is_named(database_url: str) -> None:
    """Everything else works through it, so this is seen only by trying."""
    async with pooled(database_url) as address:
        behind = _named(await service_checks.postgresql(address))
    direct = _named(await service_checks.postgresql(database_url))

    assert {name: check.status for name, check in behind.items()} == {
        "postgresql": "ok",
        "schema": "ok",
        "notifications": "wrong",
    }
    assert "session pooling" in (behind["notifications"].mend or "")
    assert direct["notifications"].status == "ok"


@pytest.mark.parametrize(("major", "status"), [(13, "wrong"), (17, "warning"), (18, "ok"), (19, "ok")])
def test_an_old_postgresql_is_a_finding(major: int, status: str) -> None:
    """One that nobody mends any more is wrong."""
    (check,) = service_checks.version_check(f"{major}.1", major, "here")

    assert check.status == status
    assert f"PostgreSQL {major}.1 at here" in check.detail


async def test_a_namespace_that_is_not_there_is_wrong(temporal_address: str, task_queue: str) -> None:
    """What comes after it is left out."""
    environ = {"TEMPORAL_ADDRESS": temporal_address, "TEMPORAL_NAMESPACE": "nowhere"}
    found = await service_checks.temporal(Settings(task_queue=task_queue), environ, served_here=True)

    assert [(check.name, check.status) for check in found] == [("temporal", "ok"), ("namespace", "wrong")]
    assert "temporal operator namespace create --namespace nowhere" in (found[1].mend or "")


async def test_search_attributes_that_are_not_registered_are_a_warning(
    temporal_address: str, temporal_client: Client, task_queue: str
) -> None:
    """A new namespace has none; sessions work all the same."""
    namespace = f"fresh-{secrets.token_hex(4)}"
    await temporal_client.workflow_service.register_namespace(
        RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period=Duration(seconds=86_400))
    )
    environ = {"TEMPORAL_ADDRESS": temporal_address, "TEMPORAL_NAMESPACE": namespace}
    settings = Settings(task_queue=task_queue)

    found = _named(await service_checks.temporal(settings, environ, served_here=True))

    check = found["search attributes"]
    assert check.status == "warning"
    assert "FencepostAgent, FencepostModel" in check.detail
    assert f"--namespace {namespace} --name FencepostAgent --type Keyword" in (check.mend or "")


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A directory that nobody can make, root neither: a file is in its place."""
    file = tmp_path / "file"
    file.touch()
    return file / "inner"


def test_directories_that_cannot_be_used_are_wrong(
    nursery: Nursery, alone: Command, scripted_url: str, tmp_path: Path, blocked: Path
) -> None:
    """The home, the workspace, and where tool output goes."""
    text = f'[workspace]\ndirectory = "{blocked}"\n[tool_output]\ndirectory = "{blocked}"'
    file = _configured(tmp_path, scripted_url, text)
    done = nursery(alone.given(FENCEPOST_HOME=str(blocked)), "doctor", "--json", "--config", file)

    checks = _checks(done)
    assert done.code == 1
    assert checks["workspace"]["detail"] == f"{blocked} is not a directory"
    for name, setting in (("tool output", "tool_output.directory"), ("home", "FENCEPOST_HOME")):
        assert checks[name]["detail"] == f"{blocked} cannot be written ({blocked.parent} is a file)"
        assert f"set {setting} to another directory" in checks[name]["mend"]


def test_a_full_disk_is_wrong(alone: Command, scripted_url: str, tmp_path: Path) -> None:
    """Found by writing: here a limit of the process stands for the disk's end."""
    (tmp_path / "work").mkdir()
    file = _configured(tmp_path, scripted_url, f'[workspace]\ndirectory = "{tmp_path / "work"}"')
    line = shlex.join([sys.executable, "-m", "fencepost.cli", "doctor", "--json", "--config", file])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -f 0; exec {line}"],
        env=alone.environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )

    checks = _checks(Ended(done.returncode, done.stdout, done.stderr))
    assert done.returncode == 1
    wrong = {name: check["detail"] for name, check in checks.items() if check["status"] == "wrong"}
    assert wrong.keys() == {"home", "tool output", "workspace"}
    assert {"cannot be written (File too large)" in detail for detail in wrong.values()} == {True}
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as somebody else")
def test_a_home_that_postgresql_cannot_enter_is_wrong(
    nursery: Nursery, alone: Command, scripted_url: str, tmp_path: Path
) -> None:
    """Before a command fails because of it."""
    closed = alone.home / "closed"
    closed.mkdir(mode=0o700)
    file = _configured(tmp_path, scripted_url)
    done = nursery(alone.given(FENCEPOST_HOME=str(closed)), "doctor", "--json", "--config", file)

    assert _checks(done)["home"]["mend"].startswith("set FENCEPOST_HOME to a directory outside any home")


def test_its_help_says_its_exit_codes(alone: Command) -> None:
    """For whoever runs it in a script."""
    done = alone("doctor", "--help")

    assert "3 a service, a worker or the model's provider cannot be reached" in " ".join(done.out.split())


async def _execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url.replace("+asyncpg", "", 1))
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()
