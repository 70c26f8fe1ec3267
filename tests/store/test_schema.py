"""The migrated database is the declared one, and the published tables are as published."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.store import migrate, tables
from tests.store.kit import StoreKit

_LIST = Path(__file__).parents[1] / "house" / "spec_tables.json"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(_LIST.read_text(encoding="utf-8"))["tables"]
TYPES = {
    "text": {"TEXT"},
    "integer": {"BIGINT"},
    "json": {"JSONB"},
    "boolean": {"BOOLEAN"},
    "real": {"DOUBLE PRECISION"},
}


@pytest.fixture
async def reading(store: StoreKit) -> AsyncIterator[AsyncConnection]:
    """A connection to the migrated database."""
    async with store.database.read() as conn:
        yield conn


async def test_the_migrated_schema_is_the_declared_one(reading: AsyncConnection) -> None:
    """Nothing is missing, nothing too much: tables, columns, types, defaults, keys and indexes."""

    def differences(sync: Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True, "version_table": migrate.VERSION_TABLE}
        return list(compare_metadata(MigrationContext.configure(sync, opts=options), tables.metadata))

    assert await reading.run_sync(differences) == []


def _described(sync: Connection, name: str) -> dict[str, Any]:
    """Give a table of the database in the words of the published list."""
    found = inspect(sync)
    key = found.get_pk_constraint(name)["constrained_columns"]
    columns = []
    for column in found.get_columns(name):
        described: dict[str, Any] = {
            "name": column["name"],
            "type": str(column["type"]),
            "nullable": column["nullable"],
        }
        if column["name"] in key:
            described["primary_key"] = True
        if column["default"] is not None:
            described["default"] = column["default"].split("::")[0].strip("'")
        columns.append(described)
    unique = [one["column_names"] for one in found.get_unique_constraints(name)]
    return {
        "columns": columns,
        "unique": sorted(unique),
        "indexes": sorted(one["column_names"] for one in found.get_indexes(name) if not one["unique"]),
        "foreign_keys": sorted(
            [
                one["constrained_columns"][0],
                f"{one['referred_table']}.{one['referred_columns'][0]}",
                one["options"].get("ondelete", "").lower(),
            ]
            for one in found.get_foreign_keys(name)
        ),
    }


@pytest.mark.parametrize("name", [name for name, table in PUBLISHED.items() if table["status"] == "required"])
async def test_a_required_table_is_exactly_the_published_one(reading: AsyncConnection, name: str) -> None:
    """Columns in their order, whether they may be null, defaults, types, uniqueness and references. There may be more
    indexes: those by which the recovery scan finds its work are ours."""
    published = PUBLISHED[name]
    described = await reading.run_sync(_described, name)

    assert len(described["columns"]) == len(published["columns"])
    for ours, theirs in zip(described["columns"], published["columns"], strict=True):
        assert ours.pop("type") in TYPES[theirs["type"]], theirs["name"]
        assert ours == {field: value for field, value in theirs.items() if field != "type"}
    for what in ("unique", "foreign_keys"):
        if what in published:
            assert described[what] == sorted(published[what]), what
    assert [one for one in published.get("indexes", []) if one not in described["indexes"]] == []


@pytest.mark.parametrize("name", [name for name, table in PUBLISHED.items() if table["status"] == "reference"])
async def test_a_referenced_table_holds_at_least_the_published_columns(reading: AsyncConnection, name: str) -> None:
    """Of the same types and in the same order; more columns are ours."""
    published = PUBLISHED[name]
    described = await reading.run_sync(_described, name)

    ours = {column["name"]: column for column in described["columns"]}
    theirs = [column["name"] for column in published["columns"]]
    assert [one for one in ours if one in theirs] == theirs
    for column in published["columns"]:
        found = ours[column["name"]]
        assert found["type"] in TYPES[column["type"]], column["name"]
        for field in ("nullable", "default", "primary_key"):
            assert found.get(field) == column.get(field), (column["name"], field)
    for what in ("unique", "indexes", "foreign_keys"):
        assert [one for one in published.get(what, []) if one not in described[what]] == []


async def test_only_the_live_parts_may_be_lost_with_the_database(reading: AsyncConnection) -> None:
    """Every other table is logged."""
    found = await reading.exec_driver_sql("SELECT relname FROM pg_class WHERE relkind = 'r' AND relpersistence = 'u'")

    assert found.scalars().all() == ["live_part"]
