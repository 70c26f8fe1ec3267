"""The public contract, spoken by the `temporal` command line: nothing of fencepost's own on the client's side."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from fencepost.domain.messages import UserMessage
from fencepost.providers.script import Action, CallTool, Gate, Hang, Pause, Say
from tests.house_kit import HeldTool, House, open_house

TEMPORAL = shutil.which("temporal", path=str(Path(sys.executable).parent)) or "temporal"


async def temporal(house: House, *arguments: str, fails: bool = False) -> Any:
    """Run `temporal workflow ...` against the test's server; give its JSON, or its words when it is to fail."""
    address = house.client.service_client.config.target_host
    process = await asyncio.create_subprocess_exec(
        TEMPORAL,
        "workflow",
        *arguments,
        "--address",
        address,
        "--output",
        "json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if fails:
        assert process.returncode != 0, out.decode()
        return (out + err).decode()
    assert process.returncode == 0, (out + err).decode()
    return json.loads(out) if out.strip() else None


def starting(house: House, session_id: str, given: str = "{}") -> list[str]:
    return [
        *("--workflow-id", session_id, "--type", "SessionTurn", "--task-queue", house.task_queue),
        *("--input", given),
    ]


async def no_task_failed(house: House, session_id: str) -> None:
    """Check that the workflow's code never failed a task: that is what wedges a workflow."""
    history = await house.client.get_workflow_handle(session_id).fetch_history()
    failed = [e for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED]
    assert failed == []


@pytest.fixture
async def held(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> AsyncIterator[tuple[House, Gate]]:
    """A house whose first answer is held at a gate."""
    gate = Gate()
    replies: list[list[Action]] = [
        [Say("One moment. "), Pause(gate), Say("Done.")],
        [Say("Seen.")],
        [Say("More.")],
        [Say("More.")],
    ]
    async with open_house(database_url, temporal_client, task_queue, tmp_path, replies) as house:
        yield house, gate
        gate.release()


async def test_start_with_a_prompt_creates_the_session_and_answers(held: tuple[House, Gate], tmp_path: Path) -> None:
    house, gate = held
    gate.release()
    session_id = house.new_id()
    given = {
        "session": {"agent": "build", "title": "From outside", "location": {"directory": str(tmp_path)}},
        "prompt": {"text": "Hello."},
    }
    await temporal(house, "start", *starting(house, session_id, json.dumps(given)))
    result = await temporal(house, "result", "--workflow-id", session_id)
    messages = await house.messages(session_id)

    assert result["result"]["outcome"] == "done"
    assert [message.type for message in messages] == ["user", "assistant"]
    # A second start of the same session keeps its attributes and just looks at the inbox.
    await temporal(house, "start", *starting(house, session_id, json.dumps({"session": {"title": "Other"}})))
    again = await temporal(house, "result", "--workflow-id", session_id)
    assert again["result"]["outcome"] == "idle"
    created = [event for event in await house.events(session_id) if event.type == "session.created.1"]
    assert [event.data["info"]["title"] for event in created] == ["From outside"]


async def test_signal_with_start_steers_a_new_and_a_running_session(held: tuple[House, Gate]) -> None:
    house, gate = held
    session_id = house.new_id()
    for text in ("First.", "Second."):
        await temporal(
            house,
            "signal-with-start",
            *starting(house, session_id),
            *("--signal-name", "steer", "--signal-input", json.dumps({"text": text})),
        )
        await gate.reached()
    gate.release()
    await temporal(house, "result", "--workflow-id", session_id)
    messages = await house.messages(session_id)

    assert [m.text for m in messages if isinstance(m, UserMessage)] == ["First.", "Second."]
    await no_task_failed(house, session_id)


async def test_update_with_start_gives_a_receipt_and_the_same_one_again(held: tuple[House, Gate]) -> None:
    house, gate = held
    gate.release()
    session_id = house.new_id()
    update = [
        "execute-update-with-start",
        *starting(house, session_id),
        *("--update-name", "prompt", "--update-input", json.dumps({"id": "msg_mine", "text": "Hello."})),
        *("--id-conflict-policy", "UseExisting"),
    ]
    first = await temporal(house, *update)
    again = await temporal(house, *update)

    receipt, repeated = first["updateResult"], again["updateResult"]
    assert receipt["id"] == "msg_mine"
    assert receipt["sessionID"] == session_id
    assert receipt["delivery"] == "steer"
    assert receipt["prompt"] == {"text": "Hello."}
    assert (repeated["id"], repeated["admittedSeq"]) == (receipt["id"], receipt["admittedSeq"])
    other = json.dumps({"id": "msg_mine", "text": "Something else."})
    given = update.index("--update-input") + 1
    words = await temporal(house, *update[:given], other, *update[given + 1 :], fails=True)
    assert "msg_mine" in words


async def test_status_and_interrupt_of_a_running_turn(held: tuple[House, Gate]) -> None:
    house, gate = held
    session_id = house.new_id()
    await temporal(house, "start", *starting(house, session_id, json.dumps({"prompt": {"text": "Go."}})))
    await gate.reached()
    answer = await temporal(house, "query", "--workflow-id", session_id, "--type", "status")
    status = answer["queryResult"][0]
    assert (status["phase"], status["step"], status["agent"]) == ("busy", 1, "build")
    assert status["model"] == "scripted/test-model"
    await temporal(
        house, "signal", "--workflow-id", session_id, "--name", "interrupt", "--input", json.dumps({"reason": "enough"})
    )
    result = await temporal(house, "result", "--workflow-id", session_id)

    assert result["result"]["outcome"] == "interrupted"
    [event] = [e for e in await house.events(session_id) if e.type == "session.next.step.interrupted.1"]
    assert (event.data["reason"], event.data["note"]) == ("user", "enough")
    # Closed runs answer too, and a signal to an idle session is refused by Temporal itself.
    closed = await temporal(house, "query", "--workflow-id", session_id, "--type", "status")
    assert closed["queryResult"][0]["phase"] == "idle"
    words = await temporal(house, "signal", "--workflow-id", session_id, "--name", "interrupt", fails=True)
    assert "already completed" in words


async def test_interrupt_with_start_of_an_idle_session_runs_nothing(held: tuple[House, Gate]) -> None:
    house, _ = held
    session_id = house.new_id()
    await house.prompt(session_id, "Wait for it.", resume=False)
    await house.ended(session_id)
    await temporal(house, "signal-with-start", *starting(house, session_id), "--signal-name", "interrupt")
    result = await temporal(house, "result", "--workflow-id", session_id)

    assert result["result"]["outcome"] == "idle"
    assert house.provider.requests == []


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("steer", []),
        ("steer", ["null"]),
        ("steer", ["42"]),
        ("steer", ['{"text": ""}']),
        ("steer", ['{"text": "fine"}', '{"text": "one too many"}']),
        ("queue", ['{"id": "not-a-message-id", "text": "x"}']),
        ("interrupt", ['{"after": "soon"}']),
        ("announce_tool_call", ["[]"]),
        ("bogus", ['{"text": "x"}']),
    ],
)
async def test_a_signal_that_cannot_be_understood_is_shown_and_breaks_nothing(
    held: tuple[House, Gate], name: str, inputs: list[str]
) -> None:
    house, gate = held
    session_id = house.new_id()
    handle = await house.start(session_id, "Go.")
    await gate.reached()
    given = [part for one in inputs for part in ("--input", one)]
    await temporal(house, "signal", "--workflow-id", session_id, "--name", name, *given)
    answer = await temporal(house, "query", "--workflow-id", session_id, "--type", "status")
    [rejected] = answer["queryResult"][0]["rejected"]
    assert rejected["signal"] == name
    assert rejected["reason"]
    gate.release()
    result: Any = await handle.result()

    assert result["outcome"] == "done"
    await no_task_failed(house, session_id)


