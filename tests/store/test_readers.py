"""Following a session: durable events and live text, without gap or duplicate, whenever the reader comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencepost.domain import events
from fencepost.store import readers
from fencepost.store.event_log import StoredEvent
from fencepost.store.live import Announcer, Listener, Notice
from fencepost.store.readers import Delta
from tests.store.kit import StoreKit, Work


@dataclass
class Watch:
    """A reader in the background, and what it has seen."""

    after: int
    items: list[StoredEvent | Delta] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    _more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, following: Any) -> None:
        """Take in items until cancelled."""
        async with aclosing(following) as stream:
            async for item in stream:
                async with self._more:
                    self.items.append(item)
                    self._more.notify_all()

    async def until(self, enough: Callable[[Watch], bool]) -> None:
        """Wait until enough was seen."""
        async with self._more:
            await self._more.wait_for(lambda: enough(self))

    def text(self, part: str = "t1") -> str:
        """Give the live text of a part."""
        return "".join(item.text for item in self.items if isinstance(item, Delta) and item.part_id == part)

    @property
    def seqs(self) -> list[int]:
        """Give the sequences of the durable events."""
        return [item.seq for item in self.items if isinstance(item, StoredEvent)]

    def ended(self) -> bool:
        """Say whether the end of the step was seen."""
        return any(isinstance(item, StoredEvent) and ".step.ended" in item.type for item in self.items)


@dataclass
class Stage:
    """One streamed step, and those who watch it."""

    store: StoreKit
    listener: Listener
    announcer: Announcer
    work: Work
    watches: list[Watch] = field(default_factory=list)
    seq: int = -1
    sent: int = 0

    async def publish(self, *made: events.DurableEvent) -> None:
        """Publish and say so."""
        self.seq = (await self.work.publish(*made))[-1]
        self.announcer.send(self.work.token.session_id, Notice(self.seq))

    async def start(self, part: str = "t1") -> None:
        """Start the step and a text."""
        await self.publish(self.work.started(), events.TextStarted(**self.work.about, text_id=part))

    def stream(self, chunk: str, *, lost: bool = False) -> None:
        """Send a chunk on the live channel, or lose it on the way."""
        notice = Notice(self.seq, self.work.message_id, "text", "t1", 1, self.sent, chunk)
        self.sent += len(chunk)
        if not lost:
            self.announcer.send(self.work.token.session_id, notice)

    async def end(self, text: str) -> None:
        """End the text, and the step."""
        await self.publish(events.TextEnded(**self.work.about, text_id="t1", text=text))
        await self.work.settle()
        self.seq += 1
        self.announcer.send(self.work.token.session_id, Notice(self.seq))

    def watch(self, after: int = -1) -> Watch:
        """Let a reader join."""
        watch = Watch(after)
        following = readers.follow(self.store.database, self.listener, self.work.token.session_id, after)
        watch.task = asyncio.create_task(watch.run(following))
        self.watches.append(watch)
        return watch

    async def close(self) -> None:
        """Let all readers go."""
        for watch in self.watches:
            assert watch.task is not None
            watch.task.cancel()
            with suppress(asyncio.CancelledError):
                await watch.task


class Stages:
    """Opens stages that share one listener and one announcer."""

    def __init__(self, store: StoreKit) -> None:
        self.store = store
        self.listener = Listener(store.database)
        self.announcer = Announcer(store.database)
        self.opened: list[Stage] = []

    async def open(self) -> Stage:
        """Open a stage: a new session whose step was just requested."""
        work = await self.store.begin(await self.store.new_session())
        stage = Stage(self.store, self.listener, self.announcer, work)
        stage.seq = (await self.store.events(work.token.session_id))[-1].seq
        self.opened.append(stage)
        return stage


@pytest.fixture(scope="module")
async def stages(store: StoreKit) -> AsyncIterator[Stages]:
    """Stages whose readers are let go at the end."""
    made = Stages(store)
    await made.announcer.start()
    yield made
    for stage in made.opened:
        await stage.close()
    await made.announcer.close()
    await made.listener.close()


@pytest.fixture
async def stage(stages: Stages) -> AsyncIterator[Stage]:
    """One stage of this test's own."""
    opened = await stages.open()
    yield opened
    await opened.close()


async def test_a_reader_from_the_beginning_sees_every_chunk_as_it_comes(stage: Stage) -> None:
    """The durable end brings no text a second time."""
    watch = stage.watch()
    await stage.start()
    await watch.until(lambda w: w.seqs[-1:] == [stage.seq])
    for seen, chunk in (("The ", "The "), ("The word ", "word "), ("The word is", "is")):
        stage.stream(chunk)
        await watch.until(lambda w, seen=seen: w.text() == seen)  # type: ignore[misc]
    await stage.end("The word is")
    await watch.until(Watch.ended)

    assert watch.text() == "The word is"
    assert watch.seqs == list(range(stage.seq + 1))
    assert len([item for item in watch.items if isinstance(item, Delta)]) == 3


