"""Abandoned executions: a scan settles each of them once, leaves alone what is not its own, and puts poison aside."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.domain.messages import SyntheticMessage
from fencepost.domain.ownership import OwnerRun
from fencepost.store import recovery, tables
from fencepost.store.recovery import Abandoned
from tests.store.kit import LEASE, StoreKit, token_of
from tests.store.recovery_kit import HOUR_MS, Recovering, recovering

__all__ = ["recovering"]


async def _claims(store: StoreKit, session_id: str) -> int:
    return len(await store.rows(tables.session_execution, session_id))


@pytest.mark.conformance("REC-01", "COO-05")
async def test_an_abandoned_execution_becomes_one_continuation(recovering: Recovering) -> None:
    """The step is settled, the claim is gone, and one row asks for the turn to go on: all in one transaction."""
    store, session_id = recovering.store, await recovering.abandoned()
    before = await store.everything(session_id)
    seen = (await store.do(recovery.abandoned, 10))[0]

    class _CrashError(Exception):
        pass

    async def crashing(conn: object) -> None:
        outcome = await recovery.reconcile(conn, seen, "closed", 3, LEASE)  # type: ignore[arg-type]
        assert outcome.did == "continued"
        raise _CrashError

    with pytest.raises(_CrashError):
        await store.database.transact(crashing)
    assert await store.everything(session_id) == before

    assert await recovering.did() == [(session_id, "continued"), (session_id, "woken")]
    assert await _claims(store, session_id) == 0
    assert (await store.types(session_id))[-1] == "step.interrupted"
    row = await store.row(tables.session_recovery, session_id)
    assert (row["execution_id"], row["phase"], row["recovery_error"]) == (seen.execution_id, "pending", None)
    assert recovering.runs.asked == [(session_id, "run-1")]
    assert recovering.runs.woken == [session_id]


@pytest.mark.conformance("REC-02")
async def test_a_continuation_names_the_answer_that_was_cut_off_and_no_other(recovering: Recovering) -> None:
    """It becomes a synthetic message under an id of its own; no assistant message is made up for it."""
    store, session_id = recovering.store, await recovering.abandoned()
    cut = await store.assistant(session_id)
    await recovering.scan()
    row = await store.row(tables.session_recovery, session_id)
    assert row["assistant_message_id"] == cut.id
    assert row["continuation_message_id"] != cut.id
    assert [m.type for m in await store.messages(session_id)] == ["user", "assistant"]

    await store.claim(token_of(session_id, "run-2"))
    assert (await store.prepare(token_of(session_id, "run-2"))).continued
    messages = await store.messages(session_id)
    assert [m.type for m in messages] == ["user", "assistant", "synthetic"]
    assert isinstance(messages[-1], SyntheticMessage)
    assert messages[-1].id == row["continuation_message_id"]


@pytest.mark.conformance("REC-02")
async def test_a_request_without_an_answer_names_none(recovering: Recovering) -> None:
    """The run was lost between the request and the first word."""
    store = recovering.store
    session_id = await store.new_session()
    await store.begin(session_id)
    await store.expire(session_id)
    await recovering.scan()

    assert (await store.row(tables.session_recovery, session_id))["assistant_message_id"] is None
    await store.claim(token_of(session_id, "run-2"))
    assert (await store.prepare(token_of(session_id, "run-2"))).continued


@pytest.mark.conformance("REC-03")
async def test_scans_recover_an_execution_once(recovering: Recovering) -> None:
    """Many at the same time, and again later: one continuation, one interruption, one wake."""
    store, session_id = recovering.store, await recovering.abandoned()
    reports = await asyncio.gather(*(recovering.scan() for _ in range(4)))
    await recovering.scan()

    did = [one.outcome.did for report in reports for one in report.findings]
    assert sorted(did) == ["continued", "woken"]
    assert len(await store.rows(tables.session_recovery, session_id)) == 1
    assert (await store.types(session_id)).count("step.interrupted") == 1
    await store.claim(token_of(session_id, "run-2"))
    await store.prepare(token_of(session_id, "run-2"))
    await recovering.scan()
    assert (await store.types(session_id)).count("synthetic") == 1
    assert recovering.runs.woken == [session_id]


@pytest.mark.conformance("REC-04")
async def test_a_live_lease_is_left_alone(recovering: Recovering) -> None:
    """It is not even asked about; nor is one that was renewed after the scan had seen it expired."""
    store = recovering.store
    live = await store.new_session()
    await store.begin(live)
    before = await store.everything(live)
    assert await recovering.did() == []
    assert (await store.everything(live), recovering.runs.asked) == (before, [])

    renewed = await recovering.abandoned()
    [seen] = await store.do(recovery.abandoned, 10)
    assert (await store.claim(token_of(renewed))).renewed
    before = await store.everything(renewed)
    assert (await store.do(recovery.reconcile, seen, "closed", 3, LEASE)).did == "passed"
    assert await store.everything(renewed) == before


async def test_an_open_run_gets_its_lease_back(recovering: Recovering) -> None:
    """It may be waiting for something; only its token is compared, and it goes on."""
    store, session_id = recovering.store, await recovering.abandoned()
    recovering.runs.states[session_id] = "open"
    log = await store.events(session_id)

    assert await recovering.did() == [(session_id, "postponed")]
    assert await recovering.did() == []
    assert await store.events(session_id) == log
    row = await store.row(tables.session_execution, session_id)
    assert row["id"] == token_of(session_id).execution_id
    assert row["expires_at"] > row["time_created"]


async def test_a_scan_ends_where_temporal_does_not_answer(recovering: Recovering) -> None:
    """Nothing is taken over on a guess; the next scan does it."""
    store, session_id = recovering.store, await recovering.abandoned()
    waiting = await recovering.waiting()
    recovering.runs.away = True
    before = await store.everything(session_id), await store.everything(waiting)
    report = await recovering.scan()
    assert (report.findings, report.cut_off is None) == ([], False)
    assert (await store.everything(session_id), await store.everything(waiting)) == before

    recovering.runs.away = False
    assert (await recovering.scan()).cut_off is None
    assert sorted(recovering.runs.woken) == sorted([session_id, waiting])


@pytest.mark.parametrize("run", ["terminated", "cancelled"])
async def test_what_a_user_ended_is_settled_and_not_continued(recovering: Recovering, run: OwnerRun) -> None:
    """Its input waits for the next call of a client."""
    store, session_id = recovering.store, await recovering.abandoned()
    recovering.runs.states[session_id] = run

    assert await recovering.did() == [(session_id, "settled")]
    assert await _claims(store, session_id) == 0
    assert (await store.events(session_id))[-1].data["reason"] == run
    assert await store.rows(tables.session_recovery, session_id) == []
    assert recovering.runs.woken == []


@pytest.mark.conformance("REC-05")
async def test_an_execution_behind_a_newer_assistant_is_not_recovered(recovering: Recovering) -> None:
    """The session has gone on without it: nothing is appended, nothing continued."""
    store, session_id = recovering.store, await recovering.abandoned()
    await recovering.sql(
        "INSERT INTO session_message SELECT 'msg_newer', session_id, type, seq + 100, time_created, time_updated, data "
        "FROM session_message WHERE session_id = :s AND type = 'assistant'",
        s=session_id,
    )
    log = await store.events(session_id)

    assert await recovering.did() == [(session_id, "overtaken")]
    assert await store.events(session_id) == log
    assert await store.rows(tables.session_recovery, session_id) == []
    assert await _claims(store, session_id) == 0


@pytest.mark.conformance("REC-12")
async def test_a_claim_that_died_before_promotion_leads_to_its_input_being_run(recovering: Recovering) -> None:
    """No continuation and no interruption: nothing had begun."""
    store, session_id = recovering.store, await recovering.waiting()
    await store.claim(token_of(session_id))
    await store.expire(session_id)
    log = await store.events(session_id)

    assert await recovering.did() == [(session_id, "freed"), (session_id, "woken")]
    assert await store.events(session_id) == log
    assert await store.rows(tables.session_recovery, session_id) == []
    row = await store.row(tables.session_input, session_id)
    assert (row["wake_pending"], row["promoted_seq"]) == (True, None)
    await store.claim(token_of(session_id, "run-2"))
    assert (await store.prepare(token_of(session_id, "run-2"))).promoted == 1


@pytest.mark.conformance("REC-14")
async def test_input_committed_at_the_last_moment_is_no_reason_to_recover_a_claim(recovering: Recovering) -> None:
    """Admitted while the scan waits for the session's log: the claim had promoted nothing, so nothing is continued."""
    store = recovering.store
    session_id = await store.new_session()
    await store.claim(token_of(session_id), force=True)
    await store.expire(session_id)
    async with store.database.begin() as conn:
        await conn.exec_driver_sql(f"SELECT * FROM event_sequence WHERE aggregate_id = '{session_id}' FOR UPDATE")
        admitting = asyncio.create_task(store.admit(session_id, "just now"))
        await store.waiting(1)
        scanning = asyncio.create_task(recovering.scan())
        await store.waiting(2)
    await admitting
    report = await scanning

    assert [one.outcome.did for one in report.findings][:1] == ["freed"]
    assert await store.rows(tables.session_recovery, session_id) == []
    assert await store.types(session_id) == ["prompt.admitted"]
    row = await store.row(tables.session_input, session_id)
    assert (row["wake_pending"], row["promoted_seq"]) == (True, None)


