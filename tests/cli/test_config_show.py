"""`fencepost config show`: what is in force, where it comes from, and nothing that is secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost.config import Settings
from tests.cli.command import Command, Ended

_FILE = (
    'default_model = "local/x"\n[limits]\nlease_seconds = 30\n'
    '[providers.local]\nbase_url = "https://me:hush@example/v1?api_key=hush"\nheaders = { "X-Auth" = "hush" }\n'
    '[providers.local.models."y.z".options]\nuser = "hush"\n'
    '[[permissions]]\naction = "bash"\neffect = "deny"\n'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration file where the command finds it by itself."""
    path = tmp_path / "fencepost.toml"
    path.write_text(_FILE)
    return path


def _settings(done: Ended) -> dict[str, dict[str, Any]]:
    assert (done.code, done.err) == (0, "")
    rows = json.loads(done.out)["settings"]
    assert {tuple(row) for row in rows} == {("key", "value", "source", "where")}
    return {row.pop("key"): row for row in rows}


def test_every_setting_says_where_it_comes_from(alone: Command, file: Path) -> None:
    """Default, file, variable: its own, or one that holds a whole table."""
    done = alone.given(
        FENCEPOST_LIMITS__RENEW_SECONDS="4",
        FENCEPOST_WORKER='{"database_pool_size": 7}',
        TEMPORAL_NAMESPACE="mine",
    )("config", "show", "--json")

    shown = _settings(done)
    assert json.loads(done.out)["file"] == str(file)
    assert shown["limits.lease_seconds"] == {"value": 30, "source": "file", "where": str(file)}
    variable = "FENCEPOST_LIMITS__RENEW_SECONDS"
    assert shown["limits.renew_seconds"] == {"value": 4, "source": "environment", "where": variable}
    pool = {"value": 7, "source": "environment", "where": "FENCEPOST_WORKER"}
    assert shown["worker.database_pool_size"] == pool
    assert shown["limits.heartbeat_seconds"] == {"value": 0.5, "source": "default", "where": None}
    assert shown["home"] == {"value": str(alone.home), "source": "environment", "where": "FENCEPOST_HOME"}
    assert shown["temporal.namespace"] == {"value": "mine", "source": "environment", "where": "TEMPORAL_NAMESPACE"}
    assert shown["providers.openai.api_key_env"]["value"] == "OPENAI_API_KEY"
    rules = [row["source"] for key, row in shown.items() if key.startswith("permissions[")]
    assert rules == ["default"] * (len(rules) - 1) + ["file"]
    assert {key.split(".")[0].split("[")[0] for key in shown} == {*Settings.model_fields, "temporal"}


def test_secrets_are_withheld(alone: Command, file: Path) -> None:
    """In both forms: passwords in addresses, and tables that may hold a key."""
    given = alone.given(
        FENCEPOST_DATABASE_URL="postgres://u:hush@h:5/d?password=hush&sslmode=require",
        TEMPORAL_ADDRESS="t:1",
        TEMPORAL_API_KEY="hush",
        OPENAI_API_KEY="hush",
    )
    as_json, human = given("config", "show", "--json"), given("config", "show")

    shown = _settings(as_json)
    assert shown["database_url"]["value"] == "postgresql+asyncpg://u:***@h:5/d?password=***&ssl=require"
    assert shown["providers.local.base_url"]["value"] == "https://me:***@example/v1?api_key=***"
    assert shown["providers.local.headers.X-Auth"]["value"] == "***"
    assert shown['providers.local.models."y.z".options.user']["value"] == "***"
    assert "hush" not in as_json.out + human.out + human.err


def test_people_read_a_line_for_each(alone: Command, file: Path) -> None:
    """The source stands behind the value, or below it where there is no room. A file of --config is told apart."""
    wide = alone("config", "show", "--config", str(file)).out.splitlines()
    narrow = alone.given(COLUMNS="40")("config", "show").out.splitlines()

    assert f"limits.lease_seconds = 30.0  # --config {file}" in wide
    assert "database_url = not set  # default" in wide
    at = narrow.index("limits.lease_seconds = 30.0")
    assert narrow[at + 1] == f"    # {file}"
    assert "mixed = false  # default" in narrow


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('defalt_model = "x/y"', "defalt_model: there is no such key; did you mean default_model?"),
        ("lease_seconds = 3", "lease_seconds: there is no such key; did you mean limits.lease_seconds?"),
        ("[tool_outputs]\ndays = 3", "tool_outputs: there is no such key; did you mean tool_output?"),
        ("[providers.openai.models.x]\ncontex = 3", "providers.openai.models.x.contex: there is no such key; did you"),
    ],
)
def test_an_unknown_key_is_one_line(alone: Command, tmp_path: Path, text: str, words: str) -> None:
    """It names the key and the one that is meant."""
    (tmp_path / "fencepost.toml").write_text(text)
    done = alone("config", "show")

    assert (done.code, done.out) == (2, "")
    assert words in done.complaint()


def test_a_reader_that_goes_is_no_noise(alone: Command) -> None:
    """As in `fencepost config show | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "fencepost.cli", "config", "show"],
        env=alone.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(50) == 0
