"""The fence: whoever holds no token writes nothing, neither events nor rows, through any door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from sqlalchemy import text

from fencepost.domain import events
from fencepost.domain.errors import OwnershipLostError
from fencepost.store import ownership, steps, tables
from tests.store.kit import LEASE, USER_STOP, StoreKit, Work, token_of

Door: TypeAlias = tuple[Callable[[StoreKit, str], Awaitable[Work]], Callable[[Work], Awaitable[Any]]]


async def _prepared(store: StoreKit, session_id: str) -> Work:
    await store.admit(session_id)
    token = token_of(session_id)
    await store.claim(token)
    return Work(store, token, 1, (await store.prepare(token)).assistant_message_id)


async def _requested(store: StoreKit, session_id: str) -> Work:
    return await store.begin(session_id)


async def _streaming(store: StoreKit, session_id: str) -> Work:
    work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id="t1"), *work.called("call_1"))
    return work


async def _tool_running(store: StoreKit, session_id: str) -> Work:
    work = await _streaming(store, session_id)
    await work.start_tool("call_1")
    return work


async def _settled(store: StoreKit, session_id: str) -> Work:
    work = await store.begin(session_id)
    await work.settle()
    return work


async def _settled_with_more(store: StoreKit, session_id: str) -> Work:
    work = await _settled(store, session_id)
    await store.admit(session_id, "and then?")
    return work


DOORS: dict[str, Door] = {
    "prepare": (_settled_with_more, lambda work: work.kit.prepare(work.token, 2)),
    "request": (_prepared, lambda work: work.kit.do(steps.request, work.token, 1, 1, LEASE)),
    "attempt failed": (_requested, lambda work: work.kit.do(steps.attempt_failed, work.token, 1, 1)),
    "publish": (_requested, lambda work: work.publish(work.started())),
    "keep live": (_streaming, lambda work: work.keep_live("so far")),
    "tool start": (_streaming, lambda work: work.start_tool("call_1")),
    "tool settle": (_tool_running, lambda work: work.settle_tool("call_1")),
    "settle": (_streaming, lambda work: work.settle()),
    "settle as interrupted": (_streaming, lambda work: work.settle(USER_STOP)),
    "release": (_settled, lambda work: work.kit.release(work.token)),
    "renewal": (_requested, lambda work: work.kit.do(ownership.hold, work.token)),
    "claim again": (_requested, lambda work: work.kit.claim(work.token)),
}

THEFTS = {
    "another run": "UPDATE session_execution SET owner_id = 'thief' WHERE session_id = :id",
    "another execution": "UPDATE session_execution SET id = 'exe_other' WHERE session_id = :id",
    "both": "UPDATE session_execution SET id = 'exe_other', owner_id = 'thief' WHERE session_id = :id",
    "nobody": "DELETE FROM session_execution WHERE session_id = :id",
}


async def _steal(store: StoreKit, session_id: str, theft: str) -> None:
    async with store.database.begin() as conn:
        await conn.execute(text(THEFTS[theft]), {"id": session_id})


@pytest.mark.parametrize("theft", THEFTS)
@pytest.mark.parametrize("door", DOORS)
async def test_a_stale_token_writes_nothing(store: StoreKit, session_id: str, door: str, theft: str) -> None:
    """Nothing but the execution row has changed, and that is enough."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)
    await _steal(store, session_id, theft)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError):
        await act(work)
    assert await store.everything(session_id) == before


@pytest.mark.conformance("REC-24")
@pytest.mark.parametrize("door", DOORS)
async def test_an_owner_that_was_paused_past_a_takeover_writes_nothing(
    store: StoreKit, session_id: str, door: str
) -> None:
    """Its lease has run out, what it left is reconciled, and another run goes on, when it wakes up."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)
    await store.expire(session_id)
    successor = token_of(session_id, "run-2")
    assert (await store.claim(successor, owner_run="closed", force=True)).held
    await store.prepare(successor)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError):
        await act(work)
    assert await store.everything(session_id) == before
    assert (await store.row(tables.session_execution, session_id))["owner_id"] == "run-2"


@pytest.mark.parametrize("door", DOORS)
async def test_every_door_opens_for_the_holder(store: StoreKit, session_id: str, door: str) -> None:
    """What the tests around this one see refused is refused for its token only."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)

    await act(work)


@pytest.mark.parametrize("door", ["request", "publish", "keep live", "tool start"])
async def test_what_may_have_effects_needs_a_running_lease(store: StoreKit, session_id: str, door: str) -> None:
    """A paused worker that wakes up after its lease shows nothing and starts nothing."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)
    await store.expire(session_id)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="ran out"):
        await act(work)
    assert await store.everything(session_id) == before


@pytest.mark.parametrize("door", ["prepare", "tool settle", "settle", "release"])
async def test_the_holder_may_finish_although_the_lease_ran_out(store: StoreKit, session_id: str, door: str) -> None:
    """The token excludes others; the lease only lets them in."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)
    await store.expire(session_id)

    await act(work)


