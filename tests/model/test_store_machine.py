"""The real store beside the model: whatever is asked of it, in any order and by any hand, both answer alike.

Hands keep their tokens for ever and say everything more than once. MODEL_EXAMPLES sets how many histories are tried;
one that fails is shortened then, which takes minutes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Prompt
from fencepost.domain.ownership import OwnerRun
from fencepost.store import claims as real_claims
from fencepost.store import inbox, ownership, recovery, tool_calls
from fencepost.store import steps as real_steps
from fencepost.store.claims import Seen, Wanted
from fencepost.store.ownership import Owner
from fencepost.store.recovery import Abandoned
from fencepost.store.steps import Interruption, Settlement
from tests.model import claims, steps
from tests.model.rows import Db
from tests.model.session import ORDINALS, RUNS, STEPS, Session
from tests.store.kit import LEASE, StoreKit, open_store

Result = TypeVar("Result")
LIMIT = 1
DEEP = "MODEL_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "15"))

executions = st.builds(lambda run, ordinal: run * 100 + ordinal, st.sampled_from(RUNS), st.sampled_from(ORDINALS))
hands = st.one_of(st.just(0), st.just(0), executions)
"""An execution; 0 is whoever owns the session."""
offsets = st.sampled_from((0, 0, 0, 1, -1, -1))
"""Which step, seen from the one in the ledger."""
answers: st.SearchStrategy[OwnerRun] = st.sampled_from(
    ("open", "closed", "reset", "terminated", "cancelled", "not-found", "unreachable")
)
Operation = Callable[[Session], Awaitable[Any]]


class SessionMachine(RuleBasedStateMachine):
    """Owners, a client, a user and a scan, at one session."""

    store: ClassVar[StoreKit]
    loop: ClassVar[asyncio.AbstractEventLoop]

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something in the store's loop."""
        return self.loop.run_until_complete(work)

    @initialize(ahead=st.sampled_from((0, 3, 4, 9, 9)))
    def begin(self, ahead: int) -> None:
        """Make a session with one input, with which its owner has come so far."""
        self.session = Session(self.store, self.run(self.store.new_session()))
        self.said: list[tuple[str, Operation]] = []
        self.seen: list[Owner] = []
        self.do("admit", lambda session: _admit(session, 0, "steer"))
        for _ in range(ahead):
            self.go_on()

    def do(self, what: str, operation: Operation) -> None:
        """Do something, and keep it to be done again."""
        self.said.append((what, operation))
        self.run(operation(self.session))  # type: ignore[arg-type]

    def whose(self, hand: int) -> int:
        """Give an execution: the named one, else the owner's."""
        row = self.session.db.row
        return hand or (row.execution if row is not None else 1)

    def place(self, execution: int, offset: int, *, following: bool = False) -> int:
        """Give a step near the one that the execution is at."""
        done = self.session.db.ledger(execution)
        at = (done.step if done is not None else 0) + offset
        return min(max(at + following, 1), STEPS[-1])

    @rule(n=st.integers(0, 3), delivery=st.sampled_from(("steer", "queue")))
    def admit(self, n: int, delivery: str) -> None:
        """A client admits input, new or once more."""
        known = [one.delivery for one in self.session.db.inputs if one.name == f"input {n}"]
        how = known[0] if known else delivery
        self.do(f"admit {n}", lambda session: _admit(session, n, how))

    @rule(execution=executions, answer=answers, force=st.booleans(), reason=st.sampled_from(("lost", "shutdown")))
    def claim(self, execution: int, answer: OwnerRun, force: bool, reason: str) -> None:
        """A run claims, having asked about the owner."""
        owner = self.run(_owner(self.session))
        self.do(f"claim {execution} {answer}", lambda session: _claim(session, execution, owner, answer, force, reason))

    @rule(hand=hands, offset=offsets, queued=st.booleans())
    def prepare(self, hand: int, offset: int, queued: bool) -> None:
        """Begin a step."""
        execution = self.whose(hand)
        step = self.place(execution, offset, following=True)
        self.do(f"prepare {execution} {step}", lambda session: _prepare(session, execution, step, queued))

    @rule(hand=hands, offset=offsets, attempt=st.sampled_from((1, 1, 1, 2)))
    def request(self, hand: int, offset: int, attempt: int) -> None:
        """Record an intent."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"request {execution} {step} {attempt}", lambda session: _request(session, execution, step, attempt))

    @rule(hand=hands, offset=offsets, attempt=st.sampled_from((1, 1, 2)))
    def attempt_failed(self, hand: int, offset: int, attempt: int) -> None:
        """An attempt ends without output."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"fail {execution} {step} {attempt}", lambda session: _failed(session, execution, step, attempt))

    @rule(hand=hands, offset=offsets, attempt=st.sampled_from((1, 1, 1, 2)), what=st.sampled_from(("said", "tools")))
    def publish(self, hand: int, offset: int, attempt: int, what: str) -> None:
        """The stream says something."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"publish {execution} {step}", lambda session: _publish(session, execution, step, attempt, what))

    @rule(hand=hands, offset=offsets, start=st.booleans())
    def tool(self, hand: int, offset: int, start: bool) -> None:
        """A tool starts, or ends."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"tool {execution} {step}", lambda session: _tool(session, execution, step, start=start))

    @rule(
        hand=hands,
        offset=offsets,
        how=st.sampled_from(("said", "tools", "failed", "cut", "user", "cancelled", "shutdown")),
        up_to=st.one_of(st.none(), st.integers(0, 3)),
    )
    def settle(self, hand: int, offset: int, how: str, up_to: int | None) -> None:
        """A step ends, or is interrupted."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"settle {execution} {step} {how}", lambda session: _settle(session, execution, step, how, up_to))

    @rule(hand=hands, offset=offsets, interrupted=st.booleans())
    def release(self, hand: int, offset: int, interrupted: bool) -> None:
        """A run gives the session back."""
        execution = self.whose(hand)
        step = self.place(execution, offset)
        self.do(f"release {execution} {step}", lambda session: _release(session, execution, step, interrupted))

    @rule()
    def go_on(self) -> None:
        """The owner does what comes next, so that histories get anywhere."""
        row = self.session.db.row
        execution = row.execution if row is not None else 1
        done = self.session.db.ledger(execution)
        if row is None or done is None:
            free = [e for e in sorted(self.session.executions.values()) if self.session.db.ledger(e) is None]
            self.claim(free[0] if free else 1, "closed", False, "lost")
        elif done.stage in ("claimed", "settled"):
            self.prepare(0, 0, True)
        elif done.stage == "prepared":
            self.request(0, 0, 1)
        elif not row.message:
            self.publish(0, 0, done.attempt, "said")
        else:
            self.settle(0, 0, "said", None)

    @rule()
    def late_release(self) -> None:
        """The owner ends a step and begins the next one with new input; then the release of the first comes again."""
        for _ in range(6):
            row = self.session.db.row
            done = self.session.db.ledger(row.execution) if row is not None else None
            if done is not None and done.stage == "settled":
                break
            self.go_on()
        self.admit(len(self.session.db.inputs) + 10, "steer")
        self.prepare(0, 0, True)
        self.release(0, -1, False)

    @precondition(lambda self: self.session.db.row is not None and not self.session.db.row.expired)
    @rule()
    def expire(self) -> None:
        """The lease runs out."""
        self.run(_expire(self.session))

    @rule(answer=answers, stale=st.booleans())
    def scan(self, answer: OwnerRun, stale: bool) -> None:
        """A scan acts on a claim that it has seen, now or long ago."""
        owner = self.run(_owner(self.session))
        if owner is not None:
            self.seen.append(owner)
        if self.seen:
            seen = self.seen[0 if stale else -1]
            self.do(f"scan {answer}", lambda session: _scan(session, seen, answer))

    @precondition(lambda self: self.session.db.row is not None)
    @rule(answer=st.sampled_from(("closed", "reset", "terminated", "cancelled")))
    def end(self, answer: OwnerRun) -> None:
        """The owner's run ends, and the scan finds it when its lease has run out."""
        self.run(_expire(self.session))
        self.scan(answer, False)

    @rule(back=st.integers(1, 6))
    def again(self, back: int) -> None:
        """A twin does something that was done before."""
        what, operation = self.said[-min(back, len(self.said))]
        self.do(f"again: {what}", operation)