async def test_signals_with_bytes_that_are_no_json_break_nothing(held: tuple[House, Gate]) -> None:
    house, gate = held
    session_id = house.new_id()
    handle = await house.start(session_id, "Go.")
    await gate.reached()
    await handle.signal("steer", b"\xff\x00 no json")
    status: Any = await handle.query("status")
    assert [r["signal"] for r in status["rejected"]] == ["steer"]
    gate.release()
    assert (await handle.result())["outcome"] == "done"
    await no_task_failed(house, session_id)


@pytest.mark.parametrize(
    "inputs", [[], ["null"], ['{"text": "  "}'], ['{"delivery": "mail", "text": "x"}'], ['{"text": "x"}', "1"]]
)
async def test_a_bad_update_is_refused_with_the_field_and_leaves_nothing(
    held: tuple[House, Gate], inputs: list[str]
) -> None:
    house, gate = held
    session_id = house.new_id()
    await house.start(session_id, "Go.")
    await gate.reached()
    given = [part for one in inputs for part in ("--input", one)]
    words = await temporal(
        house, "update", "execute", "--workflow-id", session_id, "--name", "prompt", *given, fails=True
    )
    assert "prompt:" in words
    types = await house.types(session_id)
    assert types.count("session.next.prompt.admitted.1") == 1
    await no_task_failed(house, session_id)


