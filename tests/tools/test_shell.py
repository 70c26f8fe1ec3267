"""The bash tool: what comes back, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import resource
import time

import pytest

from fencepost.domain.tools import ToolFailure
from fencepost.tools.execution import Capture
from fencepost.tools.processes import Reaper, ShellRunner
from tests.tools.conftest import ALLOW_OUTSIDE, Workspace, alive, pids_in, text_of, wait_until


async def test_output_and_exit_code_come_back(workspace: Workspace) -> None:
    output = await workspace.call("bash", command="echo out; echo err >&2; cat; pwd; exit 3")
    assert text_of(output) == f"out\nerr\n{workspace.root}\n[exit code 3]"
    assert output.structured == {
        "exitCode": 3,
        "timeout": False,
        "truncated": False,
        "bytes": len(str(workspace.root)) + 9,
    }
    assert text_of(await workspace.call("bash", command="true")) == "(no output)"
    assert "[ended by signal 9]" in text_of(await workspace.call("bash", command="kill -9 $$"))


async def test_a_command_knows_its_call_and_no_secrets(tmp_path_factory: pytest.TempPathFactory) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "KEEP": "1",
        "OPENAI_API_KEY": "sk",
        "MY_LLM": "sk",
        "FENCEPOST_DATABASE_URL": "postgres://",
        "TEMPORAL_API_KEY": "t",
    }
    runner = ShellRunner(Reaper(), secret_env=frozenset({"MY_LLM"}), environment=environment)
    await runner.start()
    workspace = Workspace(tmp_path_factory.mktemp("ws"), runner)
    names = {line.split("=")[0] for line in text_of(await workspace.call("bash", command="env")).splitlines()}
    await runner.close()
    assert {"KEEP", "PATH", "FENCEPOST_CALL"} <= names
    assert not names & {"OPENAI_API_KEY", "MY_LLM", "FENCEPOST_DATABASE_URL", "TEMPORAL_API_KEY"}


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300 & echo $! > pids; echo hi",
        "setsid sleep 300 </dev/null >/dev/null & echo $! > pids; echo hi",
        "setsid sh -c 'echo $$ > pids; exec sleep 300' & while [ ! -s pids ]; do :; done; echo hi",
    ],
)
async def test_a_background_process_neither_delays_the_result_nor_survives_it(
    workspace: Workspace, command: str
) -> None:
    begin = time.monotonic()
    output = await workspace.call("bash", command=command)
    assert time.monotonic() - begin < 5
    assert text_of(output) == "hi\n"
    (pid,) = pids_in(workspace.root / "pids", 1)
    assert not alive(pid)


STUBBORN = """trap '' TERM
(while :; do sleep 1; done) & echo $! > pids
(trap '' TERM; sleep 300) & echo $! >> pids
echo part; wait"""


async def test_a_time_out_is_a_result_with_the_output_so_far(workspace: Workspace) -> None:
    begin = time.monotonic()
    output = await workspace.call("bash", command=STUBBORN, timeout=500)
    assert time.monotonic() - begin < 8
    assert text_of(output).startswith("part\n[timed out after 500 ms")
    assert output.structured["timeout"] is True
    assert output.structured["exitCode"] is None
    assert not any(alive(pid) for pid in pids_in(workspace.root / "pids", 2))


async def test_a_timed_out_command_may_clean_up(workspace: Workspace) -> None:
    command = "trap 'echo cleaned; exit 0' TERM; while :; do sleep 0.05; done"
    output = await workspace.call("bash", command=command, timeout=300)
    assert "cleaned\n" in text_of(output)
    assert output.structured["timeout"] is True


async def test_cancellation_kills_everything_before_it_is_passed_on(workspace: Workspace) -> None:
    command = f"setsid sh -c 'echo $$ > stray; exec sleep 300' & {STUBBORN}"
    task = asyncio.create_task(workspace.call("bash", command=command))
    pids = await asyncio.to_thread(wait_until, lambda: pids_in(workspace.root / "pids", 2))
    pids += await asyncio.to_thread(wait_until, lambda: pids_in(workspace.root / "stray", 1))
    begin = time.monotonic()
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, task.cancel)  # an impatient caller changes nothing
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begin < 1.5
    assert not any(alive(pid) for pid in pids)


async def test_a_flood_of_output_is_bounded_in_memory_and_in_text(workspace: Workspace) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command, total in (
        ("yes | head -c 300000000", 300_000_000),
        ("head -c 50000000 /dev/zero | tr '\\0' x", 50_000_000),
    ):
        output = await workspace.call("bash", command=command)
        text = text_of(output)
        assert len(text) <= 51_200
        assert f"[output truncated: {total} bytes in total" in text
        assert output.structured["exitCode"] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_bytes_that_are_no_text_are_replaced(workspace: Workspace) -> None:
    assert text_of(await workspace.call("bash", command=r"printf 'a\0b\xff\n'")) == "a\ufffdb\ufffd\n"


async def test_a_work_directory_must_be_there_and_inside(workspace: Workspace) -> None:
    (workspace.root / "sub").mkdir()
    assert text_of(await workspace.call("bash", command="pwd", workdir="sub")) == f"{workspace.root}/sub\n"
    with pytest.raises(ToolFailure, match="external_directory"):
        await workspace.call("bash", command="pwd", workdir="..")
    assert text_of(await workspace.call("bash", ALLOW_OUTSIDE, command="pwd", workdir="/")) == "/\n"
    with pytest.raises(ToolFailure, match="Cannot run the command in nosuch: No such file"):
        await workspace.call("bash", command="pwd", workdir="nosuch")
    with pytest.raises(ToolFailure, match="NUL"):
        await workspace.call("bash", command="echo \0")
    with pytest.raises(ToolFailure, match="Argument list too long"):
        await workspace.call("bash", command="#" * 4_000_000)


def test_a_capture_keeps_head_and_tail() -> None:
    capture = Capture(limit=10)
    for piece in (b"abc", b"defgh", b"ijklmnop", b"q"):
        capture.feed(piece)
    assert capture.truncated
    assert capture.total == 17
    assert capture.text() == "abcde\n[... 7 bytes left out ...]\nmnopq"
    small = Capture(limit=10)
    small.feed(b"0123456789")
    assert small.text() == "0123456789"
