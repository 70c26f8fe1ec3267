"""What each event does to the tables."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text as sql

from fencepost.domain import events
from fencepost.domain import messages as m
from fencepost.domain.errors import LifecycleConflictError
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import Location, Prompt
from fencepost.domain.models import ModelRef
from fencepost.store import event_log, leftovers, readers, tables
from fencepost.store.event_log import Entry
from fencepost.store.live import Announcer, Notice
from tests.store.kit import MODEL, StoreKit


def _start(session_id: str, message_id: str, timestamp: int = 1_000) -> events.StepStarted:
    return events.StepStarted(
        timestamp=timestamp, session_id=session_id, assistant_message_id=message_id, agent="build", model=MODEL
    )


def _say(session_id: str, message_id: str, words: str, part: str = "t1") -> list[events.DurableEvent]:
    about: dict[str, Any] = {"timestamp": 3_000, "session_id": session_id, "assistant_message_id": message_id}
    return [events.TextStarted(**about, text_id=part), events.TextEnded(**about, text_id=part, text=words)]


def _end(session_id: str, message_id: str, timestamp: int = 4_000) -> events.StepEnded:
    return events.StepEnded(
        timestamp=timestamp,
        session_id=session_id,
        assistant_message_id=message_id,
        finish="stop",
        cost=0.25,
        tokens=m.Tokens(input=1, output=2, reasoning=3, cache=m.CacheTokens(read=4, write=5)),
    )


@pytest.mark.conformance("PRJ-03")
async def test_the_logs_sequence_orders_messages_and_nothing_else(store: StoreKit, session_id: str) -> None:
    """All at the same time, with ids of events and messages that sort the other way round; pages go both ways."""
    unique = fresh_id("msg")
    message_ids = [f"{unique}{letter}" for letter in "zyxwv"]
    made = [events.Synthetic(timestamp=1_000, session_id=session_id, message_id=one, text=one) for one in message_ids]
    await store.append(session_id, *made, ids=[f"{fresh_id('evt')[:20]}{letter}" for letter in "zyxwv"])

    async with store.database.read() as conn:
        assert [message.id for message in await readers.history(conn, session_id)] == message_ids
        newest = await readers.page(conn, session_id, limit=2)
        older = await readers.page(conn, session_id, limit=2, before=newest[0][0])
        oldest = await readers.page(conn, session_id, limit=2, before=older[0][0])
        forward = await readers.page(conn, session_id, limit=2, after=oldest[-1][0])
        last = await readers.page(conn, session_id, limit=9, after=forward[-1][0])
        none = await readers.page(conn, session_id, limit=2, before=oldest[0][0])
    pages = [[message.id for _, message in page] for page in (newest, older, oldest, forward, last, none)]
    assert pages == [
        message_ids[3:], message_ids[1:3], message_ids[:1], message_ids[1:3], message_ids[3:], []
    ]  # fmt: skip


@pytest.mark.conformance("PRJ-04")
async def test_a_promoted_input_carries_the_sequence_of_its_promotion(store: StoreKit, session_id: str) -> None:
    """Until then it has none, and afterwards its message has the same sequence."""
    receipt = (await store.admit(session_id)).receipt
    row = await store.row(tables.session_input, session_id)
    assert (row["admitted_seq"], row["promoted_seq"]) == (receipt.admitted_seq, None)
    await store.claim_and_prepare(session_id)

    [prompted] = [event for event in await store.events(session_id) if event.type == "session.next.prompted.1"]
    row = await store.row(tables.session_input, session_id)
    assert (row["id"], row["promoted_seq"]) == (prompted.data["messageID"], prompted.seq)
    assert prompted.seq > receipt.admitted_seq
    assert (await store.row(tables.session_message, session_id))["seq"] == prompted.seq


@pytest.mark.conformance("PRJ-05")
async def test_messages_of_the_surroundings_are_projected(store: StoreKit, session_id: str) -> None:
    """Agent, model, synthetic, system, shell and compaction; the session's row follows; live text stores nothing."""
    ids = {name: fresh_id("msg") for name in ("agent", "model", "note", "system", "shell", "compaction")}
    model = ModelRef(id="big", provider_id="scripted", variant="slow")

    def about(name: str, timestamp: int) -> dict[str, Any]:
        return {"timestamp": timestamp, "session_id": session_id, "message_id": ids[name]}

    await store.append(
        session_id,
        events.AgentSwitchedEvent(**about("agent", 1_001), agent="plan"),
        events.ModelSwitchedEvent(**about("model", 1_002), model=model),
        events.Synthetic(**about("note", 1_003), text="a note"),
        events.ContextUpdated(**about("system", 1_004), text="the date changed"),
        events.ShellStarted(**about("shell", 1_005), call_id="call_1", command="date"),
        events.ShellEnded(timestamp=1_006, session_id=session_id, call_id="call_1", output="monday\n"),
        events.ShellEnded(timestamp=1_007, session_id=session_id, call_id="unheard-of", output="nothing"),
        events.CompactionStarted(**about("compaction", 1_008), reason="auto"),
    )
    before = await store.everything(session_id)
    announcer = Announcer(store.database)
    for text in ("the ", "summary ", "so far"):
        announcer.send(session_id, Notice(8, ids["compaction"], "compaction", "c", 1, 0, text))
    await announcer.close()
    assert await store.everything(session_id) == before
    assert not any("delta" in kind for kind in events.MANIFEST)
    await store.append(
        session_id, events.CompactionEnded(**about("compaction", 1_009), reason="auto", text="so far", recent="latest")
    )

    assert await store.messages(session_id) == [
        m.AgentSwitched(id=ids["agent"], agent="plan", time=m.Created(created=1_001)),
        m.ModelSwitched(id=ids["model"], model=model, time=m.Created(created=1_002)),
        m.SyntheticMessage(id=ids["note"], session_id=session_id, text="a note", time=m.Created(created=1_003)),
        m.SystemMessage(id=ids["system"], text="the date changed", time=m.Created(created=1_004)),
        m.ShellMessage(
            id=ids["shell"],
            call_id="call_1",
            command="date",
            output="monday\n",
            time=m.Completed(created=1_005, completed=1_006),
        ),
        m.CompactionMessage(
            id=ids["compaction"], reason="auto", summary="so far", recent="latest", time=m.Created(created=1_009)
        ),
    ]
    row = await store.row(tables.session, session_id)
    assert (row["agent"], row["model"], row["time_updated"]) == ("plan", model.to_wire(), 1_002)
    async with store.database.read() as conn:
        assert [message.type for message in await readers.history(conn, session_id)] == ["compaction"]