async def _owner(session: Session) -> Owner | None:
    async with session.store.database.read() as conn:
        return await ownership.owner_of(conn, session.session_id)


async def _admit(session: Session, n: int, delivery: Any) -> None:
    name = derived_id("msg", session.session_id, n)

    async def work() -> bool:
        given = (session.session_id, name, Prompt(text=f"input {n}"), delivery)
        return bool((await session.store.do(inbox.admit, *given)).claimed)

    await session.both(lambda db: claims.admit(db, f"input {n}", delivery), work, f"admit {n}")


async def _claim(
    session: Session, execution: int, owner: Owner | None, answer: OwnerRun, force: bool, reason: Any
) -> None:
    token = session.real(execution)
    seen = (session.executions[owner.execution_id], int(owner.owner_id[4:]), answer) if owner is not None else None

    def model(db: Db) -> tuple[Db, tuple[bool, bool]]:
        after, held, exhausted = claims.claim(
            db, session.token(execution), seen, reason=reason, force=force, limit=LIMIT
        )
        return after, (held, exhausted)

    async def work() -> tuple[bool, bool]:
        wanted = Wanted(token, force=force, reason=reason, max_continuations=LIMIT)
        claimed = await session.store.do(
            real_claims.claim, wanted, Seen(owner, answer) if owner is not None else None, LEASE
        )
        return claimed.held, claimed.exhausted

    await session.both(model, work, f"claim {execution}")