@pytest.mark.conformance("REC-15")
async def test_an_assistant_of_another_session_is_never_recovered(recovering: Recovering) -> None:
    """Neither by way of a claim nor of a continuation that names it."""
    store, session_id = recovering.store, await recovering.abandoned()
    other = await store.new_session()
    work = await store.begin(other)
    await work.say("mine")
    await recovering.set(tables.session_execution, session_id, assistant_message_id=work.message_id)
    third = await store.new_session()
    await recovering.recovery(third, assistant_message_id=work.message_id)
    before = await store.everything(other)

    assert sorted(await recovering.did()) == sorted([(session_id, "quarantined"), (third, "quarantined")])
    assert "another session" in (await recovering.errors(tables.session_execution))[session_id]
    assert "another session" in (await recovering.errors(tables.session_recovery))[third]
    assert await store.everything(other) == before
    assert await store.rows(tables.session_recovery, session_id) == []
    assert not (await store.claim(token_of(third))).held


@pytest.mark.conformance("REC-19")
@pytest.mark.parametrize("broken", [{"phase": "dancing"}, {"id": ""}, {"owner_id": ""}, {"session_id": "ses_nobody"}])
async def test_a_malformed_claim_is_put_aside(recovering: Recovering, broken: dict[str, str]) -> None:
    """With its error, and the valid one behind it is recovered by the same scan."""
    store = recovering.store
    bad, good = await recovering.abandoned(), await recovering.abandoned()
    await recovering.set(tables.session_execution, bad, **broken)
    await recovering.set(tables.session_execution, good, expires_at=2)
    session_id = broken.get("session_id", bad)

    assert await recovering.did(batch=1) == [(session_id, "quarantined"), (good, "continued"), (good, "woken")]
    assert "malformed claim" in (await recovering.errors(tables.session_execution))[session_id]
    assert await _claims(store, session_id) == 1
    assert await recovering.did() == []


