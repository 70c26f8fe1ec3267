"""`fencepost demo` and `fencepost dev` from nothing, and what is left of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.cli.command import Command, ended, left_behind, read_until
from tests.cli.nursery import Nursery
from tests.cli.test_readme import README


@pytest.mark.timeout(90)
def test_the_demonstration_shows_everything_and_leaves_nothing(alone: Command) -> None:
    """Services, streamed text, a read, a write, a settled step with its tokens, what to try next."""
    done = alone("demo")

    assert done.code == 0, done.err
    for text in (
        "PostgreSQL is ready",
        "Temporal UI  http://127.0.0.1:",
        "I will read README.md first.",
        "● read README.md",
        "● write SUMMARY.md",
        "step 3 settled, stop",
        "tokens in",
        "/namespaces/default/workflows/ses_",
    ):
        assert text in done.out
    assert done.err == ""
    assert left_behind(alone.home) == []
    (summary,) = alone.home.glob("demo/*/SUMMARY.md")
    assert summary.read_text().startswith("Summary of README.md")


def _readme_snippet() -> str:
    (found,) = re.findall(r"^    import asyncio\n.*?^    asyncio.run\(main\(\)\)\n", README, re.S | re.M)
    return textwrap.dedent(found)


@pytest.mark.timeout(150)
def test_the_local_stack_serves_others_until_ctrl_c(nursery: Nursery, alone: Command) -> None:
    """Programs connect with what it prints, and `run` in local mode shares it. What is left is the state."""
    with alone.started("dev") as process:
        said = read_until(process.stdout, "export FENCEPOST_DATABASE_URL")
        exported = dict(re.findall(r"export (\w+)='?([^'\n]+)'?", said))
        outside = nursery(alone.given(**exported), "run", "hi")
        beside = nursery(alone, "run", "--model", "scripted/demo", "say: beside")
        snippet = subprocess.run(
            [sys.executable, "-c", _readme_snippet()],
            check=True,
            capture_output=True,
            text=True,
            cwd=alone.directory,
            env=alone.given(**exported).environ(),
        )
        (worker,) = json.loads(nursery(alone, "local", "status", "--json").out)["workers"]
        dev_pid = process.pid
        process.send_signal(signal.SIGINT)
        dev = ended(process)

    assert "Temporal UI  http://127.0.0.1:" in said
    assert outside.code == 1
    assert "set the environment variable OPENAI_API_KEY for the worker" in outside.complaint()
    assert (beside.code, beside.out.splitlines()[0]) == (0, "beside")
    assert beside.complaint().startswith("session ses_")  # in dev's worker, which has the scripted model
    assert "outcome='done'" in snippet.stdout
    assert worker["holders"] == [dev_pid]
    assert dev.code == 0
    assert "worker ready" in dev.err
    assert "Traceback" not in dev.err
    assert left_behind(alone.home) == []
