"""A worker dies, and the session goes on elsewhere: nothing lost, nothing done twice, the log whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from temporalio.client import Client

from fencepost.domain.messages import AssistantMessage, SyntheticMessage, TextPart, UserMessage
from fencepost.domain.projection import INTERRUPTED, UNSETTLED
from fencepost.providers.script import Action, CallTool, Gate, Hang, Pause, Say
from fencepost.store.live import Listener
from fencepost.store.readers import Delta, follow
from fencepost.store.tables import live_part, session_execution
from tests.house_kit import House, assert_equal_to_rebuild, open_house
from tests.worker_process import WorkerProcess, environment, exists, worker_process

Replies = list[list[Action]]


@asynccontextmanager
async def stage(
    database_url: str, client: Client, task_queue: str, directory: Path, replies: Replies
) -> AsyncIterator[tuple[House, Callable[[], Awaitable[WorkerProcess]]]]:
    """Give a house without a worker, and a function that starts worker processes for it."""
    async with AsyncExitStack() as stack:
        house = await stack.enter_async_context(
            open_house(database_url, client, task_queue, directory, replies, serve=False)
        )
        address = client.service_client.config.target_host
        config = directory / "fencepost.toml"
        env = environment(config, database_url, address, task_queue, directory, house.provider.base_url)

        async def start() -> WorkerProcess:
            return await stack.enter_async_context(worker_process(env))

        yield house, start


async def streamed(house: House, session_id: str, text: str) -> None:
    """Wait until a reader was shown this text."""
    listener = Listener(house.services.database)
    shown = ""
    try:
        async for item in follow(house.services.database, listener, session_id):
            if isinstance(item, Delta) and item.kind == "text":
                shown += item.text
                if text in shown:
                    return
    finally:
        await listener.close()


async def kept(house: House, text: str) -> None:
    """Wait until the part so far is kept where recovery finds it."""
    while True:
        async with house.services.database.read() as conn:
            rows = await conn.execute(select(live_part.c.text))
            if any(text in row.text for row in rows):
                return
        await asyncio.sleep(0.05)


async def executions(house: House) -> list[str]:
    """Give the ids of the executions that have a claim."""
    async with house.services.database.read() as conn:
        return [row.id for row in await conn.execute(select(session_execution.c.id))]


def texts(messages: list[Any]) -> list[str]:
    return [
        "".join(part.text for part in message.content if isinstance(part, TextPart))
        for message in messages
        if isinstance(message, AssistantMessage)
    ]


async def test_a_worker_killed_in_the_middle_of_a_stream_loses_nothing(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    gate = Gate()
    replies: Replies = [[Say("The first half, ", chunks=2), Pause(gate), Hang()], [Say("and the second half.")]]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        worker = await start()
        session_id = house.new_id()
        handle = await house.start(session_id, "Tell me all.")
        await gate.reached()
        await kept(house, "The first half, ")
        worker.signal(signal.SIGKILL)
        await worker.ended()
        await start()
        result: Any = await handle.result()
        messages = await house.messages(session_id)
        events = await house.events(session_id)

        assert result["outcome"] == "done"
        assert [message.type for message in messages] == ["user", "assistant", "synthetic", "assistant"]
        # What was shown is kept, and the answer goes on from there.
        assert texts(messages) == ["The first half, ", "and the second half."]
        cut = messages[1]
        assert isinstance(cut, AssistantMessage)
        assert cut.error is not None
        assert (cut.finish, cut.error.message) == ("error", UNSETTLED)
        interrupted = [event for event in events if event.type == "session.next.step.interrupted.1"]
        assert [event.data["reason"] for event in interrupted] == ["lost"]
        assert isinstance(messages[2], SyntheticMessage)
        await assert_equal_to_rebuild(house, session_id)


async def test_a_tool_whose_worker_is_killed_is_not_started_again(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    ledger = tmp_path / "effects"
    command = f"echo once >> {ledger}; sleep 300"
    replies: Replies = [[CallTool("bash", {"command": command}, id="call_1")], [Say("I stopped.")]]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        worker = await start()
        session_id = house.new_id()
        handle = await house.start(session_id, "Do it.")
        await exists(ledger)
        worker.signal(signal.SIGKILL)
        await worker.ended()
        await start()
        result: Any = await handle.result()
        messages = await house.messages(session_id)

        assert result["outcome"] == "done"
        assert ledger.read_text() == "once\n"
        tool = messages[1].to_wire()["content"][0]
        assert tool["state"]["status"] == "error"
        assert tool["state"]["error"]["message"] == INTERRUPTED
        assert [m["role"] for m in house.provider.requests[1]["messages"] if m["role"] != "system"] == [
            "user",
            "assistant",
            "tool",
            "user",
        ]
        await assert_equal_to_rebuild(house, session_id)


@pytest.mark.conformance("COO-06")
async def test_a_worker_that_is_told_to_stop_hands_its_turn_over(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    gate, second = Gate(), Gate()
    replies: Replies = [[Say("Half a "), Pause(gate), Hang()], [Pause(second), Say("word.")]]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        first = await start()
        session_id = house.new_id()
        handle = await house.start(session_id, "Speak.")
        await gate.reached()
        await streamed(house, session_id, "Half a ")
        [drained] = await executions(house)
        await start()
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        await second.reached()
        [taken_over] = await executions(house)
        second.release()
        result: Any = await handle.result()
        messages = await house.messages(session_id)
        events = await house.events(session_id)

        assert result["outcome"] == "done"
        assert texts(messages) == ["Half a ", "word."]
        reasons = [event.data["reason"] for event in events if event.type == "session.next.step.interrupted.1"]
        assert reasons == ["shutdown"]
        assert taken_over != drained
        assert await executions(house) == []
        await assert_equal_to_rebuild(house, session_id)


async def test_input_sent_while_no_worker_lives_is_answered_when_one_comes(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    replies: Replies = [[Say("All three.")]]
    async with stage(database_url, temporal_client, task_queue, tmp_path, replies) as (house, start):
        session_id = house.new_id()
        handle = await house.start(session_id, "One.")
        await handle.signal("steer", {"text": "Two."})
        await handle.signal("steer", {"text": "Three."})
        await start()
        result: Any = await handle.result()
        messages = await house.messages(session_id)

        assert result["outcome"] == "done"
        assert [m.text for m in messages if isinstance(m, UserMessage)] == ["One.", "Two.", "Three."]
        assert len(house.provider.requests) <= 2


@pytest.mark.parametrize("missing", ["FENCEPOST_DATABASE_URL", "TEMPORAL_ADDRESS"])
async def test_a_worker_without_its_services_says_so_in_one_line(
    database_url: str, temporal_address: str, task_queue: str, tmp_path: Path, missing: str
) -> None:
    env = environment(tmp_path / "fencepost.toml", database_url, temporal_address, task_queue, tmp_path, "http://x/v1")
    env[missing] = {
        "FENCEPOST_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "TEMPORAL_ADDRESS": "127.0.0.1:1",
    }[missing]
    with pytest.raises(AssertionError) as raised:
        async with worker_process(env):
            pass
    text = str(raised.value)
    assert "127.0.0.1:1" in text
    assert missing in text
    assert "Traceback" not in text