@pytest.mark.conformance("REC-19")
async def test_a_claim_over_rows_that_cannot_be_read_is_put_aside(recovering: Recovering) -> None:
    """What the reconciliation stumbles over stays as it was, and is said."""
    store, session_id = recovering.store, await recovering.abandoned()
    await recovering.sql("UPDATE session_message SET data = '{\"content\": 7}' WHERE type = 'assistant'")
    log = await store.events(session_id)

    assert await recovering.did() == [(session_id, "quarantined")]
    assert await store.events(session_id) == log
    assert "cannot be reconciled" in (await recovering.errors(tables.session_execution))[session_id]


@pytest.mark.conformance("REC-20")
async def test_a_scan_has_a_bound_and_a_fixed_order(recovering: Recovering) -> None:
    """So many of each kind; those first that have waited longest; and the next scan goes on where this one ended."""
    store = recovering.store
    claimed = [await recovering.abandoned() for _ in range(5)]
    waiting = [await recovering.waiting(age=HOUR_MS - n) for n in range(5)]
    order = [claimed[n] for n in (2, 0, 4, 1, 3)]
    for n, session_id in enumerate(order):
        await recovering.set(tables.session_execution, session_id, expires_at=1 + n)
    assert [one.session_id for one in await store.do(recovery.abandoned, 3)] == order[:3]

    dry = await recovering.did(batch=2, dry_run=True)
    assert dry == [(order[0], "continued"), (order[1], "continued"), (waiting[0], "woken"), (waiting[1], "woken")]
    first = await recovering.did(batch=2)
    assert first[:2] == dry[:2]
    assert {session_id for session_id, did in first if did == "woken"} == {*order[:2], *waiting[:2]}
    assert len(first) == 6
    await recovering.did(batch=2)
    await recovering.did(batch=2)
    assert set(recovering.runs.woken) == {*claimed, *waiting}


async def test_a_dry_run_says_what_a_scan_would_do(recovering: Recovering) -> None:
    """And nothing has changed afterwards."""
    store = recovering.store
    lost, waiting = await recovering.abandoned(), await recovering.waiting()
    before = [await store.everything(one) for one in (lost, waiting)]

    assert await recovering.did(dry_run=True) == [(lost, "continued"), (waiting, "woken")]
    assert [await store.everything(one) for one in (lost, waiting)] == before
    assert recovering.runs.woken == []


async def test_a_turn_that_is_lost_again_and_again_is_given_up(recovering: Recovering) -> None:
    """The count outlives the claims that the scans delete, and a new prompt begins anew."""
    store, session_id = recovering.store, await recovering.abandoned()
    for run in ("run-2", "run-3"):
        assert (session_id, "continued") in await recovering.did(max_recoveries=2)
        work = await store.begin(session_id, None, run=run)
        await work.say("a bit more")
        await store.expire(session_id)

    assert await recovering.did(max_recoveries=2) == [(session_id, "given-up")]
    assert await _claims(store, session_id) == 0
    [error] = (await recovering.errors(tables.session_recovery)).values()
    assert "cut off more than 2 times" in error
    assert not (await store.claim(token_of(session_id, "run-4"))).held
    work = await store.begin(session_id, "again", run="run-5")
    await work.say("again")
    await store.expire(session_id)
    assert (session_id, "continued") in await recovering.did(max_recoveries=2)


async def test_a_scan_passes_what_another_one_has_locked(recovering: Recovering) -> None:
    """It does not wait: many workers scan at the same time."""
    store, session_id = recovering.store, await recovering.abandoned()
    [seen] = await store.do(recovery.abandoned, 10)
    assert seen == Abandoned(session_id, token_of(session_id).execution_id, "run-1", 1)
    async with store.database.begin() as conn:
        await conn.exec_driver_sql(f"SELECT * FROM session_execution WHERE session_id = '{session_id}' FOR UPDATE")
        assert (await store.do(recovery.reconcile, seen, "closed", 3, LEASE)).did == "passed"
