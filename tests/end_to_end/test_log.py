"""The log of whole turns: few lines, each of them placed, and nothing in them that anybody wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from fencepost.domain.permissions import Rule
from fencepost.domain.tools import ToolDefinition
from fencepost.providers.script import Action, CallTool, Fail, Gate, Hang, Pause, Say
from fencepost.telemetry import LogLevel, configure_logging
from fencepost.tools.builtin import builtin_tools
from fencepost.tools.registry import Registry
from tests.house_kit import House, open_house
from tests.worker_process import ROOT, WorkerProcess, environment, exists

KEY = "sk-the-key-that-must-not-be-seen-0123456789"
PROMPT = "the-prompt-of-somebody"
ANSWER = "the-answer-of-the-model"
ARGUMENT = "the-argument-of-the-call"
OUTPUT = "the-output-of-the-tool"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A place for log lines. Logging is put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level


def lines_of(written: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.splitlines()]


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_a_turn_of_two_steps_is_five_lines_without_anything_that_was_written(
    database_url: str,
    temporal_client: Client,
    task_queue: str,
    tmp_path: Path,
    stream: io.StringIO,
    level: LogLevel,
) -> None:
    configure_logging(level, "json", stream)
    (tmp_path / "file.txt").write_text(OUTPUT)
    command = f"cat file.txt # {ARGUMENT}"
    replies: list[list[Action]] = [[Say(ANSWER), CallTool("bash", {"command": command})], [Say(ANSWER)]]
    environ = {"SCRIPTED_KEY": KEY}
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies, environ=environ) as first:
        providers = {"scripted": {"base_url": first.provider.base_url, "api_key_env": "SCRIPTED_KEY"}}
        async with open_house(
            database_url, temporal_client, f"{task_queue}-keyed", tmp_path, environ=environ, providers=providers
        ) as house:
            session_id = house.new_id()
            result = await house.run(session_id, PROMPT)
            run_id = (await house.client.get_workflow_handle(session_id).describe()).run_id
    written = stream.getvalue()
    lines = [line for line in lines_of(written) if line["level"] != "debug" and line["logger"] != "httpx2"]

    assert result.outcome == "done"
    assert [line["event"] for line in lines] == [
        "turn claimed",
        "tool done",
        "step settled",
        "step settled",
        "turn released",
    ]
    assert {(line["session"], line["turn"], line["execution"]) for line in lines} == {
        (session_id, run_id, lines[0]["execution"])
    }
    assert [line.get("step") for line in lines] == [None, 1, 1, 2, 2]
    assert {key: lines[1][key] for key in ("tool", "status")} == {"tool": "bash", "status": "done"}
    assert [(line["status"], line["finish"]) for line in lines[2:4]] == [("done", "tool-calls"), ("done", "stop")]
    assert all(line["tokens_in"] > 0 and line["tokens_out"] > 0 for line in lines[2:4])
    assert all(line["seconds"] > 0 for line in lines[1:4])
    assert lines[4]["outcome"] == "done"
    assert [text for text in (PROMPT, ANSWER, ARGUMENT, OUTPUT, KEY) if text in written] == []


async def test_a_refusal_of_the_provider_is_told_by_its_kind(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, stream: io.StringIO
) -> None:
    """Its words may quote what it was sent; they are in the session's log and in the result."""
    configure_logging("info", "json", stream)
    said = {"error": {"message": f"cannot answer {PROMPT}"}}
    replies: list[list[Action]] = [[Fail(429, said, {"retry-after": "0"})], [Fail(401, said)]]
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies) as house:
        result = await house.run(house.new_id(), PROMPT)
    lines = lines_of(stream.getvalue())
    attempts = [line for line in lines if line["event"] == "provider request failed"]
    told = [{key: line.get(key) for key in ("kind", "status", "attempt", "transient")} for line in attempts]

    assert PROMPT in (result.error or "")
    assert told == [
        {"kind": "RateLimit", "status": 429, "attempt": 1, "transient": True},
        {"kind": "Authentication", "status": 401, "attempt": 2, "transient": False},
    ]
    assert attempts[0]["retry_after"] == 0
    assert [line["outcome"] for line in lines if line["event"] == "turn released"] == ["failed"]
    assert PROMPT not in stream.getvalue()
    assert "Traceback" not in stream.getvalue()


class BrokenRegistry(Registry):
    """A registry with a fault that nobody thought of."""

    def definitions(self, rules: Sequence[Rule], names: Collection[str] | None = None) -> tuple[ToolDefinition, ...]:
        """Fail."""
        raise KeyError("a fault of ours")


async def test_a_fault_of_ours_is_told_with_its_traceback_and_its_session(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path, stream: io.StringIO
) -> None:
    configure_logging("info", "json", stream)
    registry = BrokenRegistry(builtin_tools())
    async with open_house(database_url, temporal_client, task_queue, tmp_path, registry=registry) as house:
        session_id = house.new_id()
        await house.start(session_id, PROMPT)
        async with asyncio.timeout(20):
            while "exception" not in stream.getvalue():  # noqa: ASYNC110 - a log tells nobody of its lines
                await asyncio.sleep(0.02)
    fault = next(line for line in lines_of(stream.getvalue()) if "exception" in line)

    assert "in definitions" in fault["exception"]
    assert (fault["session"], fault["activity"], fault["step"]) == (session_id, "resolve_model", 1)
    assert PROMPT not in stream.getvalue()


async def start_worker(env: dict[str, str], health: Path) -> WorkerProcess:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker", "--health-file", str(health)),
        cwd=ROOT,
        env=env,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    worker = WorkerProcess(process)
    await worker.ready()
    return worker


async def streaming(house: House, gate: Gate) -> str:
    session_id = house.new_id()
    await house.start(session_id, PROMPT)
    await gate.reached()
    return session_id


async def test_a_worker_process_tells_of_its_beginning_its_end_and_its_health(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """Standard error is no terminal, so each line is JSON. The file says that it can work, and goes when it stops."""
    gate, health = Gate(), tmp_path / "health"
    replies: list[list[Action]] = [[Say("Half"), Pause(gate), Hang()], [Say("Whole.")]]
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies, serve=False) as house:
        address = temporal_client.service_client.config.target_host
        base_url = house.provider.base_url
        env = environment(tmp_path / "fencepost.toml", database_url, address, task_queue, tmp_path, base_url)
        first = await start_worker(env, health)
        try:
            session_id = await streaming(house, gate)
            async with asyncio.timeout(20):
                await exists(health)
            second = await start_worker(env, tmp_path / "other")
            try:
                first.signal(signal.SIGTERM)
                assert await first.ended() == 0
                gone = not health.exists()
                result = await house.ended(session_id)
            finally:
                second.process.kill()
                await second.ended()
        finally:
            if first.process.returncode is None:
                first.process.kill()
            await first.ended()
    lines = [json.loads(line) for line in first.lines]
    started = lines[0]
    events = [line["event"] for line in lines]
    overtaken = [json.loads(line)["event"] for line in second.lines]

    assert (started["event"], started["queues"]) == ("worker ready", [task_queue])
    assert {"fencepost", "temporalio", "python"} <= started.keys()
    assert events[-1] == "drain finished"
    assert events.index("drain started") < events.index("work handed over")
    assert not any("exception" in line for line in lines)
    assert gone
    assert result.outcome == "done"
    assert "turn taken over" in [*events, *overtaken]
