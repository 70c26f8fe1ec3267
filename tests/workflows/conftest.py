"""A house for each test, made by calling `house(replies, ...)`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from temporalio.client import Client

from tests.house_kit import House, open_house

MakeHouse: TypeAlias = Callable[..., Awaitable[House]]


@pytest.fixture
async def house(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> AsyncIterator[MakeHouse]:
    """Open houses that are closed at the test's end."""
    async with AsyncExitStack() as stack:

        async def make(replies: Any = None, **options: Any) -> House:
            return await stack.enter_async_context(
                open_house(database_url, temporal_client, task_queue, tmp_path, replies, **options)
            )

        yield make
