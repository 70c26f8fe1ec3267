"""What must hold of every session once it is at rest, whatever went wrong on the way: read from the log, the tables,
the ledger of effects outside the system, and what a reader was shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events as e
from fencepost.domain.events import DurableEvent
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import continues
from fencepost.store import event_log, rebuild, tables
from fencepost.store.engine import Database
from fencepost.store.event_log import StoredEvent
from fencepost.store.readers import Delta

LOST = "inputs lost"
ANSWERED_TWICE = "inputs answered twice"
STARTED_TWICE = "non-idempotent tools started twice"
STALE = "events by a stale owner"
UNSETTLED = "steps without exactly one settlement"
SHOWN_TWICE = "text shown twice"
GAPS = "gaps in the log"
DIFFERENT = "rows that differ from a rebuild"
LEFT_OVER = "claims or wakes left over"
KINDS = (LOST, ANSWERED_TWICE, STARTED_TWICE, STALE, UNSETTLED, SHOWN_TWICE, GAPS, DIFFERENT, LEFT_OVER)

MAX_CONTINUATIONS = 3
_ATTEMPTS = 8
_WORD = re.compile(r"\bw\d+\.\d+\b")
_TERMINAL = (e.StepEnded, e.StepFailed, e.StepInterrupted)


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise that was broken, in which session, and how it shows."""

    kind: str
    session_id: str
    what: str

    def __str__(self) -> str:
        return f"{self.session_id}: {self.kind}: {self.what}"