async def test_a_shell_that_ends_is_the_newest_one_with_its_call(store: StoreKit, session_id: str) -> None:
    """Call ids come back."""
    for n in range(2):
        await store.append(
            session_id,
            events.ShellStarted(
                timestamp=1, session_id=session_id, message_id=fresh_id("msg"), call_id="call_1", command=f"echo {n}"
            ),
        )
    await store.append(session_id, events.ShellEnded(timestamp=2, session_id=session_id, call_id="call_1", output="1"))

    outputs = [message.output for message in await store.messages(session_id) if isinstance(message, m.ShellMessage)]
    assert outputs == ["", "1"]


@pytest.mark.conformance("PRJ-06")
@pytest.mark.parametrize("second", ["same kind", "other kind", "assistant", "other session"])
async def test_a_message_id_is_created_once(store: StoreKit, session_id: str, second: str) -> None:
    """Another event that would create the same message is refused, with all that it wrote; the first one stays."""
    message_id = fresh_id("msg")
    await store.append(
        session_id, events.Synthetic(timestamp=1, session_id=session_id, message_id=message_id, text="original")
    )
    target = await store.new_session() if second == "other session" else session_id
    about: dict[str, Any] = {"timestamp": 2, "session_id": target, "message_id": message_id}
    again: dict[str, events.DurableEvent] = {
        "same kind": events.Synthetic(**about, text="again"),
        "other session": events.Synthetic(**about, text="again"),
        "other kind": events.AgentSwitchedEvent(**about, agent="plan"),
        "assistant": _start(session_id, message_id),
    }
    before = await store.everything(session_id), await store.everything(target)

    with pytest.raises(LifecycleConflictError, match=message_id):
        await store.append(target, again[second])
    assert (await store.everything(session_id), await store.everything(target)) == before


@pytest.mark.conformance("PRJ-08")
async def test_only_the_newest_unfinished_answer_is_written_to(store: StoreKit, session_id: str) -> None:
    """An earlier one that never ended is closed by the next one's start, and the next one's events leave it alone."""
    old, new = fresh_id("msg"), fresh_id("msg")
    await store.append(session_id, _start(session_id, old, 1_000), _start(session_id, new, 2_000))
    stale = next(message for message in await store.messages(session_id) if message.id == old)
    assert isinstance(stale, m.AssistantMessage)
    assert (stale.time.completed, stale.finish, stale.error, stale.content) == (2_000, None, None, ())
    await store.append(session_id, *_say(session_id, new, "hello"), _end(session_id, new))

    first, second = await store.messages(session_id)
    assert first == stale
    assert isinstance(second, m.AssistantMessage)
    assert second.content == (m.TextPart(id="t1", text="hello"),)
    assert (second.finish, second.time.completed) == ("stop", 4_000)


