"""A provider's key goes into the request's header and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from temporalio.client import Client

from fencepost.providers.script import Action, CallTool, Fail, Say
from fencepost.store.tables import metadata
from tests.house_kit import House, open_house

KEY = "sk-the-key-that-must-not-be-seen-0123456789"


async def everything(house: House, session_id: str) -> str:
    """Give all that the database and Temporal hold, as one text."""
    parts: list[str] = []
    async with house.services.database.read() as conn:
        for table in metadata.sorted_tables:
            rows = await conn.execute(select(text("t::text")).select_from(text(f'"{table.name}" AS t')))
            parts += [row[0] for row in rows]
    history = await house.client.get_workflow_handle(session_id).fetch_history()
    return "\n".join([*parts, history.to_json()])


@pytest.mark.parametrize(
    "script",
    [
        [Say("Fine.")],
        [Fail(401, {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}})],
        [Fail(500, f"<html>proxy error for Bearer {KEY}</html>")],
    ],
    ids=["answer", "echoed in a refusal", "echoed in a page"],
)
async def test_the_key_is_sent_and_nothing_keeps_it(
    database_url: str,
    temporal_client: Client,
    task_queue: str,
    tmp_path: Path,
    script: list[Action],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    environ = {"SCRIPTED_KEY": KEY}
    async with open_house(
        database_url,
        temporal_client,
        task_queue,
        tmp_path,
        lambda body: script,
        environ=environ,
        limits={"max_provider_attempts": 1},
    ) as first:
        providers = {"scripted": {"base_url": first.provider.base_url, "api_key_env": "SCRIPTED_KEY"}}
        async with open_house(
            database_url,
            temporal_client,
            f"{task_queue}-keyed",
            tmp_path,
            environ=environ,
            providers=providers,
            limits={"max_provider_attempts": 1},
        ) as house:
            session_id = house.new_id()
            result = await house.run(session_id, "Go.")
            held = await everything(house, session_id)

        assert first.provider.headers[0]["authorization"] == f"Bearer {KEY}"
    written = capfd.readouterr()
    assert KEY not in held
    assert KEY not in caplog.text + written.out + written.err
    assert KEY not in (result.error or "")


async def test_a_command_cannot_print_the_key(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    replies: list[list[Action]] = [[CallTool("bash", {"command": "env"})], [Say("Done.")]]
    async with open_house(
        database_url,
        temporal_client,
        task_queue,
        tmp_path,
        replies,
        environ={"SCRIPTED_KEY": KEY, "OPENAI_API_KEY": KEY, "FENCEPOST_DATABASE_URL": f"postgresql://u:{KEY}@x/y"},
    ) as house:
        session_id = house.new_id()
        await house.run(session_id, "Show the environment.")
        messages: list[Any] = await house.messages(session_id)
        shown = messages[1].to_wire()["content"][0]["state"]["content"][0]["text"]

    assert "PATH=" in shown
    assert "OPENAI_API_KEY" not in shown
    assert "FENCEPOST_DATABASE_URL" not in shown


async def test_a_missing_key_is_one_clear_line_that_names_the_variable(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    providers = {"scripted": {"base_url": "http://127.0.0.1:1/v1", "api_key_env": "SCRIPTED_KEY"}}
    async with open_house(database_url, temporal_client, task_queue, tmp_path, providers=providers) as house:
        session_id = house.new_id()
        result = await house.run(session_id, "Go.")

    assert result.outcome == "failed"
    assert "SCRIPTED_KEY" in (result.error or "")
    assert "\n" not in (result.error or "")