async def _prepare(session: Session, execution: int, step: int, queued: bool) -> None:
    async def work() -> tuple[int, bool]:
        done = await session.store.prepare(session.real(execution), step, queued=queued)
        return done.promoted, done.continued

    await session.both(
        lambda db: steps.prepare(db, session.token(execution), step, queued=queued), work, f"prepare {execution} {step}"
    )


async def _request(session: Session, execution: int, step: int, attempt: int) -> None:
    await session.both(
        lambda db: (steps.request(db, session.token(execution), step, attempt), None),
        lambda: session.store.do(real_steps.request, session.real(execution), step, attempt, LEASE),
        f"request {execution} {step} {attempt}",
    )


async def _failed(session: Session, execution: int, step: int, attempt: int) -> None:
    await session.both(
        lambda db: (steps.attempt_failed(db, session.token(execution), step, attempt), None),
        lambda: session.store.do(real_steps.attempt_failed, session.real(execution), step, attempt),
        f"attempt_failed {execution} {step} {attempt}",
    )


async def _publish(session: Session, execution: int, step: int, attempt: int, what: str) -> None:
    work = session.work(execution, step, attempt)
    if any((one.execution, one.step) == (execution, step) for one in session.db.calls):
        return  # the model knows one call for each step, which is the last that it says
    row = session.db.row
    started = [work.started()] if row is None or not row.message else []

    async def publish() -> None:
        if what == "tools":
            await work.publish(*started, *work.called("call_1"))
        else:
            if started:
                await work.publish(*started)
            await work.say("words", f"t{session.ordinal}")

    await session.both(
        lambda db: (steps.publish(db, session.token(execution), step, attempt, what), None),
        publish,
        f"publish {execution} {step} {what}",
    )


async def _tool(session: Session, execution: int, step: int, *, start: bool) -> None:
    work, token = session.work(execution, step), session.token(execution)

    async def started() -> None:
        await session.store.do(tool_calls.start, work.token, work.message_id, "call_1", LEASE)

    await session.both(
        lambda db: ((steps.start_tool if start else steps.settle_tool)(db, token, step), None),
        started if start else lambda: work.settle_tool("call_1"),
        f"{'start' if start else 'end'} tool {execution} {step}",
    )