@pytest.mark.conformance("PRJ-08")
async def test_late_text_of_an_answer_that_the_same_append_leaves_behind(store: StoreKit, session_id: str) -> None:
    """It is closed by the next one's start all the same, and keeps the text."""
    old, new = fresh_id("msg"), fresh_id("msg")
    await store.append(session_id, _start(session_id, old, 1_000))
    await store.append(session_id, _start(session_id, new, 2_000), *_say(session_id, old, "late"))

    stale, current = await store.messages(session_id)
    assert isinstance(stale, m.AssistantMessage)
    assert isinstance(current, m.AssistantMessage)
    assert (stale.time.completed, stale.content) == (2_000, (m.TextPart(id="t1", text="late"),))
    assert (current.time.completed, current.content) == (None, ())


@pytest.mark.conformance("PRJ-09")
async def test_an_answer_that_was_left_behind_is_never_current_again(store: StoreKit, session_id: str) -> None:
    """Late text lands on its own message and revives nothing: neither its time, nor what counts as newest."""
    old, new = fresh_id("msg"), fresh_id("msg")
    await store.append(session_id, _start(session_id, old, 1_000), _start(session_id, new, 2_000))
    await store.append(session_id, *_say(session_id, new, "the answer"), _end(session_id, new))
    finished = (await store.messages(session_id))[1]
    await store.append(session_id, *_say(session_id, old, "too late"))

    stale, current = await store.messages(session_id)
    assert current == finished
    assert isinstance(stale, m.AssistantMessage)
    assert stale.content == (m.TextPart(id="t1", text="too late"),)
    assert (stale.time.completed, stale.finish) == (2_000, None)
    async with store.database.read() as conn:
        newest = await leftovers.newest_assistant(conn, session_id)
    assert newest is not None
    assert newest.id == new
    await store.append(session_id, _start(session_id, fresh_id("msg"), 5_000))
    assert (await store.messages(session_id))[:2] == [stale, current]


async def test_events_for_an_unknown_or_foreign_answer_change_nothing(store: StoreKit, session_id: str) -> None:
    """They stay in the log."""
    other = await store.new_session()
    foreign, own = fresh_id("msg"), fresh_id("msg")
    await store.append(other, _start(other, foreign))
    await store.append(session_id, _start(session_id, own))
    before = await store.rows(tables.session_message, session_id), await store.rows(tables.session_message, other)
    for message_id in (foreign, fresh_id("msg")):
        await store.append(session_id, *_say(session_id, message_id, "lost"))

    now = await store.rows(tables.session_message, session_id), await store.rows(tables.session_message, other)
    assert now == before
    assert len(await store.events(session_id)) == 6


async def test_repeated_call_ids_belong_to_their_own_answers(store: StoreKit, session_id: str) -> None:
    """Providers count their calls anew in each answer."""
    for n in (1, 2):
        work = await store.begin(session_id, run=f"run-{n}")
        await work.publish(work.started(), *work.called("call_1"))
        await work.start_tool("call_1")
        await work.settle_tool("call_1", f"result {n}")
        await work.settle(work.ended())
        await store.release(work.token)

    answers = [message for message in await store.messages(session_id) if isinstance(message, m.AssistantMessage)]
    texts = []
    for answer in answers:
        [part] = answer.content
        assert isinstance(part, m.ToolPart)
        assert isinstance(part.state, m.CompletedTool)
        texts.append(part.state.content[0].to_wire()["text"])
    assert texts == ["result 1", "result 2"]


