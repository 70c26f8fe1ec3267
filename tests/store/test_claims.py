"""Claiming, taking over and releasing: at any time one execution owns a session, and no input is stranded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fencepost.domain.errors import ClaimRefusedError, OwnershipLostError
from fencepost.domain.ownership import OwnerRun
from fencepost.store import claims, event_log, steps, tables
from fencepost.store.claims import AskAgainError, Claimed, Seen, Wanted
from fencepost.store.ownership import owner_of
from tests.store.kit import LEASE, USER_STOP, StoreKit, token_of


async def test_a_claim_of_an_idle_session_writes_no_row_unless_it_is_forced(store: StoreKit, session_id: str) -> None:
    """Nothing waits, so there is nothing to hold the session for."""
    idle = await store.claim(token_of(session_id, ordinal=1))
    forced = await store.claim(token_of(session_id, ordinal=2), force=True)

    assert (idle.held, forced.held) == (False, True)
    assert (await store.row(tables.session_execution, session_id))["id"] == token_of(session_id, ordinal=2).execution_id


async def test_a_claim_promotes_nothing_and_clears_no_wake(store: StoreKit, session_id: str) -> None:
    """A claim that crashes before it prepares leaves the inbox as it was."""
    await store.admit(session_id)
    before = await store.rows(tables.session_input, session_id), await store.events(session_id)

    assert (await store.claim(token_of(session_id))).held
    assert (await store.rows(tables.session_input, session_id), await store.events(session_id)) == before
    row = await store.row(tables.session_execution, session_id)
    assert (row["phase"], row["assistant_message_id"], row["owner_id"]) == ("ready", None, "run-1")
    assert row["expires_at"] == row["time_created"] + LEASE.length


@pytest.mark.parametrize("repetition", range(3))
async def test_of_two_claimants_one_wins(store: StoreKit, repetition: int) -> None:
    """The other one is told to look again, and then that the session is owned."""
    session_id = await store.new_session()
    await store.admit(session_id)
    tokens = [token_of(session_id, f"run-{n}") for n in range(6)]

    outcomes: list[Any] = await asyncio.gather(*(store.claim(t) for t in tokens), return_exceptions=True)

    winners = [token for token, outcome in zip(tokens, outcomes, strict=True) if outcome == Claimed(held=True)]
    assert len(winners) == 1
    assert all(isinstance(outcome, AskAgainError) for outcome in outcomes if outcome != Claimed(held=True))
    row = await store.row(tables.session_execution, session_id)
    assert (row["id"], row["owner_id"]) == (winners[0].execution_id, winners[0].owner_id)
    for loser in tokens:
        if loser not in winners:
            with pytest.raises(ClaimRefusedError):
                await store.claim(loser, owner_run="open")


@pytest.mark.parametrize("repetition", range(3))
async def test_of_two_claimants_of_a_dead_owners_session_one_wins(store: StoreKit, repetition: int) -> None:
    """Both saw the same dead owner; the second finds that the owner is another one by now."""
    session_id = await store.new_session()
    await store.begin(session_id, run="dead")
    async with store.database.read() as conn:
        owner = await owner_of(conn, session_id)
    assert owner is not None
    tokens = [token_of(session_id, f"run-{n}") for n in range(4)]
    outcomes: list[Any] = await asyncio.gather(
        *(store.do(claims.claim, Wanted(t), Seen(owner, "closed"), LEASE) for t in tokens), return_exceptions=True
    )

    assert sum(outcome == Claimed(held=True) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, AskAgainError) for outcome in outcomes) == 3
    assert (await store.types(session_id)).count("step.interrupted") == 1
    assert len(await store.rows(tables.session_recovery, session_id)) == 1


@pytest.mark.parametrize(
    ("run", "expired", "taken"),
    [
        ("open", False, False),
        ("open", True, False),
        ("closed", False, True),
        ("closed", True, True),
        ("reset", False, True),
        ("terminated", False, True),
        ("cancelled", False, True),
        ("not-found", False, False),
        ("not-found", True, True),
        ("unreachable", False, False),
        ("unreachable", True, False),
    ],
)
async def test_who_may_take_over_is_decided_by_the_owners_run_and_the_lease(
    store: StoreKit, session_id: str, run: OwnerRun, expired: bool, taken: bool
) -> None:
    """An expired lease alone lets nobody in."""
    work = await store.begin(session_id)
    await store.admit(session_id, "and then?")
    if expired:
        await store.expire(session_id)
    before = await store.everything(session_id)
    other = token_of(session_id, "run-2")

    if taken:
        assert (await store.claim(other, owner_run=run)).held
        row = await store.row(tables.session_execution, session_id)
        assert (row["id"], row["owner_id"], row["phase"]) == (other.execution_id, "run-2", "ready")
        assert row["assistant_message_id"] is None
        assert row["expires_at"] > (await store.events(session_id))[-1].data["timestamp"]
    else:
        with pytest.raises(ClaimRefusedError, match="owned by run run-1"):
            await store.claim(other, owner_run=run)
        assert await store.everything(session_id) == before
        assert (await store.row(tables.session_execution, session_id))["id"] == work.token.execution_id


async def test_a_run_takes_over_from_its_own_earlier_execution(store: StoreKit, session_id: str) -> None:
    """After a lost activity the same run goes on under a new execution id, without asking anybody."""
    work = await store.begin(session_id)
    again = token_of(session_id, ordinal=2)

    assert (await store.claim(again)).held
    assert (await store.row(tables.session_execution, session_id))["id"] == again.execution_id
    with pytest.raises(OwnershipLostError):
        await work.publish(work.started())


async def test_an_answer_about_a_former_owner_does_not_count(store: StoreKit, session_id: str) -> None:
    """What Temporal said of one run says nothing of the run that owns the session now."""
    await store.begin(session_id)
    async with store.database.read() as conn:
        owner = await owner_of(conn, session_id)
    assert owner is not None
    await store.claim(token_of(session_id, "run-2"), owner_run="closed")

    with pytest.raises(AskAgainError):
        await store.do(claims.claim, Wanted(token_of(session_id, "run-3")), Seen(owner, "closed"), LEASE)


async def test_a_lease_that_was_renewed_since_temporal_was_asked_refuses(store: StoreKit, session_id: str) -> None:
    """The lease is looked at again under the lock."""
    work = await store.begin(session_id)
    await store.expire(session_id)
    async with store.database.read() as conn:
        owner = await owner_of(conn, session_id)
    assert owner is not None
    assert owner.expired
    assert (await store.claim(work.token)).held

    with pytest.raises(ClaimRefusedError):
        await store.do(claims.claim, Wanted(token_of(session_id, "run-2")), Seen(owner, "not-found"), LEASE)


async def test_the_own_row_is_renewed_although_it_expired(store: StoreKit, session_id: str) -> None:
    """A run that waited longer than its lease goes on if nobody took the session."""
    work = await store.begin(session_id)
    await store.expire(session_id)
    with pytest.raises(OwnershipLostError):
        await work.publish(work.started())

    assert (await store.claim(work.token)).held
    assert len(await work.publish(work.started())) == 1


async def test_a_superseded_claim_does_not_come_back(store: StoreKit, session_id: str) -> None:
    """A late twin of an earlier claim of the same run is refused."""
    await store.begin(session_id)
    assert (await store.claim(token_of(session_id, ordinal=2), force=True)).held
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="superseded"):
        await store.claim(token_of(session_id, ordinal=1), force=True)
    assert await store.everything(session_id) == before


async def test_a_claim_that_had_nothing_to_run_never_holds_later(store: StoreKit, session_id: str) -> None:
    """Its late twin finds work, but that is the business of the claim that came after."""
    idle, next_one = token_of(session_id, ordinal=1), token_of(session_id, ordinal=2)
    assert not (await store.claim(idle)).held
    await store.admit(session_id)

    assert not (await store.claim(idle)).held
    assert await store.rows(tables.session_execution, session_id) == []
    assert (await store.claim(next_one)).held
    before = await store.everything(session_id)
    assert not (await store.claim(idle)).held
    assert await store.everything(session_id) == before


@pytest.mark.parametrize("repetition", range(3))
async def test_twins_of_one_claim_both_hold_it(store: StoreKit, repetition: int) -> None:
    """The same claim made twice at the same time is one claim."""
    session_id = await store.new_session()
    await store.admit(session_id)
    token = token_of(session_id)

    async def asking() -> Claimed:
        while True:
            try:
                return await store.claim(token)
            except AskAgainError:
                continue

    assert await asyncio.gather(*(asking() for _ in range(5))) == [Claimed(held=True)] * 5
    assert len(await store.rows(tables.execution_ledger, session_id)) == 1
    assert (await store.row(tables.session_execution, session_id))["id"] == token.execution_id


async def test_a_release_deletes_the_row_and_says_done(store: StoreKit, session_id: str) -> None:
    """An idle session costs no row."""
    work = await store.begin(session_id)
    await work.settle()

    assert await store.release(work.token) == "done"
    assert await store.rows(tables.session_execution, session_id) == []
    assert (await store.row(tables.execution_ledger, session_id))["stage"] == "released"


async def test_a_release_is_refused_while_the_step_is_open(store: StoreKit, session_id: str) -> None:
    """A row that goes away under a live stream would let a second one in."""
    work = await store.begin(session_id)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="still open"):
        await store.release(work.token)
    assert await store.everything(session_id) == before


async def test_a_release_asked_again_looks_at_the_inbox_again(store: StoreKit, session_id: str) -> None:
    """It answers for now: done, or that there is work which needs a new claim."""
    work = await store.begin(session_id)
    await work.settle()
    assert await store.release(work.token) == "done"
    after = await store.everything(session_id)

    assert await store.release(work.token) == "done"
    assert await store.everything(session_id) == after
    await store.admit(session_id, "one more")
    assert await store.release(work.token) == "lost"
    assert await store.rows(tables.session_execution, session_id) == []


@pytest.mark.parametrize("repetition", range(3))
async def test_twins_of_one_release_answer_the_same(store: StoreKit, repetition: int) -> None:
    """Released at the same time several times, it is released once."""
    session_id = await store.new_session()
    work = await store.begin(session_id)
    await work.settle()

    assert await asyncio.gather(*(store.release(work.token) for _ in range(5))) == ["done"] * 5
    assert await store.rows(tables.session_execution, session_id) == []


async def test_after_an_interrupt_only_input_that_asks_for_execution_keeps_the_session(
    store: StoreKit, session_id: str
) -> None:
    """What the user stopped waits for the next call; what came after the stop does not wait."""
    work = await store.begin(session_id)
    await store.admit(session_id, "queued", delivery="queue")
    await work.settle(USER_STOP)
    first = await store.release(work.token, interrupted=True)
    assert first == "done"

    held = await store.begin(session_id, "later", run="run-2")
    await held.settle(USER_STOP)
    await store.admit(session_id, "after the stop")
    assert await store.release(held.token, interrupted=True) == "more"


async def test_a_stop_drops_a_continuation_that_has_not_begun(store: StoreKit, session_id: str) -> None:
    """The user stops a turn that was just taken over from a dead run: it does not go on by itself."""
    await store.begin(session_id, run="dead")
    token = token_of(session_id, "run-2")
    assert (await store.claim(token, owner_run="closed")).held
    await store.do(steps.settle, token, 1, USER_STOP, LEASE)

    assert await store.release(token, interrupted=True) == "done"
    assert await store.release(token) == "done"
    [row] = await store.rows(tables.session_recovery, session_id)
    assert (row["phase"], row["wake_pending"]) == ("stopped", False)


@pytest.mark.parametrize("repetition", range(6))
async def test_input_admitted_during_a_release_is_never_stranded(store: StoreKit, repetition: int) -> None:
    """Either the release sees it, or the admission sees that nobody will look."""
    session_id = await store.new_session()
    work = await store.begin(session_id)
    await work.settle()
    calls: list[Any] = [store.release(work.token), store.admit(session_id, "just now")]
    if repetition % 2:
        calls.reverse()
    results = await asyncio.gather(*calls)
    released, admission = results if not repetition % 2 else results[::-1]

    assert (released == "more") is admission.claimed


@pytest.mark.parametrize("release_first", [True, False])
async def test_release_and_admission_wait_for_one_another(
    store: StoreKit, session_id: str, release_first: bool
) -> None:
    """Whichever has the log's end first, the other one looks after it has committed."""
    work = await store.begin(session_id)
    await work.settle()
    first = store.release(work.token) if release_first else store.admit(session_id, "just now")
    second = store.admit(session_id, "just now") if release_first else store.release(work.token)

    async with store.database.begin() as gate:
        await event_log.lock(gate, session_id)
        one: asyncio.Task[Any] = asyncio.create_task(first)
        await store.waiting(1)
        two: asyncio.Task[Any] = asyncio.create_task(second)
        await store.waiting(2)
    released, admission = (await one, await two) if release_first else (await two, await one)

    assert (released, admission.claimed) == (("done", False) if release_first else ("more", True))
