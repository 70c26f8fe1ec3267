"""`fencepost doctor --sessions`: what is stuck is said with its mend, and `--repair` does what is safe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import delete, update
from temporalio.client import Client

from fencepost.store import tables
from fencepost.store.engine import Database
from tests.cli.command import Command, Ended
from tests.cli.nursery import Nursery
from tests.store.kit import StoreKit, token_of
from tests.store.recovery_kit import HOUR_MS, Recovering

Quick = Callable[..., Ended]


@pytest.fixture
async def recovering(database_url: str) -> AsyncIterator[Recovering]:
    """The database of the command, with what a crash leaves in it."""
    database = Database(database_url, pool_size=2)
    yield Recovering(StoreKit(database))
    await database.close()


async def _doctor(quick: Quick, *arguments: str) -> Ended:
    return await asyncio.to_thread(quick, "doctor", "--sessions", *arguments)


def _found(done: Ended) -> dict[str, dict[str, Any]]:
    told = json.loads(done.out)
    assert set(told) == {"findings", "sessions", "compared", "temporal", "more"}
    for each in told["findings"]:
        assert {"id", "kind", "status", "detail", "mend", "facts"} <= set(each)
    return {each["id"]: each for each in told["findings"]}


async def _answered(recovering: Recovering) -> str:
    """Give a session that is done."""
    store, session_id = recovering.store, await recovering.store.new_session()
    work = await store.begin(session_id)
    await work.say("All of it.")
    await work.settle()
    await store.release(token_of(session_id))
    return session_id


async def _ended(client: Client, *sessions: str) -> None:
    for session_id in sessions:
        await client.get_workflow_handle(session_id).terminate()


async def test_without_trouble_one_line_says_so(quick: Quick, recovering: Recovering) -> None:
    """With how many were looked at: a session that is done, and one that its run works on."""
    done = await _answered(recovering)
    looked = await _doctor(quick)
    assert (looked.code, looked.out) == (0, "nothing is stuck: 1 session looked at\n")
    assert "1 compared with their logs, of the 20 most recently active" in looked.complaint()

    named = await _doctor(quick, done, "--repair")
    assert (named.code, named.out, named.err) == (0, "nothing is stuck: 1 session looked at\n", "")
    told = await _doctor(quick, "--json")
    assert json.loads(told.out) == {"findings": [], "sessions": 1, "compared": 1, "temporal": True, "more": False}


async def test_each_kind_is_named_with_its_mend_and_nothing_is_changed(quick: Quick, recovering: Recovering) -> None:
    """And a program gets the facts."""
    store = recovering.store
    lost, waiting, poison = await recovering.abandoned(), await recovering.waiting(), await recovering.abandoned()
    await recovering.set(tables.session_execution, poison, phase="dancing", recovery_error="malformed claim: dancing")
    broken, given_up = await _answered(recovering), await store.new_session()
    await recovering.set(tables.session_message, broken, data={"text": "forged"})
    await recovering.recovery(given_up, phase="stopped", recovery_error="given up: cut off", wake_pending=False)
    everyone = (lost, waiting, poison, broken, given_up)
    before = [await store.everything(one) for one in everyone]

    looked = await _doctor(quick)
    told = await _doctor(quick, "--json")
    assert [await store.everything(one) for one in everyone] == before
    assert (looked.code, told.code) == (1, 1)
    found = _found(told)
    assert {one: (each["kind"], each["status"]) for one, each in found.items()} == {
        lost: ("expired-claim", "wrong"),
        waiting: ("pending-wake", "wrong"),
        poison: ("put-aside", "warning"),
        broken: ("projection", "wrong"),
        given_up: ("put-aside", "warning"),
    }
    assert found[lost]["facts"]["run"] == "not-found"
    assert found[waiting]["facts"]["age"] >= HOUR_MS
    assert found[broken]["facts"]["differences"][0]["table"] == "session_message"
    for words in (
        "the run that owns it, run-1, is not known to Temporal",
        "input waits for 60 min, and no run has begun with it: never started",
        "the claim of its last turn was put aside: malformed claim: dancing",
        "the continuation of its last turn was put aside: given up: cut off",
        "what is shown of it differs from its log in ",
        f"it settles the turn within 10 s; now: `fencepost doctor --sessions --repair {lost}`",
        "-> send a prompt: the session goes on with it",
        "3 wrong, 2 warnings",
    ):
        assert words in looked.out

    alone = _found(await _doctor(quick, "--json", lost, broken))
    assert set(alone) == {lost, broken}


async def test_what_can_be_repaired_is_repaired_once(
    quick: Quick, connected: Command, recovering: Recovering, temporal_client: Client
) -> None:
    """One line for each, from several places at once; a second time there is nothing left to do."""
    store = recovering.store
    lost, waiting, broken = await recovering.abandoned(), await recovering.waiting(), await _answered(recovering)
    await recovering.set(tables.session_message, broken, data={"text": "forged"})

    one, two = await asyncio.gather(*(_doctor(connected, "--repair") for _ in range(2)))
    try:
        said = one.out + two.out
        assert f"{lost}  settled as interrupted, and it goes on, started" in said
        assert f"{waiting}  started" in said
        assert f"{broken}  its projection was made anew from the log" in said
        assert (one.code, two.code) == (0, 0), said
        assert (await store.types(lost)).count("step.interrupted") == 1
        assert len(await store.rows(tables.session_recovery, lost)) == 1
        for session_id in (lost, waiting):
            described = await temporal_client.get_workflow_handle(session_id).describe()
            assert described.workflow_type == "SessionTurn"
        # Once for each that looked while it still waited; nobody serves it here.
        assert (await store.row(tables.session_input, waiting))["wake_attempts"] in (1, 2)
        assert (await _doctor(quick, broken)).out.startswith("nothing is stuck")
    finally:
        await _ended(temporal_client, lost, waiting)


async def test_what_was_put_aside_waits_again_once_it_is_right(
    quick: Quick, recovering: Recovering, temporal_client: Client
) -> None:
    """A continuation whose answer was missing from the projection; one that is still wrong, or given up, stays."""
    store, session_id = recovering.store, await recovering.abandoned()
    await recovering.scan()
    cut = await store.assistant(session_id)
    gone = f"there is no assistant message {cut.id}"
    await recovering.set(tables.session_recovery, session_id, recovery_error=gone, wake_pending=False)
    messages = tables.session_message
    await recovering._run(delete(messages).where(messages.c.id == cut.id))
    wrong, given_up = await store.new_session(), await store.new_session()
    aside = {"recovery_error": "put aside", "wake_pending": False}
    await recovering.recovery(wrong, assistant_message_id="msg_nowhere", **aside)
    await recovering.recovery(given_up, phase="stopped", **aside)

    done = await _doctor(quick, "--repair", "--json")
    try:
        told = [(each["id"], each["kind"], each["did"], each["repaired"]) for each in json.loads(done.out)["findings"]]
        assert sorted(told) == sorted(
            [
                (session_id, "projection", ["rebuilt"], True),
                (session_id, "put-aside", ["lifted", "woken"], True),
                (wrong, "put-aside", ["stays"], False),
                (given_up, "put-aside", ["stays"], False),
            ]
        )
        assert done.code == 0
        row = await store.row(tables.session_recovery, session_id)
        assert (row["recovery_error"], row["wake_pending"], row["wake_attempts"]) == (None, True, 1)
        assert set(await recovering.errors(tables.session_recovery)) == {wrong, given_up}
        await store.claim(token_of(session_id, "run-2"))
        assert (await store.prepare(token_of(session_id, "run-2"))).continued
    finally:
        await _ended(temporal_client, session_id)


async def test_what_is_history_is_not_told(quick: Quick, recovering: Recovering) -> None:
    """A turn that was given up, in a session that has answered since."""
    session_id = await _answered(recovering)
    await recovering.recovery(session_id, phase="stopped", recovery_error="given up", wake_pending=False)

    assert (await _doctor(quick)).out.startswith("nothing is stuck")


async def test_a_projection_in_use_is_left_alone(quick: Quick, recovering: Recovering) -> None:
    """Whoever works on the session goes on."""
    store, session_id = recovering.store, await recovering.store.new_session()
    await store.begin(session_id)
    await recovering._run(update(tables.session).where(tables.session.c.id == session_id).values(title="forged"))
    before = await store.everything(session_id)

    done = await _doctor(quick, "--repair", session_id)
    assert done.code == 1
    assert f"{session_id}  left alone; it is being worked on: try again when it is idle" in done.out
    assert await store.everything(session_id) == before


async def test_without_temporal_only_the_database_is_looked_at(
    nursery: Nursery, connected: Command, recovering: Recovering
) -> None:
    """What depends on a run is neither judged nor repaired; what does not is."""
    store, lost, broken = recovering.store, await recovering.abandoned(), await _answered(recovering)
    await recovering.set(tables.session_message, broken, data={"text": "forged"})
    waiting = await recovering.waiting()
    before = [await store.everything(one) for one in (lost, waiting)]
    away = connected.given(TEMPORAL_ADDRESS="127.0.0.1:9")

    done = await asyncio.to_thread(nursery, away, "doctor", "--sessions", "--repair")
    assert done.code == 3
    assert "only the database is looked at" in done.err
    assert "Temporal could not be asked about runs" in done.err
    assert f"{lost}  left alone; Temporal does not answer" in done.out
    assert f"{waiting}  left alone; Temporal does not answer" in done.out
    assert f"{broken}  its projection was made anew from the log" in done.out
    assert [await store.everything(one) for one in (lost, waiting)] == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--repair"], 2, "with --sessions: add it"),
        (["ses_1"], 2, "with --sessions: add it"),
        (["--attempts", "5"], 2, "with --sessions: add it"),
        (["--sessions", "no id"], 2, "session id"),
        (["--sessions", "ses_nobody"], 2, "no session ses_nobody"),
    ],
    ids=str,
)
async def test_bad_input_is_one_line(quick: Quick, arguments: list[str], code: int, words: str) -> None:
    """And nothing is looked at."""
    done = await asyncio.to_thread(quick, "doctor", *arguments)

    assert (done.code, done.out) == (code, "")
    assert words in done.err


async def test_local_mode_that_does_not_run_is_not_started(nursery: Nursery, alone: Command) -> None:
    """There is nothing to look at then."""
    done = await asyncio.to_thread(nursery, alone, "doctor", "--sessions")

    assert (done.code, done.out) == (3, "")
    assert done.complaint().endswith("start `fencepost dev`")
    assert list(alone.home.iterdir()) == []