@pytest.mark.parametrize("from_start", [True, False], ids=["from the start", "from the last sequence"])
async def test_a_reader_that_joins_in_the_middle_begins_with_the_text_so_far(stage: Stage, from_start: bool) -> None:
    """Then come the chunks, whether the events before were asked for or not."""
    await stage.start()
    stage.stream("The word ")
    await stage.work.keep_live("The word ")
    watch = stage.watch(-1 if from_start else stage.seq)
    await watch.until(lambda w: w.text() == "The word ")
    stage.stream("is ")
    await watch.until(lambda w: w.text() == "The word is ")
    await stage.end("The word is heron")
    await watch.until(Watch.ended)

    assert watch.text() == "The word is heron"
    assert watch.seqs == list(range(watch.after + 1, stage.seq + 1))


async def test_a_reader_that_joins_after_the_end_reads_the_text_once(stage: Stage) -> None:
    """From the beginning all of it, from the last sequence nothing."""
    await stage.start()
    stage.stream("The word")
    begun = stage.seq
    await stage.end("The word")
    everything, nothing, from_the_middle = stage.watch(), stage.watch(stage.seq), stage.watch(begun)
    await everything.until(Watch.ended)
    await from_the_middle.until(Watch.ended)

    assert everything.text() == "The word"
    assert everything.seqs == list(range(stage.seq + 1))
    assert from_the_middle.text() == "The word"
    assert nothing.items == []


async def test_parts_of_an_earlier_step_are_not_open_any_more(stage: Stage) -> None:
    """A reader that joins after a step was settled does not wait for its parts."""
    await stage.start()
    await stage.work.settle()
    stage.seq += 1
    await stage.store.append(
        stage.work.token.session_id,
        events.TextEnded(**stage.work.about, text_id="t1", text="late"),
        events.RevertCleared(timestamp=1, session_id=stage.work.token.session_id),
    )
    watch = stage.watch(stage.seq)
    await watch.until(lambda w: len(w.seqs) == 2)

    assert watch.text() == ""


async def test_lost_chunks_come_with_the_next_copy_or_with_the_end(stage: Stage) -> None:
    """A lost notification costs time, never text."""
    watch = stage.watch()
    await stage.start()
    await stage.work.keep_live("The ")
    stage.stream("The ", lost=True)
    await watch.until(lambda w: w.text() == "The ")  # after a silence
    stage.stream("word ", lost=True)
    await stage.work.keep_live("The word ")
    stage.stream("is ")
    await watch.until(lambda w: w.text() == "The word is ")
    stage.stream("her", lost=True)
    stage.stream("on")
    await stage.end("The word is heron")
    await watch.until(Watch.ended)

    assert watch.text() == "The word is heron"


async def test_a_durable_event_is_seen_without_any_notification(stage: Stage) -> None:
    """Readers look from time to time."""
    watch = stage.watch()
    await watch.until(lambda w: len(w.seqs) == stage.seq + 1)
    await stage.work.say("quietly")
    await watch.until(lambda w: w.text() == "quietly")

    assert watch.seqs == list(range(stage.seq + 4))


async def test_a_cut_part_ends_where_its_reader_saw_it_or_before(stage: Stage) -> None:
    """After a death the durable text may be shorter than what was shown; nothing is shown twice."""
    watch = stage.watch()
    await stage.start()
    await watch.until(lambda w: w.seqs[-1:] == [stage.seq])
    await stage.work.keep_live("The wo")
    stage.stream("The word is")
    await watch.until(lambda w: w.text() == "The word is")
    await stage.publish(events.TextEnded(**stage.work.about, text_id="t1", text="The wo"))
    await watch.until(lambda w: len(w.seqs) == stage.seq + 1)

    assert watch.text() == "The word is"


@st.composite
def plays(draw: st.DrawFn) -> dict[str, Any]:
    """Give a text in chunks, what is lost and kept of it, and when readers join, from which end."""
    chunks = draw(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1), max_size=8))
    indexes = st.integers(0, len(chunks))
    return {
        "chunks": chunks,
        "lost": draw(st.sets(indexes, max_size=3)),
        "kept": draw(st.sets(indexes, max_size=3)),
        # Before the start, before some chunk, before the end, or after it.
        "joins": draw(st.lists(st.tuples(st.integers(-1, len(chunks) + 1), st.booleans()), min_size=1, max_size=3)),
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(play=plays())
async def test_every_reader_sees_the_text_exactly_once(stages: Stages, play: dict[str, Any]) -> None:
    """However it was cut, whatever was lost, whenever the reader came."""
    stage = await stages.open()
    chunks: list[str] = play["chunks"]
    text = "".join(chunks)

    def join(moment: int) -> None:
        for when, from_start in play["joins"]:
            if when == moment:
                stage.watch(-1 if from_start else stage.seq)

    join(-1)
    await stage.start()
    for index, chunk in enumerate(chunks):
        join(index)
        stage.stream(chunk, lost=index in play["lost"])
        if index in play["kept"]:
            await stage.work.keep_live("".join(chunks[: index + 1]))
        await stage.store.database.ping()  # lets readers run
    join(len(chunks))
    await stage.end(text)
    join(len(chunks) + 1)

    for watch in stage.watches:
        if watch.after < stage.seq:
            await watch.until(Watch.ended)
        assert watch.text() == (text if watch.after < stage.seq else "")
        assert watch.seqs == list(range(watch.after + 1, stage.seq + 1))
    await stage.close()
