"""What a session does, as the tables have it: after any write, and so after any crash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fencepost.domain.status import GIVEN_UP, LEASE_RAN_OUT, WITHOUT_RUN, Activity, Claim, Facts, State, activity
from fencepost.store import status, steps
from fencepost.store.steps import Interruption, Settlement
from tests.store.kit import LEASE, StoreKit, token_of

CLAIM = Claim("exe_1", "run-1", "ready", age=1_000, left=59_000, stage="requested", attempt=1)


@pytest.mark.parametrize(
    ("facts", "state", "reason"),
    [
        (Facts(), "idle", None),
        (Facts(ended="ended"), "idle", None),
        (Facts(ended="failed", error="no such model"), "failed", "no such model"),
        (Facts(ended="interrupted", interruption="user"), "interrupted", "user"),
        (Facts(ended="interrupted", interruption="terminated"), "interrupted", "terminated"),
        (Facts(ended="interrupted", interruption="lost"), "failed", GIVEN_UP),
        (Facts(ended="ended", wakes=1), "waiting", WITHOUT_RUN),
        (Facts(ended="failed", error="no such model", wakes=2), "waiting", WITHOUT_RUN),
        (Facts(CLAIM, wakes=1), "busy", None),
        (Facts(replace(CLAIM, stage="claimed", attempt=0)), "busy", None),
        (Facts(replace(CLAIM, stage="settled")), "busy", None),
        (Facts(replace(CLAIM, stage=None)), "busy", None),
        (Facts(replace(CLAIM, failed_attempt=1)), "retrying", "request 1 of this step failed"),
        (Facts(replace(CLAIM, attempt=3, failed_attempt=2)), "retrying", "request 2 of this step failed"),
        (Facts(replace(CLAIM, attempt=3, failed_attempt=2, answering=True)), "busy", None),
        (Facts(replace(CLAIM, attempt=3, failed_attempt=3, stage="settled")), "busy", None),
        (Facts(replace(CLAIM, left=0)), "waiting", LEASE_RAN_OUT),
        (Facts(replace(CLAIM, put_aside="no such run")), "busy", None),
        (
            Facts(replace(CLAIM, left=-1, put_aside="no such run")),
            "failed",
            "its claim is put aside until it is used again: no such run",
        ),
        (Facts(replace(CLAIM, phase="unknown"), interruption="user", ended="interrupted"), "interrupted", "user"),
        (Facts(replace(CLAIM, phase="unknown"), interruption="shutdown", ended="interrupted"), "waiting", "shutdown"),
    ],
)
def test_what_a_session_does_follows_from_the_facts(facts: Facts, state: State, reason: str | None) -> None:
    assert activity(facts) == Activity(state, reason, facts.claim)


async def state_of(store: StoreKit, session_id: str) -> Activity:
    async with store.database.read() as conn:
        return (await status.activities(conn, [session_id]))[session_id]


async def is_active(store: StoreKit, session_id: str) -> bool:
    async with store.database.read() as conn:
        return session_id in await status.active(conn)


async def _claimed(store: StoreKit, session_id: str) -> None:
    await store.admit(session_id)
    await store.claim(token_of(session_id))


async def _failed_once(store: StoreKit, session_id: str) -> None:
    work = await store.begin(session_id)
    await store.do(steps.attempt_failed, work.token, 1, 1)


async def _asked_again(store: StoreKit, session_id: str) -> None:
    await _failed_once(store, session_id)
    await store.do(steps.request, token_of(session_id), 1, 2, LEASE)


async def _expired(store: StoreKit, session_id: str) -> None:
    await store.begin(session_id)
    await store.expire(session_id)


async def _stopped(store: StoreKit, session_id: str) -> None:
    work = await store.begin(session_id)
    await work.settle(Settlement(Interruption("user", "int_1")))


async def _given_back(store: StoreKit, session_id: str) -> None:
    await _stopped(store, session_id)
    await store.release(token_of(session_id), interrupted=True)


async def _done(store: StoreKit, session_id: str) -> None:
    work = await store.begin(session_id)
    await work.settle()
    await store.release(work.token)


async def _refused(store: StoreKit, session_id: str) -> None:
    work = await store.begin(session_id)
    await work.settle(work.failed("no such model"))
    await store.release(work.token)


async def _done_since(store: StoreKit, session_id: str) -> None:
    await _refused(store, session_id)
    work = await store.begin(session_id, ordinal=2)
    await work.settle()
    await store.release(work.token)


async def _nothing(store: StoreKit, session_id: str) -> None:
    pass


async def _recorded(store: StoreKit, session_id: str) -> None:
    await store.admit(session_id, resume=False)


async def _admitted(store: StoreKit, session_id: str) -> None:
    await store.admit(session_id)


@pytest.mark.conformance("COO-04")
@pytest.mark.parametrize(
    ("make", "state", "active"),
    [
        (_nothing, "idle", False),
        (_recorded, "idle", False),
        (_admitted, "waiting", False),
        (_claimed, "busy", True),
        (StoreKit.begin, "busy", True),
        (_failed_once, "retrying", True),
        (_asked_again, "retrying", True),
        (_expired, "waiting", False),
        (_stopped, "interrupted", True),
        (_given_back, "interrupted", False),
        (_done, "idle", False),
        (_refused, "failed", False),
        (_done_since, "idle", False),
    ],
)
async def test_a_session_is_active_exactly_while_its_claim_lives(
    store: StoreKit, session_id: str, make: Callable[[StoreKit, str], Awaitable[Any]], state: State, active: bool
) -> None:
    await make(store, session_id)
    found = await state_of(store, session_id)

    assert found.state == state
    assert await is_active(store, session_id) is active
    assert (found.claim is not None and found.claim.live) is active


async def test_the_claim_says_whose_it_is_and_how_its_lease_is(store: StoreKit, session_id: str) -> None:
    await _claimed(store, session_id)
    claim = (await state_of(store, session_id)).claim
    await store.expire(session_id)
    lapsed = (await state_of(store, session_id)).claim

    assert claim is not None
    assert claim.run_id == "run-1"
    assert claim.execution_id == token_of(session_id).execution_id
    assert 0 <= claim.age < 60_000
    assert LEASE.length - 60_000 < claim.left <= LEASE.length
    assert lapsed is not None
    assert lapsed.left < 0


async def test_a_page_of_sessions_leaves_out_what_is_not_there(store: StoreKit) -> None:
    ids = [await store.new_session() for _ in range(5)]
    await _refused(store, ids[1])
    await _claimed(store, ids[3])
    async with store.database.read() as conn:
        found = await status.activities(conn, [*ids, "ses_not_there"])

    assert [found[one].state for one in ids] == ["idle", "failed", "idle", "busy", "idle"]
    assert set(found) == set(ids)