async def _settle(session: Session, execution: int, step: int, how: str, up_to: int | None) -> None:
    work, done = session.work(execution, step), session.db.ledger(execution)
    fresh = done is not None and not done.passed(step, "settled")
    if done is not None and fresh and (done.step, done.stage) not in ((step, "prepared"), (step, "requested")):
        how = how if how in ("user", "cancelled", "shutdown") else "user"  # what has not begun can only be interrupted
    limit = LIMIT if how == "cut" else None
    how = "failed" if how == "cut" else how
    up_to = None if up_to is None else min(up_to, len(session.admitted))
    settlement: Settlement
    if how in ("said", "tools"):
        settlement = work.ended("tool-calls" if how == "tools" else "stop")
    elif how == "failed":
        settlement = work.failed(max_continuations=limit)
    else:
        seq = None if up_to is None else session.admitted[up_to - 1] if up_to else 0
        settlement = Settlement(Interruption(how, "int_1", None, seq))  # type: ignore[arg-type]
    await session.both(
        lambda db: steps.settle(db, session.token(execution), step, how, up_to=up_to, limit=limit),
        lambda: work.settle(settlement),
        f"settle {execution} {step} {how}",
    )


async def _release(session: Session, execution: int, step: int, interrupted: bool) -> None:
    await session.both(
        lambda db: claims.release(db, session.token(execution), step, interrupted=interrupted),
        lambda: session.store.release(session.real(execution), step, interrupted=interrupted),
        f"release {execution} {step}",
    )


async def _expire(session: Session) -> None:
    await session.store.expire(session.session_id)
    assert session.db.row is not None
    session.db = session.db._replace(row=session.db.row._replace(expired=True))


async def _scan(session: Session, owner: Owner, answer: OwnerRun) -> None:
    seen = (session.executions[owner.execution_id], int(owner.owner_id[4:]), answer)
    now = await _owner(session)
    same = now is not None and now.execution_id == owner.execution_id
    expires_at = now.expires_at if same and now is not None else owner.expires_at
    hint = Abandoned(session.session_id, owner.execution_id, owner.owner_id, expires_at)

    async def work() -> str:
        outcome = await session.store.do(recovery.reconcile, hint, answer, LIMIT, LEASE)
        return "ended" if outcome.did in ("settled", "freed") else outcome.did

    await session.both(lambda db: claims.scan(db, seen, LIMIT), work, f"scan {answer}")


@pytest.fixture
def opened(postgres_url: str, template_database: str) -> Iterator[StoreKit]:
    """A store in an event loop of its own: Hypothesis calls from outside any loop."""
    loop = asyncio.new_event_loop()
    context: AbstractAsyncContextManager[StoreKit] = open_store(postgres_url, template_database)
    store = loop.run_until_complete(context.__aenter__())
    SessionMachine.store, SessionMachine.loop = store, loop
    yield store
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


@pytest.mark.timeout(120 + 3 * EXAMPLES)
def test_the_store_does_what_the_model_does(opened: StoreKit) -> None:
    """Random histories, shrunk when one shows a difference."""
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        derandomize=not DEEP,
        phases=(Phase.generate, Phase.shrink) if DEEP else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )
    run_state_machine_as_test(SessionMachine, settings=chosen)


@pytest.mark.parametrize("force", [False, True])
def test_a_continuation_that_is_cut_off_too(opened: StoreKit, force: bool) -> None:
    """Random histories that once showed a difference: the turn is given up, and claimed again or not."""
    history = SessionMachine()
    history.begin(ahead=3)
    history.claim(answer="open", execution=2, force=False, reason="lost")
    history.go_on()
    history.claim(answer="open", execution=3, force=force, reason="lost")
    assert (history.session.db.row is not None) == force
    assert [one.exhausted for one in history.session.db.ledgers] == [False, False, True]
    history.go_on()
