"""One database for all tests of the activities that need no Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.store.kit import StoreKit, open_store


@pytest.fixture(scope="session")
async def store(postgres_url: str, template_database: str) -> AsyncIterator[StoreKit]:
    """A store that all tests of this folder share."""
    async with open_store(postgres_url, template_database) as opened:
        yield opened
