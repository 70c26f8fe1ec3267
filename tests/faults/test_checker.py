"""The checker itself: it finds nothing in a good session, and each kind of violation in one that was tampered with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from fencepost.domain.events import StepEnded, StepInterrupted, Synthetic, TextEnded
from fencepost.domain.ids import derived_id
from fencepost.store import event_log, tables
from fencepost.store.event_log import Entry
from fencepost.store.live import Listener
from fencepost.store.readers import follow
from tests import checker
from tests.checker import Evidence, check
from tests.faults.stage import Model
from tests.house_kit import House, open_house

Tamper = Callable[..., Awaitable[None]]


async def _first_execution(conn: AsyncConnection, session_id: str) -> str:
    table = tables.execution_ledger
    found = await conn.execute(
        select(table.c.execution_id).where(table.c.session_id == session_id).order_by(table.c.time_created).limit(1)
    )
    return str(found.scalar_one())


async def forget_an_input(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    evidence.inputs.append("Never seen.")


async def continue_an_answer(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    head = await event_log.lock(conn, session_id)
    made = Synthetic(
        timestamp=head.now, session_id=session_id, message_id=derived_id("msg", "again", session_id), text="Go on."
    )
    await event_log.append(conn, head, [Entry(derived_id("evt", "again", session_id), made)])


async def start_a_tool_again(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    evidence.effects.append(evidence.effects[0])


async def write_late(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    head = await event_log.lock(conn, session_id)
    old = await _first_execution(conn, session_id)
    made = StepInterrupted(timestamp=head.now, session_id=session_id, execution_id=old, reason="lost")
    await event_log.append(conn, head, [Entry(derived_id("evt", old, 1, "settlement", 7), made)])


async def unsettle_a_step(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    log = tables.event
    mine = log.c.aggregate_id == session_id
    first = select(log.c.id).where(mine, log.c.type == StepEnded.stored_type()).order_by(log.c.seq).limit(1)
    await conn.execute(delete(log).where(log.c.id.in_(first)))


async def show_again(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    evidence.shown += evidence.shown[-8:]


async def say_again(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    log = tables.event
    await conn.execute(
        update(log)
        .where(log.c.aggregate_id == session_id, log.c.type == TextEnded.stored_type())
        .values(data=text("""data || '{"text": "w1.1 w1.1"}'"""))
    )


async def lose_an_event(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    await conn.execute(delete(tables.event).where(tables.event.c.aggregate_id == session_id, tables.event.c.seq == 3))


async def change_a_row(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    await conn.execute(update(tables.session).where(tables.session.c.id == session_id).values(title="Another"))


async def leave_a_wake(conn: AsyncConnection, session_id: str, evidence: Evidence) -> None:
    await conn.execute(
        update(tables.session_input).where(tables.session_input.c.session_id == session_id).values(wake_pending=True)
    )


TAMPERS: dict[Tamper, str] = {
    forget_an_input: checker.LOST,
    continue_an_answer: checker.ANSWERED_TWICE,
    start_a_tool_again: checker.STARTED_TWICE,
    write_late: checker.STALE,
    unsettle_a_step: checker.UNSETTLED,
    show_again: checker.SHOWN_TWICE,
    say_again: checker.SHOWN_TWICE,
    lose_an_event: checker.GAPS,
    change_a_row: checker.DIFFERENT,
    leave_a_wake: checker.LEFT_OVER,
}


async def read_all(house: House, session_id: str, evidence: Evidence) -> None:
    """Let a reader see the whole session."""
    async with house.services.database.read() as conn:
        head = await event_log.latest(conn, session_id)
    listener = Listener(house.services.database)
    async for item in follow(house.services.database, listener, session_id):
        evidence.shown.append(item)
        if getattr(item, "seq", -1) == head:
            break
    await listener.close()


async def test_the_checker_finds_what_was_tampered_with(
    database_url: str, temporal_client: Client, task_queue: str, tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    found = {}
    async with open_house(database_url, temporal_client, task_queue, tmp_path, Model(effects)) as house:
        for tamper, kind in TAMPERS.items():
            session_id = house.new_id()
            await house.run(session_id, "First.")
            await house.run(session_id, "Second.")
            evidence = Evidence(["First.", "Second."], effects.read_text().split()[-1:])
            await read_all(house, session_id, evidence)
            good = await check(house.services.database, session_id, evidence)
            await house.services.database.transact(partial(tamper, session_id=session_id, evidence=evidence))
            bad = await check(house.services.database, session_id, evidence)
            found[tamper] = (good, kind in {violation.kind for violation in bad})

    assert found == {tamper: ([], True) for tamper in TAMPERS}
