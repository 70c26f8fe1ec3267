"""Clocks that disagree, and a database that others hold locked: neither reorders, repeats nor loses anything."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from fencepost.providers.script import Gate, Pause, Say
from tests.house_kit import House, assert_equal_to_rebuild
from tests.workflows.conftest import MakeHouse

SESSIONS = 10


def id_of(seconds_ahead: int, number: int) -> str:
    """Give an input id as a client makes it whose clock is that far ahead."""
    stamp = (time.time_ns() // 1_000_000 + seconds_ahead * 1000) * 4096 & 0xFFFF_FFFF_FFFF
    return f"msg_{stamp:012x}{number:014d}"


@pytest.mark.parametrize("skew", [600, -600])
async def test_a_clients_clock_orders_nothing(house: MakeHouse, skew: int) -> None:
    """Answers are told apart and put in order by the log, not by the time in an id."""
    h = await house([[Say("First answer.")], [Say("Second answer.")]])
    session_id = h.new_id()
    for number, prompt in enumerate(("First.", "Second.")):
        await h.prompt(session_id, prompt, id=id_of(skew, number))
        await h.ended(session_id)

    assert [(m.type, getattr(m, "text", None)) for m in await h.messages(session_id)] == [
        ("user", "First."),
        ("assistant", None),
        ("user", "Second."),
        ("assistant", None),
    ]
    assert len(h.provider.requests) == 2


async def _waiting(house: House) -> int:
    async with house.services.database.read() as conn:
        found = await conn.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
        return int(found.scalar_one())


async def test_a_lock_that_somebody_holds_is_waited_for(house: MakeHouse) -> None:
    """Many sessions end their steps while a table is locked: each is settled once when the lock goes."""
    gates = [Gate() for _ in range(SESSIONS)]
    h = await house([[Pause(gate), Say("Done.")] for gate in gates])
    session_ids = [h.new_id() for _ in range(SESSIONS)]
    for session_id in session_ids:
        await h.start(session_id, "Go.")
    for gate in gates:
        await gate.reached()
    async with h.services.database.begin() as conn:
        await conn.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        await conn.execute(text("LOCK TABLE session_message IN SHARE ROW EXCLUSIVE MODE"))
        for gate in gates:
            gate.release()
        waiting = 0
        while waiting < SESSIONS:
            waiting = await _waiting(h)
    results = [await h.ended(session_id) for session_id in session_ids]

    assert [result.outcome for result in results] == ["done"] * SESSIONS
    for session_id in session_ids:
        types = await h.types(session_id)
        assert types.count("session.next.step.ended.2") == 1
        assert types.count("session.next.text.ended.1") == 1
        await assert_equal_to_rebuild(h, session_id)
    assert len(h.provider.requests) == SESSIONS