@dataclass
class Evidence:
    """What is known from outside of a session. `inputs` are the texts that were promised to be answered, each another
    one; `effects` the lines that tools wrote, a call's id each; `shown` what a reader of the whole session saw. Words
    of answers are written `w12.3`, and no two of them are the same."""

    inputs: list[str] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    shown: list[StoredEvent | Delta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Log:
    session_id: str
    stored: list[StoredEvent]
    events: list[DurableEvent]
    executions: list[tuple[str, int]]
    """Every execution's id and the last step it came to, in the order of the claims."""


async def check(database: Database, session_id: str, evidence: Evidence) -> list[Violation]:
    """Give everything that is wrong with a session at rest; empty when all promises held."""
    async with database.read() as conn:
        log = await _read(conn, session_id)
        left = [what async for what in _left_over(conn, session_id)]
        head = await event_log.latest(conn, session_id)
    different = await database.transact(lambda conn: rebuild.differences(conn, session_id))
    found = {
        LOST: [*_lost(log, evidence), *(what for kind, what in _answers(log) if kind == LOST)],
        ANSWERED_TWICE: [*_twice(log), *(what for kind, what in _answers(log) if kind == ANSWERED_TWICE)],
        STARTED_TWICE: list(_effects(log, evidence)),
        STALE: list(_stale(log)),
        UNSETTLED: list(_settlements(log)),
        SHOWN_TWICE: list(_shown(log, evidence)),
        GAPS: [] if [s.seq for s in log.stored] == list(range(head + 1)) else ["the sequences are not 0, 1, 2, ..."],
        DIFFERENT: [f"{one.table} {one.id} {one.column}" for one in different],
        LEFT_OVER: left,
    }
    return [Violation(kind, session_id, what) for kind in KINDS for what in found[kind]]


async def _read(conn: AsyncConnection, session_id: str) -> _Log:
    stored = await event_log.read_after(conn, session_id, -1, 100_000)
    table = tables.execution_ledger
    rows = await conn.execute(
        select(table.c.execution_id, table.c.step)
        .where(table.c.session_id == session_id)
        .order_by(table.c.time_created, table.c.execution_id)
    )
    return _Log(session_id, stored, [one.decode() for one in stored], [(row[0], row[1]) for row in rows])


async def _left_over(conn: AsyncConnection, session_id: str) -> AsyncIterator[str]:
    execution, inbox, recovery = tables.session_execution, tables.session_input, tables.session_recovery
    calls, live = tables.tool_call, tables.live_part
    questions = {
        "a claim": select(func.count()).where(execution.c.session_id == session_id),
        "a wake": select(func.count()).where(inbox.c.session_id == session_id, inbox.c.wake_pending),
        "a continuation": select(func.count()).where(
            recovery.c.session_id == session_id, (recovery.c.phase == "pending") | recovery.c.wake_pending
        ),
        "an open call": select(func.count()).where(calls.c.session_id == session_id, calls.c.status != "settled"),
        "a live part": select(func.count()).where(live.c.session_id == session_id),
    }
    for what, question in questions.items():
        if count := (await conn.execute(question)).scalar_one():
            yield f"{what} ({count})"


def _promoted(log: _Log) -> Counter[str]:
    return Counter(event.prompt.text for event in log.events if isinstance(event, e.Prompted))


def _lost(log: _Log, evidence: Evidence) -> Iterator[str]:
    seen = _promoted(log)
    return (f"{text!r} was never promoted" for text in evidence.inputs if not seen[text])


def _twice(log: _Log) -> Iterator[str]:
    return (f"{text!r} was promoted {count} times" for text, count in _promoted(log).items() if count > 1)


def _answers(log: _Log) -> Iterator[tuple[str, str]]:
    """Follow what the model owes through the log: a step begins only when it owes an answer, and in the end it owes
    none, unless the turn was cut off too often and was given up."""
    owed, failed, cuts, local = False, False, 0, 0
    for stored, event in zip(log.stored, log.events, strict=True):
        match event:
            case e.Prompted():
                owed, failed, cuts = True, False, 0
            case e.Synthetic():
                if not owed and not failed:
                    yield ANSWERED_TWICE, f"event {stored.seq} continues what was answered or stopped"
                owed, failed = True, False
            case e.StepStarted():
                if not owed:
                    yield ANSWERED_TWICE, f"event {stored.seq} begins a step, and nothing was asked"
                local = 0
            case e.ToolCalled():
                local += not event.provider.executed
            case e.StepEnded():
                owed, failed, cuts = local > 0, False, 0
            case e.StepFailed():
                owed, failed, cuts = False, True, cuts + 1
            case e.StepInterrupted():
                cuts += 1
                owed = owed and continues(event.reason)
            case _:
                pass
    if owed and cuts <= MAX_CONTINUATIONS:
        yield LOST, "the model still owes an answer"


def _effects(log: _Log, evidence: Evidence) -> Iterator[str]:
    called = Counter(event.call_id for event in log.events if isinstance(event, e.ToolCalled))
    done = Counter(evidence.effects)
    yield from (f"{call} took effect {count} times" for call, count in done.items() if count > 1)
    yield from (f"{call} took effect without being in the log" for call in done if not called[call])
    yield from (f"{call} is in the log {count} times" for call, count in called.items() if count > 1)
    for event in log.events:
        if isinstance(event, e.ToolSuccess) and not done[event.call_id]:
            yield f"{event.call_id} succeeded without its effect"


def _authors(log: _Log) -> list[tuple[str, str] | None]:
    """Give for each event the execution that wrote it and as what: its own work, or the reconciliation of it. None
    for what clients write and for what is written under any owner."""
    by_message = {
        derived_id("msg", execution, step): (execution, step)
        for execution, last in log.executions
        for step in range(last + 2)
    }
    count = len(log.events)
    known: dict[str, tuple[str, str]] = {}
    for execution, last in log.executions:
        for number in range(count):
            known[derived_id("evt", execution, "reconciled", number)] = (execution, "reconciled")
            for step in range(last + 2):
                known[derived_id("evt", execution, step, "left-open", number)] = (execution, "own")
                known[derived_id("evt", execution, step, "settlement", number)] = (execution, "own")
    streams: dict[str, set[str]] = {}
    authors: list[tuple[str, str] | None] = []
    for stored, event in zip(log.stored, log.events, strict=True):
        author = known.get(stored.id)
        message = getattr(event, "assistant_message_id", None)
        if author is None and message in by_message:
            execution, step = by_message[message]
            if message not in streams:
                streams[message] = {
                    derived_id("evt", execution, step, attempt, "stream", number)
                    for attempt in range(1, _ATTEMPTS + 1)
                    for number in range(count)
                }
            tool = derived_id("evt", execution, message, "tool", getattr(event, "call_id", ""))
            author = (execution, "own") if stored.id == tool or stored.id in streams[message] else None
        authors.append(author)
    return authors


def _stale(log: _Log) -> Iterator[str]:
    """Whoever has been superseded writes nothing more, and everything of a step has an author."""
    superseded: set[str] = set()
    current: str | None = None
    for stored, event, author in zip(log.stored, log.events, _authors(log), strict=True):
        if author is None:
            if isinstance(event, e.StepEvent | e.StepInterrupted):
                yield f"event {stored.seq} ({stored.type}) is by none of the session's executions"
            continue
        execution, role = author
        if execution in superseded and role == "own":
            yield f"event {stored.seq} ({stored.type}) is by {execution} after it was superseded"
        if role == "reconciled":
            superseded.add(execution)
        elif execution != current:
            if current is not None:
                superseded.add(current)
            current = execution


def _settlements(log: _Log) -> Iterator[str]:
    started: set[str] = set()
    ended: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    calls: list[str] = []
    for stored, event in zip(log.stored, log.events, strict=True):
        message = getattr(event, "assistant_message_id", None)
        if message is None:
            continue
        if ended[message]:
            yield f"event {stored.seq} ({stored.type}) comes after the settlement of its step"
        if isinstance(event, e.StepStarted):
            started.add(message)
        elif isinstance(event, _TERMINAL):
            ended[message] += 1
        elif isinstance(event, e.ToolInputStarted):
            calls.append(event.call_id)
        elif isinstance(event, e.ToolSuccess | e.ToolFailed):
            outcomes[event.call_id] += 1
    yield from (f"step {message} has {ended[message]}" for message in started | set(ended) if ended[message] != 1)
    yield from (f"call {call} has {outcomes[call]}" for call in calls if outcomes[call] != 1)


def _shown(log: _Log, evidence: Evidence) -> Iterator[str]:
    durable = Counter(w for event in log.events if isinstance(event, e.TextEnded) for w in _WORD.findall(event.text))
    yield from (f"{word} is in the log {count} times" for word, count in durable.items() if count > 1)
    seqs = [item.seq for item in evidence.shown if isinstance(item, StoredEvent)]
    if len(set(seqs)) != len(seqs) or seqs != sorted(seqs):
        yield "a reader saw an event twice, or out of order"
    texts: dict[tuple[str, str], str] = {}
    for item in evidence.shown:
        if isinstance(item, Delta) and item.kind == "text":
            key = (item.message_id, item.part_id)
            texts[key] = texts.get(key, "") + item.text
    words = Counter(word for text in texts.values() for word in _WORD.findall(text))
    yield from (f"{word} was shown {count} times" for word, count in words.items() if count > 1)
    for event in log.events:
        if isinstance(event, e.TextEnded):
            live = texts.get((event.assistant_message_id, event.text_id), "")
            # A killed worker may have shown a little more than what was kept of it.
            if not (live.startswith(event.text) or event.text.startswith(live)):
                yield f"a reader saw {live[:60]!r}, and the log has {event.text[:60]!r}"
