"""The projection of a session, worked out anew from its log: to compare it with what is stored, or to replace that.

The events are projected into temporary tables of the same shape, in the same transaction, with the log locked: nobody
sees anything in between, and what is no part of the projection stays: wakes, ownership, ledgers, calls, what the model
was told of its context, and the times of archiving and compacting.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain.errors import NotFoundError
from fencepost.store import event_log, tables
from fencepost.store.engine import Database
from fencepost.store.projector import Projection

_CHUNK = 500
# So few that nobody waits long for their logs, so many that the temporary tables cost little.
_TOGETHER = 20
_SCRATCH = (tables.project, tables.workspace, tables.session, tables.session_message, tables.session_input)
_KEYS = ((tables.session, "id"), (tables.session_message, "session_id"), (tables.session_input, "session_id"))
_NOT_PROJECTED = frozenset({"time_archived", "time_compacting", "wake_pending", "wake_attempts"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is stored otherwise than the log says. A row that is only there once has no column: `stored` or
    `rebuilt` is then None, and the other one is the whole row."""

    table: str
    id: str
    column: str | None
    stored: Any
    rebuilt: Any


@dataclass(frozen=True, slots=True)
class _Sides:
    """The rows of one session's projection by table and id, as stored and as the log gives them."""

    stored: dict[str, dict[str, dict[str, Any]]]
    rebuilt: dict[str, dict[str, dict[str, Any]]]
    projects: list[dict[str, Any]]

    def differences(self) -> list[Difference]:
        found = []
        for table, _ in _KEYS:
            stored, rebuilt = self.stored[table.name], self.rebuilt[table.name]
            for key in sorted(stored.keys() | rebuilt.keys()):
                here, there = stored.get(key), rebuilt.get(key)
                if here is None or there is None:
                    found.append(Difference(table.name, key, None, here, there))
                    continue
                found += [
                    Difference(table.name, key, column, here[column], there[column])
                    for column in here
                    if column not in _NOT_PROJECTED and here[column] != there[column]
                ]
        return found


async def differences(conn: AsyncConnection, session_id: str) -> list[Difference]:
    """Say how a session's projection differs from what its log gives; empty when it does not.

    Nothing is changed, but the log is locked until the transaction ends. Raises NotFoundError for a session without a
    log, and what projecting raises when the log itself is broken.
    """
    return (await _both(conn, session_id)).differences()


async def rebuild(conn: AsyncConnection, session_id: str) -> list[Difference]:
    """Replace a session's projection by what its log gives, in place; gives what was different before.

    Raises what `differences` raises.
    """
    sides = await _both(conn, session_id)
    found = sides.differences()
    if not found:
        return []
    [(_, new)] = sides.rebuilt[tables.session.name].items()
    here = sides.stored[tables.session.name].get(session_id)
    for project in sides.projects:
        await conn.execute(upsert(tables.project).values(**project).on_conflict_do_nothing(index_elements=["id"]))
    if here is None:
        await conn.execute(insert(tables.session).values(**new))
    else:
        projected = {name: value for name, value in new.items() if name not in _NOT_PROJECTED}
        await conn.execute(update(tables.session).where(tables.session.c.id == session_id).values(**projected))
    for table, key in _KEYS[1:]:
        await conn.execute(delete(table).where(table.c[key] == session_id))
        rows = list(sides.rebuilt[table.name].values())
        if table is tables.session_input:
            rows = [_with_wake(row, sides.stored[table.name].get(row["id"])) for row in rows]
        if rows:
            await conn.execute(insert(table), rows)
    return found


def _with_wake(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    if before is None:
        return row
    return {**row, "wake_pending": before["wake_pending"], "wake_attempts": before["wake_attempts"]}


async def rebuild_all(database: Database) -> AsyncGenerator[tuple[str, list[Difference]]]:
    """Rebuild the projection of every session, a few in one transaction; gives each session with what was different.

    A session that is deleted meanwhile is left out. Raises what `differences` raises; what was given before that stays
    rebuilt.
    """
    sequence = tables.event_sequence
    after = ""
    while True:
        async with database.read() as conn:
            page = select(sequence.c.aggregate_id).where(sequence.c.aggregate_id > after, sequence.c.seq >= 0)
            ids = list((await conn.execute(page.order_by(sequence.c.aggregate_id).limit(_TOGETHER))).scalars())
        if not ids:
            return
        for found in await database.transact(partial(_rebuild_some, ids=ids)):
            yield found
        after = ids[-1]


async def _rebuild_some(conn: AsyncConnection, ids: list[str]) -> list[tuple[str, list[Difference]]]:
    found = []
    for session_id in ids:
        with suppress(NotFoundError):
            found.append((session_id, await rebuild(conn, session_id)))
    return found


_TEMPORARY = "pg_temp"


async def _both(conn: AsyncConnection, session_id: str) -> _Sides:
    """Lock the log, read what is stored, and project the log into the temporary tables. Afterwards the
    connection's statements mean the stored tables again; the temporary ones go away with the transaction."""
    head = await event_log.lock(conn, session_id)
    stored = await _rows(conn, session_id)
    home = await _make_scratch(conn)
    await _look_at(conn, home, _TEMPORARY)
    after = -1
    while after < head.seq:
        page = await event_log.read_after(conn, session_id, after, _CHUNK)
        await _look_at(conn, _TEMPORARY, home)
        projection = Projection(conn)
        for event in page:
            await projection.apply(event.decode(), event.seq)
        await projection.write()
        await _look_at(conn, home, _TEMPORARY)
        after = page[-1].seq
    await _look_at(conn, _TEMPORARY, home)
    rebuilt = await _rows(conn, session_id)
    projects = [dict(row) for row in (await conn.execute(select(tables.project))).mappings()]
    # The bare names would mean the temporary tables until the transaction ends.
    await _look_at(conn, home, _TEMPORARY)
    return _Sides(stored, rebuilt, projects)


async def _rows(conn: AsyncConnection, session_id: str) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table, key in _KEYS:
        rows = await conn.execute(select(table).where(table.c[key] == session_id))
        found[table.name] = {row["id"]: dict(row) for row in rows.mappings()}
    return found


async def _make_scratch(conn: AsyncConnection) -> str:
    """Make the temporary tables, empty, and give the name of the schema whose tables they are like."""
    home: str = (await conn.execute(text("SELECT current_schema()"))).scalar_one()
    quoted = conn.dialect.identifier_preparer.quote(home)
    for table in _SCRATCH:
        like = f"(LIKE {quoted}.{table.name} INCLUDING ALL)"
        await conn.execute(text(f"CREATE TEMPORARY TABLE IF NOT EXISTS {table.name} {like} ON COMMIT DROP"))
    await _look_at(conn, _TEMPORARY, home)
    for table in _SCRATCH:  # of the session before, in the same transaction
        await conn.execute(delete(table))
    return home


async def _look_at(conn: AsyncConnection, first: str, second: str) -> None:
    """Let bare names mean the tables of the first schema, or else of the second, until the transaction ends."""
    quote = conn.dialect.identifier_preparer.quote
    await conn.execute(text(f"SET LOCAL search_path TO {quote(first)}, {quote(second)}"))
