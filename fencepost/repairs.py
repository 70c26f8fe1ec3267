"""What is stuck, and its repair: whatever is found is verified again before anything is done, and done by what does it
in a running system: the scan's reconciliation and wakes, the next run's takeover, the rebuild of a projection.

Looking changes nothing. Repairs may be made from several places at once, and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, assert_never

from temporalio.client import Client

from fencepost import unread
from fencepost.domain.errors import FencepostError, NotFoundError, UnavailableError
from fencepost.domain.ownership import OwnerRun
from fencepost.recoveries import AwayError, Scan
from fencepost.run_states import RunFacts
from fencepost.runs import CANNOT_PROGRESS, Runs
from fencepost.store import rebuild, stuck
from fencepost.store.recovery import Abandoned, Did, Wake
from fencepost.store.stuck import SeenClaim
from fencepost.unread import Unread

Result = TypeVar("Result")

MOST = 200
"""How many claims, wakes and rows that were put aside are looked at, of each kind."""

COMPARED = 20
"""How many projections are compared when no sessions are named: those of the most recently active ones."""

_AT_ONCE = 10
_SECONDS = 5.0

Kind: TypeAlias = Literal["stuck-run", "projection", "expired-claim", "put-aside", "pending-wake"]
"""In the order of their repair: a claim or a continuation may be put aside for what its projection lacks."""

Deed: TypeAlias = (
    Did | Literal["ended", "untold", "rebuilt", "agrees", "at-work", "lifted", "stays", "alone", "not-asked", "moves"]
)
"""Beside what a scan does. `ended`: the run was terminated, and the session's next one was started; `untold`: that one
was not started, or not told everything; `moves`: it is not stuck any more; `lifted`: what was put aside is right by
now, and waits again; `stays`: it is still wrong; `at-work`: a projection in use; `alone`: nothing that could be
repaired; `not-asked`: Temporal did not answer."""

LEFT: frozenset[Deed] = frozenset({"untold", "at-work", "stays", "alone", "not-asked", "quarantined", "given-up"})
"""After these what was found is still there."""


@dataclass(slots=True)
class Trouble:
    """One thing that is stuck. `facts` say what, for programs; `deeds` what the repair did, none before it."""

    session_id: str
    kind: Kind
    facts: dict[str, Any]
    claim: Abandoned | None = None
    wake: Wake | None = None
    run: OwnerRun | None = None
    deeds: list[Deed] = field(default_factory=list)
    error: str | None = None

    @property
    def is_repaired(self) -> bool:
        """Say whether a repair was made, and nothing of it was left."""
        return bool(self.deeds) and not LEFT & set(self.deeds)


@dataclass(slots=True)
class Findings:
    """What was found. `sessions` were looked at, `compared` of them with their logs; `asked` says that Temporal
    answered, `more` that there was more to look at than is looked at."""

    troubles: list[Trouble]
    sessions: int
    compared: int
    asked: bool
    more: bool


@dataclass(slots=True)
class Inspection:
    """The tools of one look, and of the repair after it. `attempts` is the attempt at a workflow task from which on a
    run cannot progress, `prompt_bytes` the size of the largest prompt that is admitted."""

    scan: Scan
    temporal: Client | None
    attempts: int = CANNOT_PROGRESS
    prompt_bytes: int = 1_000_000
    runs: Runs | None = field(init=False)
    _limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE), init=False)

    def __post_init__(self) -> None:
        self.runs = Runs(self.temporal) if self.temporal is not None else None

    async def look(self, ids: Sequence[str] | None = None) -> Findings:
        """Look at all sessions, or at these. Raises UnavailableError when the database is away, and NotFoundError for a
        named session that neither it nor Temporal knows."""
        async with self.scan.database.read() as conn:
            claims = await stuck.claims(conn, MOST, ids)
            wakes = await stuck.wakes(conn, MOST, ids)
            aside = await stuck.put_aside(conn, MOST, ids)
            compared = list(dict.fromkeys(ids)) if ids is not None else await stuck.recent(conn, COMPARED)
        of_claims = await self._gather(self._claim, claims)
        found = [each for each in of_claims if each is not None]
        known_runs = {claim.seen.owner_id for claim in claims} | {str(each.facts["runID"]) for each in found}
        found += await self._other_runs(ids, known_runs)
        found += [
            Trouble(row.session_id, "put-aside", {"what": "continuation", "error": row.error, "phase": row.phase,
                    "executionID": row.execution_id, "sessionExists": row.exists})
            for row in aside
        ]  # fmt: skip
        for each in wakes:
            what = "continuation" if each.wake.kind == "recovery" else "input"
            facts = {"what": what, "id": each.wake.id, "age": each.age, "attempts": each.wake.attempts}
            found.append(Trouble(each.wake.session_id, "pending-wake", facts, wake=each.wake))
        known = {each.session_id for each in found}
        for session_id in compared:
            found += await self._projection(session_id, known=session_id in known or ids is None)
        seen = {each.session_id for each in claims} | {each.session_id for each in found} | set(compared)
        more = max(len(claims), len(wakes), len(aside)) >= MOST
        return Findings(found, len(seen), len(compared), self.runs is not None, more)

    async def _gather(self, ask: Callable[[Any], Awaitable[Result]], about: Sequence[Any]) -> list[Result]:
        async def bounded(one: Any) -> Result:
            async with self._limit:
                return await ask(one)

        return list(await asyncio.gather(*(bounded(one) for one in about)))

    async def _facts(self, session_id: str, run_id: str | None) -> RunFacts:
        """Ask Temporal; once it does not answer it is not asked again."""
        facts = RunFacts("unreachable") if self.runs is None else await self.runs.look(session_id, run_id)
        if facts.state == "unreachable":
            self.runs = None
        return facts

    async def _claim(self, claim: SeenClaim) -> Trouble | None:
        seen, expired = claim.seen, claim.left <= 0
        facts = await self._facts(claim.session_id, seen.owner_id)
        # Where the owner has continued as new, that is the run which goes on.
        run_id = facts.run_id or seen.owner_id
        about: dict[str, Any] = {"runID": run_id, "executionID": seen.execution_id, "run": facts.state}
        about["leaseLeft"] = claim.left
        if facts.state == "open" and facts.attempt >= self.attempts:
            return self._stuck(claim.session_id, facts, about)
        if not expired:
            return None
        if claim.error is not None:
            about |= {"what": "claim", "error": claim.error}
            return Trouble(claim.session_id, "put-aside", about, claim=seen, run=facts.state)
        if facts.state == "open":
            about["answers"] = await self._answers(claim.session_id, run_id)
            about["served"] = about["answers"] or await self._is_served(facts.task_queue)
            if about["served"] and not about["answers"]:
                return self._stuck(claim.session_id, facts, about)
        return Trouble(claim.session_id, "expired-claim", about, claim=seen, run=facts.state)

    def _stuck(self, session_id: str, facts: RunFacts, about: dict[str, Any]) -> Trouble:
        return Trouble(session_id, "stuck-run", {**about, "runID": facts.run_id, "attempt": facts.attempt}, run="open")

    async def _other_runs(self, ids: Sequence[str] | None, known: set[str]) -> list[Trouble]:
        """Look for runs that own no session and cannot progress: they failed before they could claim."""
        if self.runs is None:
            return []
        named = [(one, None) for one in ids] if ids is not None else await self.runs.failing(self.scan.task_queue, MOST)

        async def look(one: tuple[str, str | None]) -> Trouble | None:
            facts = await self._facts(*one)
            if facts.state != "open" or facts.run_id in known or facts.attempt < self.attempts:
                return None
            return self._stuck(one[0], facts, {})

        return [each for each in await self._gather(look, named) if each is not None]

    async def _answers(self, session_id: str, run_id: str) -> bool:
        return self.runs is not None and await self.runs.answers(session_id, run_id)

    async def _is_served(self, task_queue: str) -> bool:
        try:
            async with asyncio.timeout(_SECONDS):
                return self.runs is not None and await self.runs.is_served(task_queue)
        except TimeoutError:
            return False

    async def _projection(self, session_id: str, *, known: bool) -> list[Trouble]:
        try:
            found = await self.scan.database.transact(lambda conn: rebuild.differences(conn, session_id))
        except NotFoundError:
            if known:
                return []
            raise
        except UnavailableError:
            raise
        except Exception as error:
            words = error.message if isinstance(error, FencepostError) else type(error).__name__
            return [Trouble(session_id, "projection", {"error": words[:200]})]
        if not found:
            return []
        places = [{"table": one.table, "id": one.id, "column": one.column} for one in found]
        return [Trouble(session_id, "projection", {"count": len(found), "differences": places[:MOST]})]

    async def repair(self, findings: Findings) -> None:
        """Repair what was found, session after session, and note at each finding what was done.

        Raises UnavailableError when the database goes away; what was done before stays noted.
        """
        order = ("stuck-run", "projection", "expired-claim", "put-aside", "pending-wake")
        for each in sorted(findings.troubles, key=lambda one: (one.session_id, order.index(one.kind))):
            try:
                await self._mend(each)
            except AwayError as error:
                if "untold" not in each.deeds:
                    each.deeds.append("not-asked")
                each.error = str(error)
                self.runs = None
        findings.asked = self.runs is not None

    async def _mend(self, trouble: Trouble) -> None:
        match trouble.kind:
            case "stuck-run":
                await self._end(trouble)
            case "projection":
                await self._rebuild(trouble)
            case "expired-claim":
                await self._reconcile(trouble)
            case "put-aside" if trouble.claim is not None:
                await self._reconcile(trouble)
            case "put-aside":
                await self._reconsider(trouble)
            case "pending-wake":
                assert trouble.wake is not None
                await self._wake(trouble, trouble.wake)
            case _:
                assert_never(trouble.kind)

    async def _end(self, trouble: Trouble) -> None:
        """End a run that cannot progress, and start the session's next one, which takes over. What the run was sent is
        kept: admitted before its end as far as it can be, and told to the next run otherwise."""
        session_id, run_id = trouble.session_id, trouble.facts["runID"]
        facts = await self._facts(session_id, run_id)
        runs, temporal = self.runs, self.temporal
        if runs is None or temporal is None:
            trouble.deeds.append("not-asked")
            return
        stuck_still = (facts.state, facts.run_id) == ("open", run_id) and (
            facts.attempt >= self.attempts or await self._is_silent(session_id, facts)
        )
        if not stuck_still:
            trouble.deeds.append("moves")
            return
        await self._keep(temporal, session_id, run_id)
        await _asked(runs.end(session_id, run_id))
        trouble.deeds += ["ended", "untold"]
        left = await self._keep(temporal, session_id, run_id)  # with what came until its end
        await _asked(unread.send_again(temporal, session_id, facts.task_queue, left))
        trouble.deeds.remove("untold")

    async def _keep(self, temporal: Client, session_id: str, run_id: str) -> Unread:
        """Admit what the run was sent, and give what only a run can be told."""
        found = await _asked(unread.read(temporal, session_id, run_id))
        return await unread.admit(self.scan.database, session_id, found, self.prompt_bytes)

    async def _is_silent(self, session_id: str, facts: RunFacts) -> bool:
        """Say whether a run owns its session without a lease, and does not answer although there are workers."""
        async with self.scan.database.read() as conn:
            claims = await stuck.claims(conn, 1, [session_id])
        for claim in claims:
            if claim.left <= 0 and (await self._facts(session_id, claim.seen.owner_id)).run_id == facts.run_id:
                served = await self._is_served(facts.task_queue)
                return served and not await self._answers(session_id, facts.run_id)
        return False

    async def _rebuild(self, trouble: Trouble) -> None:
        if "error" in trouble.facts:
            trouble.deeds.append("alone")
            return
        session_id = trouble.session_id
        found = await self.scan.database.transact(lambda conn: stuck.replace_projection(conn, session_id))
        trouble.deeds.append("at-work" if found is None else "rebuilt" if found else "agrees")

    async def _reconcile(self, trouble: Trouble) -> None:
        assert trouble.claim is not None
        if self.runs is None:
            trouble.deeds.append("not-asked")
            return
        if trouble.facts.get("served") is False or (trouble.kind == "put-aside" and trouble.run == "open"):
            trouble.deeds.append("alone")
            return
        outcome = await self.scan.reconcile(trouble.claim)
        trouble.deeds.append(outcome.did)
        trouble.error = outcome.error
        await self._wake_all(trouble)

    async def _reconsider(self, trouble: Trouble) -> None:
        execution_id = trouble.facts["executionID"]
        lifted = await self.scan.database.transact(lambda conn: stuck.reconsider(conn, execution_id))
        trouble.deeds.append("lifted" if lifted else "stays")
        if lifted:
            await self._wake_all(trouble)

    async def _wake_all(self, trouble: Trouble) -> None:
        """Wake for what waits in the session by now."""
        if self.runs is None:
            return
        async with self.scan.database.read() as conn:
            waiting = await stuck.wakes(conn, MOST, [trouble.session_id], age=0)
        for each in waiting[:1]:
            await self._wake(trouble, each.wake)

    async def _wake(self, trouble: Trouble, wake: Wake) -> None:
        if self.runs is None:
            trouble.deeds.append("not-asked")
            return
        outcome = await self.scan.wake(wake)
        trouble.deeds.append(outcome.did)
        trouble.error = outcome.error or trouble.error


async def _asked(call: Awaitable[Result]) -> Result:
    """Ask Temporal: that it is away is another matter than that the database is."""
    try:
        return await call
    except UnavailableError as error:
        raise AwayError(error.message) from error