async def test_a_settled_call_ignores_what_comes_after(store: StoreKit, session_id: str) -> None:
    """Neither progress nor a second outcome changes it, and a raw input does not come back."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    await work.start_tool("call_1")
    await work.settle_tool("call_1")
    before = await store.assistant(session_id)
    about: dict[str, Any] = {**work.about, "call_id": "call_1"}
    provider = events.ToolProviderInfo(executed=False)
    await store.append(
        session_id,
        events.ToolProgress(**about, structured={"percent": 99}, content=()),
        events.ToolFailed(**about, error=m.MessageError(message="no"), provider=provider),
        events.ToolSuccess(**about, structured={"other": True}, content=(), provider=provider),
        events.ToolInputEnded(**about, text="{}"),
    )

    assert await store.assistant(session_id) == before


async def test_a_call_shows_its_progress_while_it_runs(store: StoreKit, session_id: str) -> None:
    """And a failure keeps what was shown."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called("call_1"))
    about: dict[str, Any] = {**work.about, "call_id": "call_1"}
    await store.append(session_id, events.ToolProgress(**about, structured={"percent": 50}, content=()))
    [part] = (await store.assistant(session_id)).content
    assert isinstance(part, m.ToolPart)
    assert isinstance(part.state, m.RunningTool)
    assert part.state.structured == {"percent": 50}
    provider = events.ToolProviderInfo(executed=False)
    await store.append(session_id, events.ToolFailed(**about, error=m.MessageError(message="broke"), provider=provider))

    [part] = (await store.assistant(session_id)).content
    assert isinstance(part, m.ToolPart)
    assert isinstance(part.state, m.FailedTool)
    assert (part.state.structured, part.state.input) == ({"percent": 50}, {"command": "true"})


async def test_a_step_that_ends_is_added_to_the_sessions_sums(store: StoreKit, session_id: str) -> None:
    """Cost and all counts of tokens, over all steps."""
    for _ in range(2):
        message_id = fresh_id("msg")
        await store.append(session_id, _start(session_id, message_id), _end(session_id, message_id))

    row = await store.row(tables.session, session_id)
    assert row["cost"] == 0.5
    sums = [row[f"tokens_{name}"] for name in ("input", "output", "reasoning", "cache_read", "cache_write")]
    assert sums == [2, 4, 6, 8, 10]


async def test_an_input_may_be_promoted_without_having_been_admitted(store: StoreKit, session_id: str) -> None:
    """Old logs know no inbox: such an input counts as admitted and promoted at once."""
    message_id = fresh_id("msg")
    await store.append(
        session_id,
        events.Prompted(
            timestamp=5, session_id=session_id, message_id=message_id, prompt=Prompt(text="hi"), delivery="steer"
        ),
    )

    row = await store.row(tables.session_input, session_id)
    assert (row["admitted_seq"], row["promoted_seq"], row["time_created"]) == (1, 1, 5)


async def test_a_promotion_that_does_not_fit_its_admission_is_refused(store: StoreKit, session_id: str) -> None:
    """Other text, other delivery, another time, or a second one."""
    receipt = (await store.admit(session_id, "hello")).receipt
    fitting: dict[str, Any] = {
        "timestamp": receipt.time_created,
        "session_id": session_id,
        "message_id": receipt.id,
        "prompt": Prompt(text="hello"),
        "delivery": "steer",
    }
    before = await store.everything(session_id)
    for wrong in ({"prompt": Prompt(text="other")}, {"delivery": "queue"}, {"timestamp": 1}):
        with pytest.raises(LifecycleConflictError, match="other content"):
            await store.append(session_id, events.Prompted(**{**fitting, **wrong}))
    assert await store.everything(session_id) == before

    await store.append(session_id, events.Prompted(**fitting))
    with pytest.raises(LifecycleConflictError, match="promoted at 2 already"):
        await store.append(session_id, events.Prompted(**fitting))


@pytest.mark.conformance("PRJ-01")
async def test_a_move_is_projected_in_a_database_without_the_table_of_epochs(store: StoreKit, session_id: str) -> None:
    """That table is for a time only; a log from before or after it projects the same."""
    moved = events.Moved(timestamp=7, session_id=session_id, location=Location(directory="/there"))
    async with store.database.engine.connect() as conn:
        await conn.execute(sql("BEGIN"))
        await conn.execute(sql("DROP TABLE session_context_epoch"))
        head = await event_log.lock(conn, session_id)
        await event_log.append(conn, head, [Entry(fresh_id("evt"), moved)])
        [row] = (await conn.execute(tables.session.select().where(tables.session.c.id == session_id))).all()
        await conn.execute(sql("ROLLBACK"))
    assert (row.directory, row.time_updated) == ("/there", 7)


async def test_a_move_changes_the_location_and_makes_no_message(store: StoreKit, session_id: str) -> None:
    """A workspace that is not named any more is gone."""
    for location, subdirectory in (
        (Location(directory="/there", workspace_id="wrk_1"), "sub"),
        (Location(directory="/back"), None),
    ):
        await store.append(
            session_id, events.Moved(timestamp=7, session_id=session_id, location=location, subdirectory=subdirectory)
        )
        row = await store.row(tables.session, session_id)
        assert (row["directory"], row["workspace_id"], row["path"], row["time_updated"]) == (
            location.directory,
            location.workspace_id,
            subdirectory,
            7,
        )
    assert await store.messages(session_id) == []
