"""Wakes that were lost, of continuations and of input: made again, fairly and at a pace; and poison among them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from fencepost.store import recovery, tables
from fencepost.store.recovery import MAX_WAKE_ATTEMPTS
from tests.store.kit import token_of
from tests.store.recovery_kit import HOUR_MS, Recovering, recovering

__all__ = ["recovering"]


@pytest.mark.conformance("REC-06")
async def test_a_continuation_that_was_never_woken_is_woken(recovering: Recovering) -> None:
    """Recorded, and the scan that recorded it died before its wake: the row asks for itself."""
    store = recovering.store
    session_id = await store.new_session()
    await recovering.recovery(session_id)

    assert await recovering.did() == [(session_id, "woken")]
    row = await store.row(tables.session_recovery, session_id)
    assert (row["wake_pending"], row["wake_attempts"], row["phase"]) == (True, 1, "pending")
    await store.claim(token_of(session_id))
    assert (await store.prepare(token_of(session_id))).continued
    row = await store.row(tables.session_recovery, session_id)
    assert (row["wake_pending"], row["phase"]) == (False, "promoted")
    await store.release(token_of(session_id))
    assert await recovering.did() == []


MALFORMED: list[dict[str, Any]] = [
    {"phase": "dancing"},
    {"phase": "promoted"},
    {"execution_id": ""},
    {"continuation_message_id": ""},
    {"continuation_message_id": "not an id"},
    {"assistant_message_id": "msg_nowhere"},
    {"session_id": "ses_nobody"},
]


@pytest.mark.conformance("REC-07")
@pytest.mark.parametrize("broken", MALFORMED, ids=str)
async def test_a_malformed_recovery_is_put_aside(recovering: Recovering, broken: dict[str, Any]) -> None:
    """With its error, and the next one is served by the same scan, even if a batch is one row."""
    store = recovering.store
    bad, good = await store.new_session(), await store.new_session()
    made = await recovering.recovery(bad, **broken)
    await recovering.recovery(good, time_created=2_000)

    assert await recovering.did(batch=1) == [(made["session_id"], "quarantined"), (good, "woken")]
    assert list(await recovering.errors(tables.session_recovery)) == [made["session_id"]]
    assert recovering.runs.woken == [good]
    row = await store.row(tables.session_recovery, made["session_id"])
    assert (row["wake_pending"], row["phase"]) == (False, made["phase"])


@pytest.mark.conformance("REC-08")
async def test_a_whole_batch_of_poison_is_put_aside_before_valid_work(recovering: Recovering) -> None:
    """More than one batch of it, all of it older."""
    store = recovering.store
    poison = [await store.new_session() for _ in range(7)]
    for session_id in poison:
        await recovering.recovery(session_id, phase="dancing")
    good = await store.new_session()
    await recovering.recovery(good, time_created=2_000)
    ordinary = await recovering.waiting()

    did = await recovering.did(batch=3)
    assert did[:7] == [(session_id, "quarantined") for session_id in sorted(poison)]
    assert did[7:] == [(good, "woken"), (ordinary, "woken")]
    assert len(await recovering.errors(tables.session_recovery)) == 7


@pytest.mark.conformance("REC-09")
async def test_work_beyond_a_batch_gets_its_turn(recovering: Recovering) -> None:
    """Of either kind: what was tried moves behind what was not, also while nobody answers the wakes."""
    store = recovering.store
    recoveries = [await store.new_session() for _ in range(5)]
    for session_id in recoveries:
        await recovering.recovery(session_id)
    inputs = [await recovering.waiting() for _ in range(5)]

    for scans in (1, 2, 3):
        await recovering.scan(batch=2)
        assert len(recovering.runs.woken) == min(4 * scans, 12)
    assert set(recovering.runs.woken) == {*recoveries, *inputs}
    attempts = [(await store.row(tables.session_recovery, one))["wake_attempts"] for one in recoveries]
    assert sorted(attempts) == [1, 1, 1, 1, 2]


@pytest.mark.conformance("REC-09")
async def test_a_session_with_much_input_takes_one_place(recovering: Recovering) -> None:
    """One wake is enough for it, and counts for all that waits there."""
    store = recovering.store
    busy = await store.new_session()
    for n in range(8):
        await store.admit(busy, f"input {n}")
    await recovering.age(tables.session_input, busy, 2 * HOUR_MS)
    other = await recovering.waiting()

    assert await recovering.did(batch=2) == [(busy, "woken"), (other, "woken")]
    assert {row["wake_attempts"] for row in await store.rows(tables.session_input, busy)} == {1}


async def test_a_row_at_the_maximum_comes_first_and_begins_anew(recovering: Recovering) -> None:
    """The number of attempts only makes scans fair: it wraps around to 1, and never ends a wake."""
    store = recovering.store
    fresh, most = await recovering.waiting(age=2 * HOUR_MS), await recovering.waiting()
    await recovering.set(tables.session_input, most, wake_attempts=MAX_WAKE_ATTEMPTS)
    for n, session_id in enumerate((fresh, most)):
        await recovering.recovery(session_id, wake_attempts=n * MAX_WAKE_ATTEMPTS)
    beyond = await recovering.waiting()
    await recovering.set(tables.session_input, beyond, wake_attempts=MAX_WAKE_ATTEMPTS + 1)

    assert await recovering.did(batch=1) == [(most, "woken"), (most, "woken")]
    assert (await store.row(tables.session_input, most))["wake_attempts"] == 1
    assert (await store.row(tables.session_recovery, most))["wake_attempts"] == 1
    assert [wake.session_id for wake in await store.do(recovery.lost_inputs, 10)] == [fresh, most]


async def test_attempts_are_made_at_growing_spaces(recovering: Recovering) -> None:
    """Each at twice the age of the one before: what cannot be helped costs less and less."""
    store, session_id = recovering.store, await recovering.waiting(age=11_000)
    assert [(await recovering.did()) for _ in range(3)] == [[(session_id, "woken")], [(session_id, "woken")], []]

    await recovering.age(tables.session_input, session_id, 10_000)
    assert await recovering.did() == [(session_id, "woken")]
    assert (await store.row(tables.session_input, session_id))["wake_attempts"] == 3


@pytest.mark.conformance("REC-10")
@pytest.mark.parametrize("where", ["message", "inbox"])
async def test_a_continuation_of_another_session_is_put_aside(recovering: Recovering, where: str) -> None:
    """Its id is a message or an input there: by the scan, and by a turn that comes to it first."""
    store = recovering.store
    other, session_id, early = [await store.new_session() for _ in range(3)]
    await store.admit(other, "mine", input_id="msg_theirs")
    if where == "message":
        await store.claim_and_prepare(other)
    await recovering.recovery(session_id, continuation_message_id="msg_theirs")
    await recovering.recovery(early, continuation_message_id="msg_theirs", wake_pending=False)
    before = await store.everything(other)

    assert await recovering.did() == [(session_id, "quarantined")]
    assert not (await store.claim_and_prepare(early)).continued
    errors = await recovering.errors(tables.session_recovery)
    assert set(errors) == {session_id, early}
    assert all("belongs to another session" in error for error in errors.values())
    assert await store.everything(other) == before
    assert recovering.runs.woken == []


@pytest.mark.conformance("REC-11")
async def test_input_whose_wake_was_lost_is_started(recovering: Recovering) -> None:
    """After five seconds, if it asks for execution and nobody owns the session; until it is promoted."""
    store = recovering.store
    young, recorded = await recovering.waiting(age=0), await store.new_session()
    await store.admit(recorded, "only recorded", resume=False)
    await recovering.age(tables.session_input, recorded, HOUR_MS)
    owned = await recovering.waiting()
    await store.claim(token_of(owned))
    lost = await recovering.waiting(age=5_000)

    assert await recovering.did() == [(lost, "woken")]
    row = await store.row(tables.session_input, lost)
    assert (row["wake_pending"], row["wake_attempts"], row["promoted_seq"]) == (True, 1, None)
    await recovering.age(tables.session_input, young, 5_000)
    assert await recovering.did() == [(young, "woken")]
    assert (await store.claim_and_prepare(lost)).promoted == 1
    row = await store.row(tables.session_input, lost)
    assert (row["wake_pending"], isinstance(row["promoted_seq"], int)) == (False, True)


@pytest.mark.conformance("REC-13")
async def test_a_recovery_whose_new_claim_died_before_promotion_is_started_again(recovering: Recovering) -> None:
    """The same row, once more; a second continuation is not made."""
    store, session_id = recovering.store, await recovering.abandoned()
    await recovering.scan()
    await store.claim(token_of(session_id, "run-2"))
    assert await recovering.did() == []
    await store.expire(session_id)
    await recovering.age(tables.session_recovery, session_id, 5_000)

    assert await recovering.did() == [(session_id, "freed"), (session_id, "woken")]
    row = await store.row(tables.session_recovery, session_id)
    assert (row["phase"], row["wake_attempts"]) == ("pending", 2)
    assert await recovering.did() == []
    await store.claim(token_of(session_id, "run-3"))
    assert (await store.prepare(token_of(session_id, "run-3"))).continued
    assert (await store.types(session_id)).count("synthetic") == 1


@pytest.mark.conformance("REC-16")
@pytest.mark.parametrize("named", [True, False])
async def test_a_wake_behind_a_newer_assistant_is_put_aside(recovering: Recovering, named: bool) -> None:
    """Whether the row names the answer that was cut off, or there was none: the session has answered since."""
    store = recovering.store
    session_id = await store.new_session()
    old = await store.begin(session_id)
    await old.say("first")
    await old.settle()
    new = await store.request(old.token, 2)
    await new.say("second")
    await new.settle()
    await store.release(old.token)
    await recovering.recovery(session_id, assistant_message_id=old.message_id if named else None)

    assert await recovering.did() == [(session_id, "quarantined")]
    assert "newer answer" in (await recovering.errors(tables.session_recovery))[session_id]
    assert recovering.runs.woken == []


@pytest.mark.conformance("REC-17")
async def test_a_recovery_overtaken_before_its_check_is_never_promoted(recovering: Recovering) -> None:
    """A turn that comes before any scan checks it itself, puts it aside, and has nothing to do."""
    store = recovering.store
    session_id = await store.new_session()
    work = await store.begin(session_id)
    await work.say("an answer")
    await work.settle()
    await store.release(work.token)
    await recovering.recovery(session_id)

    token = token_of(session_id, "run-2")
    await store.claim(token)
    prepared = await store.prepare(token)
    assert (prepared.continued, prepared.promoted) == (False, 0)
    assert "synthetic" not in await store.types(session_id)
    assert "newer answer" in (await recovering.errors(tables.session_recovery))[session_id]
    assert await store.release(token) == "done"


@pytest.mark.conformance("REC-18")
async def test_a_continuation_that_was_put_aside_is_not_promoted_as_a_steer(recovering: Recovering) -> None:
    """A prompt that comes later is promoted alone."""
    store = recovering.store
    session_id = await store.new_session()
    made = await recovering.recovery(session_id, assistant_message_id="msg_nowhere")
    assert await recovering.did() == [(session_id, "quarantined")]
    assert await store.rows(tables.session_input, session_id) == []
    await store.admit(session_id, "the user's own")

    prepared = await store.claim_and_prepare(session_id)
    assert (prepared.promoted, prepared.continued) == (1, False)
    messages = await store.messages(session_id)
    assert [message.type for message in messages] == ["user"]
    assert made["continuation_message_id"] not in {message.id for message in messages}


async def test_a_wake_is_made_by_one_scan_of_many(recovering: Recovering) -> None:
    """Scans at the same time do not add up."""
    sessions = [await recovering.waiting() for _ in range(4)]
    for session_id in sessions[:2]:
        await recovering.recovery(session_id)
    seen = [
        *await recovering.store.do(recovery.recoveries, 10),
        *await recovering.store.do(recovery.lost_inputs, 10),
    ]
    tries = [recovering.store.do(recovery.take, wake) for wake in seen for _ in range(5)]
    outcomes = await asyncio.gather(*tries)

    assert [outcome.did for outcome in outcomes].count("woken") == len(seen)
    assert {outcome.did for outcome in outcomes} == {"woken", "passed"}


_SETTLED = (
    """
    INSERT INTO session_input (id, session_id, prompt, delivery, admitted_seq, promoted_seq, time_created)
    SELECT 'msg_' || n, :s, '{}', 'steer', n, n, n FROM generate_series(100, 20099) AS n
    """,
    """
    INSERT INTO session_recovery
        (session_id, execution_id, continuation_message_id, phase, wake_pending, time_created)
    SELECT :s, 'exe_' || n, 'msg_c' || n, 'promoted', false, n FROM generate_series(1, 20000) AS n
    """,
    """
    INSERT INTO session_execution (id, session_id, owner_id, phase, time_created, expires_at)
    SELECT 'exe_' || n, 'ses_' || n || :s, 'run', 'ready', n, 9000000000000 FROM generate_series(1, 20000) AS n
    """,
)


async def test_the_scan_finds_its_work_by_indexes(recovering: Recovering) -> None:
    """Among many settled rows: none of the three queries reads a table from end to end."""
    await recovering.sql("SET synchronous_commit TO off")
    session_id = await recovering.waiting()
    for rows in _SETTLED:
        await recovering.sql(rows, s=session_id)
    await recovering.sql("ANALYZE session_input, session_recovery, session_execution")

    for statement, index in (
        (recovery._EXPIRED, "session_execution_expiry_idx"),
        (recovery._RECOVERIES, "session_recovery_wake_idx"),
        (recovery._INPUTS, "session_input_wake_idx"),
    ):
        async with recovering.store.database.read() as conn:
            explained = text(
                "EXPLAIN (ANALYZE, COSTS OFF) " + statement._sql.replace("$1::BIGINT", "50").replace("$1", "50")
            )
            plan = "\n".join((await conn.execute(explained)).scalars())
        assert index in plan, plan
        assert "Seq Scan" not in plan, plan
        assert "Rows Removed by Filter" not in plan, plan
    assert await recovering.did() == [(session_id, "woken")]
