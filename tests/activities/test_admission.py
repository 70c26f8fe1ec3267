"""Input that comes to the workflow without a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import Client

from fencepost.domain.contracts import SIGNAL_STEER
from fencepost.store import tables
from tests.house_kit import open_house
from tests.store.kit import StoreKit


@pytest.mark.conformance("INB-08")
async def test_inputs_without_an_id_are_different_inputs(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    """The same words three times, by update and by signal: three rows, three receipts, three messages."""
    async with open_house(database_url, temporal_client, task_queue, tmp_path) as house:
        session_id = house.new_id()
        receipts = [await house.prompt(session_id, "hello", resume=False) for _ in range(2)]
        handle = await house.start(session_id, "hello")
        await handle.signal(SIGNAL_STEER, {"text": "hello"})
        await handle.result()
        rows = await StoreKit(house.services.database).rows(tables.session_input, session_id)
        messages = [message for message in await house.messages(session_id) if message.type == "user"]

    assert len(rows) == len(messages) == 4
    assert {receipt.id for receipt in receipts} < {row["id"] for row in rows} == {message.id for message in messages}
    assert len({receipt.id for receipt in receipts}) == 2
    assert {message.text for message in messages} == {"hello"}