@pytest.mark.parametrize("door", ["publish", "keep live", "tool start"])
async def test_a_settled_step_takes_nothing_more(store: StoreKit, session_id: str, door: str) -> None:
    """The same token, but the step is over: a hand that still moves changes nothing."""
    prepare, act = DOORS[door]
    work = await prepare(store, session_id)
    await work.settle()
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError):
        await act(work)
    assert await store.everything(session_id) == before


async def test_an_earlier_attempt_shows_nothing_beside_a_later_one(store: StoreKit, session_id: str) -> None:
    """The first attempt was recorded as failed; what it still has to say is too late."""
    work = await store.begin(session_id)
    await store.do(steps.attempt_failed, work.token, 1, 1)
    await store.do(steps.request, work.token, 1, 2, LEASE)
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="attempt 1 of step 1 is not open"):
        await work.publish(work.started())
    assert await store.everything(session_id) == before
    work.attempt = 2
    assert len(await work.publish(work.started())) == 1


async def test_a_request_is_made_again_only_after_its_failure_was_recorded(store: StoreKit, session_id: str) -> None:
    """Neither the same attempt twice, nor the next one while the first may still run, nor one too far."""
    work = await store.begin(session_id)
    for attempt in (1, 2):
        with pytest.raises(OwnershipLostError, match="is not due"):
            await store.do(steps.request, work.token, 1, attempt, LEASE)
    await store.do(steps.attempt_failed, work.token, 1, 1)
    for attempt in (1, 3):
        with pytest.raises(OwnershipLostError, match="is not due"):
            await store.do(steps.request, work.token, 1, attempt, LEASE)

    await store.do(steps.request, work.token, 1, 2, LEASE)


async def test_an_attempt_with_durable_output_is_never_made_again(store: StoreKit, session_id: str) -> None:
    """What was shown is not shown twice."""
    work = await store.begin(session_id)
    await work.publish(work.started())

    with pytest.raises(OwnershipLostError, match="durable output"):
        await store.do(steps.attempt_failed, work.token, 1, 1)


async def test_no_step_begins_while_another_one_is_open(store: StoreKit, session_id: str) -> None:
    """Input is not promoted into the middle of a stream, nor is another step settled in its place."""
    work = await _streaming(store, session_id)
    await store.admit(session_id, "in between")
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="still open"):
        await store.prepare(work.token, 2)
    with pytest.raises(OwnershipLostError, match="still open"):
        await store.do(steps.settle, work.token, 2, USER_STOP, LEASE)
    assert await store.everything(session_id) == before


async def test_a_tool_call_starts_once(store: StoreKit, session_id: str) -> None:
    """The effect follows the start, so a second start must never succeed."""
    work = await _streaming(store, session_id)
    planned = await work.start_tool("call_1")

    assert (planned.name, planned.input, planned.agent) == ("bash", {"command": "true"}, "build")
    assert planned.directory == "/work"
    with pytest.raises(OwnershipLostError, match="not to be started"):
        await work.start_tool("call_1")


async def test_a_call_that_was_never_planned_does_not_start(store: StoreKit, session_id: str) -> None:
    """Calls of the provider's own are executed by nobody here, nor are unknown ones."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("hosted", executed=True))

    for call_id in ("hosted", "unheard-of"):
        with pytest.raises(OwnershipLostError):
            await work.start_tool(call_id)


async def test_a_tool_call_is_settled_once(store: StoreKit, session_id: str) -> None:
    """A second outcome of one call is refused, and changes nothing."""
    work = await _tool_running(store, session_id)
    await work.settle_tool("call_1", "first")
    before = await store.everything(session_id)

    with pytest.raises(OwnershipLostError, match="settled already"):
        await work.settle_tool("call_1", "second")
    assert await store.everything(session_id) == before


async def test_an_append_renews_an_aged_lease_only(store: StoreKit, session_id: str) -> None:
    """Renewing costs a write, so a young lease is left alone."""
    work = await store.begin(session_id)
    fresh = (await store.everything(session_id))["session_execution"][0]["expires_at"]
    await work.publish(work.started())
    assert (await store.everything(session_id))["session_execution"][0]["expires_at"] == fresh

    async with store.database.begin() as conn:
        aged = text("UPDATE session_execution SET expires_at = expires_at - 20000 WHERE session_id = :id")
        await conn.execute(aged, {"id": session_id})
    await work.say("hello")
    assert (await store.everything(session_id))["session_execution"][0]["expires_at"] >= fresh