@pytest.mark.parametrize(
    ("workflow_id", "inputs", "words"),
    [
        (None, ["42"], "start input"),
        (None, ['{"prompt": {"text": ""}}'], "text"),
        (None, ['{"prompt": {"text": "a"}}', '{"prompt": {"text": "b"}}'], "one JSON object"),
        (None, ['{"session": {"location": {"directory": "/no/such/place"}}}'], "/no/such/place"),
        (None, ['{"session": {"location": {"directory": "relative"}}}'], "absolute"),
        ("not-a-session", ["{}"], "session id"),
    ],
)
async def test_a_bad_start_fails_at_once_with_one_line(
    held: tuple[House, Gate], workflow_id: str | None, inputs: list[str], words: str
) -> None:
    house, _ = held
    session_id = workflow_id or house.new_id()
    given = [part for one in inputs for part in ("--input", one)]
    identity = ["--workflow-id", session_id, "--type", "SessionTurn", "--task-queue", house.task_queue]
    await temporal(house, "start", *identity, *given)
    said = await temporal(house, "result", "--workflow-id", session_id, fails=True)
    assert words in said
    assert ".py" not in said, "no traceback"
    await no_task_failed(house, session_id)
    assert house.provider.requests == []


async def test_the_temporal_ui_is_told_what_goes_on(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    gate, tool = Gate(), HeldTool()
    replies: list[list[Action]] = [
        [CallTool("bash", {"command": "ls -la"}), CallTool("hold"), Say("On it."), Pause(gate), Hang()]
    ]
    async with open_house(
        database_url, temporal_client, task_queue, tmp_path, replies, registry=tool.registry
    ) as house:
        session_id = house.new_id()
        handle = await house.start(session_id, "List the files.")
        await gate.reached()
        await tool.started(1)
        details = json.dumps(await temporal(house, "metadata", "--workflow-id", session_id))
        described = await handle.describe()
        history = await handle.fetch_history()
        await handle.signal("interrupt")
        await handle.result()

        assert "step 1" in details
        assert "scripted/test-model" in details
        assert "running: hold" in details
        assert "tokens so far" in details
        summaries = [
            json.loads(event.user_metadata.summary.data)
            for event in history.events
            if event.HasField("user_metadata") and event.user_metadata.HasField("summary")
        ]
        assert "stream scripted/test-model, step 1" in summaries
        assert "bash: ls -la" in summaries
        scheduled = [e for e in history.events if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED]
        assert all(event.HasField("user_metadata") for event in scheduled)
        attributes = {pair.key.name: pair.value for pair in described.typed_search_attributes}
        assert attributes["FencepostAgent"] == "build"
        assert attributes["FencepostModel"] == "scripted/test-model"
