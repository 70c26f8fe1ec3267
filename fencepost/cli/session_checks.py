"""`fencepost doctor --sessions`: what is stuck, in words that say what to do; and with `--repair`, what was done."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

from temporalio.client import Client

from fencepost.cli import arguments, findings, terminal
from fencepost.cli.entry import FAILED, OK, UNREACHABLE
from fencepost.cli.findings import Check
from fencepost.cli.recover import DONE
from fencepost.cli.stack import with_temporal
from fencepost.cli.terminal import Notices
from fencepost.config import Settings, external_services, load_settings
from fencepost.domain.errors import UnavailableError
from fencepost.domain.ownership import OwnerRun
from fencepost.local import upkeep
from fencepost.recoveries import Scan
from fencepost.repairs import COMPARED, MOST, Deed, Findings, Inspection, Trouble
from fencepost.runs import CANNOT_PROGRESS, Runs
from fencepost.services import connect_temporal
from fencepost.store import migrate
from fencepost.store.engine import Database
from fencepost.store.ownership import Lease

_SECONDS: Final = 6.0
_NOT_RUNNING: Final = "the local servers do not run, so that there is nothing to look at: start `fencepost dev`"
_NAMED: Final = 3

_RUNS: Final = {
    "open": "is open",
    "closed": "has ended",
    "reset": "was reset",
    "terminated": "was terminated",
    "cancelled": "was cancelled",
    "not-found": "is not known to Temporal",
    "unreachable": "cannot be asked about: Temporal does not answer",
}
_DEEDS: Final[dict[Deed, str]] = {
    **{did: words for did, words in DONE.items()},  # noqa: C416 - of a wider type
    "ended": "its run was ended, so that another one goes on",
    "untold": "but that one may not be told what is not in the inbox: look, and send it again",
    "moves": "nothing to do; its run goes on, or has ended by now",
    "rebuilt": "its projection was made anew from the log",
    "agrees": "nothing to do; its projection agrees with the log by now",
    "at-work": "left alone; it is being worked on: try again when it is idle",
    "lifted": "what was put aside is right by now, and waits to be run",
    "stays": "left alone; it is still wrong",
    "alone": "left alone",
    "not-asked": "left alone; Temporal does not answer",
}


async def examine(
    config: Path | None, session_ids: Sequence[str], *, repair: bool, as_json: bool, attempts: int | None = None
) -> int:
    """Look at all sessions or at these, show what is stuck, and with `repair` mend what can be mended safely.

    Raises UnavailableError without the database; without Temporal only the database is looked at.
    """
    for session_id in session_ids:
        arguments.session_id(session_id)
    settings, environ = load_settings(config), dict(os.environ)
    address, temporal_environ = await asyncio.to_thread(_services, settings, environ)
    say = Notices()
    database = Database(address, pool_size=4)
    try:
        await migrate.check(database)
        inspection = _inspection(
            settings, database, await _temporal(temporal_environ, say), attempts or CANNOT_PROGRESS
        )
        found, failed = await inspection.look(session_ids or None), None
        try:
            if repair:
                await inspection.repair(found)
        except UnavailableError as error:
            failed = error  # what was done before is shown first
    finally:
        await database.close()
    if as_json:
        terminal.out(json.dumps(_as_json(found), ensure_ascii=False))
    else:
        _show(found, named=bool(session_ids), say=say)
    if failed is not None:
        raise failed
    if not found.asked:
        return UNREACHABLE
    return FAILED if any(_check(each).status == "wrong" for each in found.troubles if not each.is_repaired) else OK


def _services(settings: Settings, environ: Mapping[str, str]) -> tuple[str, Mapping[str, str] | None]:
    """Give where the services are that run, without starting any."""
    given = external_services(settings, environ)
    if given.temporal and given.postgresql:
        assert settings.database_url is not None
        return settings.database_url, environ
    status = upkeep.look(settings.home)
    address = settings.database_url
    if not given.postgresql:
        address = None if status.postgresql is None else status.postgresql.address
    if address is None:
        raise UnavailableError(_NOT_RUNNING)
    if given.temporal:
        return address, environ
    return address, None if status.temporal is None else with_temporal(environ, status.temporal.address)


async def _temporal(environ: Mapping[str, str] | None, say: Notices) -> Client | None:
    try:
        if environ is None:
            raise UnavailableError("Temporal does not run on this machine now")
        async with asyncio.timeout(_SECONDS):
            return await connect_temporal(environ)
    except UnavailableError as error:
        say(f"{error.message}; only the database is looked at")
    except TimeoutError:
        say("Temporal does not answer; only the database is looked at")
    return None


def _inspection(settings: Settings, database: Database, temporal: Client | None, attempts: int) -> Inspection:
    limits = settings.limits
    lease = Lease(int(limits.lease_seconds * 1000), int(limits.renew_seconds * 1000))
    # Every run is asked about by the inspection itself, and a scan's own is asked again before anything is done.
    runs = Runs(temporal) if temporal is not None else _NoRuns()
    scan = Scan(database, runs, settings.task_queue, lease, limits.max_recovery_attempts)
    return Inspection(scan, temporal, attempts, limits.prompt_bytes)


class _NoRuns:
    """What a scan has of Temporal while it is away."""

    async def state(self, session_id: str, run_id: str) -> OwnerRun:
        """Say that nobody answers."""
        del session_id, run_id
        return "unreachable"

    async def redrive(self, session_id: str, task_queue: str) -> None:
        """Raise UnavailableError."""
        raise UnavailableError(f"Temporal does not answer: no run of {session_id} on {task_queue} was started")


# Words


def _check(trouble: Trouble) -> Check:
    """Put one finding into words: what is stuck, and its mend."""
    facts, named = trouble.facts, f"`fencepost doctor --sessions --repair {trouble.session_id}`"
    match trouble.kind:
        case "stuck-run":
            return _of_run(trouble, named)
        case "expired-claim":
            return _of_claim(trouble, named)
        case "projection" if "error" in facts:
            detail = f"its log cannot be projected: {facts['error']}"
            mend = "restore the session's events from a back-up; nothing is repaired without them"
        case "projection":
            detail = f"what is shown of it differs from its log in {_differences(facts)}"
            mend = f"make it anew from the log: {named}"
        case "put-aside":
            return _of_aside(trouble, named)
        case "pending-wake":
            what = "a continuation waits" if facts["what"] == "continuation" else "input waits"
            tried = f"started {_times(facts['attempts'])}" if facts["attempts"] else "never started"
            detail = f"{what} for {_time(facts['age'])}, and no run has begun with it: {tried}"
            mend = f"see that a worker runs: it looks every 10 s by itself; now: {named}"
        case _:
            assert_never(trouble.kind)
    return Check(trouble.session_id, "wrong", terminal.one_line(detail), mend)


def _of_run(trouble: Trouble, named: str) -> Check:
    facts = trouble.facts
    if facts["attempt"] > 1:
        why = f"its workflow task failed {_times(facts['attempt'] - 1)}"
    else:
        why = f"its lease ran out {_time(-facts['leaseLeft'])} ago, and it does not say what it does"
    detail = f"run {facts['runID']} is open and cannot progress: {why}"
    mend = f"run workers of a release that fits it; then end the run, and the turn goes on in another one: {named}"
    return Check(trouble.session_id, "wrong", terminal.one_line(detail), mend)


def _of_claim(trouble: Trouble, named: str) -> Check:
    facts = trouble.facts
    lease = f"its lease ran out {_time(-facts['leaseLeft'])} ago; the run that owns it, {facts['runID']},"
    detail = terminal.one_line(f"{lease} {_RUNS[facts['run']]}")
    if facts["run"] == "open" and facts["answers"]:
        return Check(
            trouble.session_id, "warning", f"{detail} and answers: it waits", "nothing has to be done: it goes on"
        )
    if facts["run"] == "open":
        mend = "start a worker: the run waits for one, and goes on with it"
        return Check(trouble.session_id, "wrong", f"{detail}, and no worker serves it", mend)
    if facts["run"] == "unreachable":
        return Check(trouble.session_id, "wrong", detail, "start Temporal again; then workers see to it by themselves")
    mend = f"see that a worker runs: it settles the turn within 10 s; now: {named}"
    return Check(trouble.session_id, "wrong", detail, mend)


def _of_aside(trouble: Trouble, named: str) -> Check:
    facts = trouble.facts
    what = "the claim of its last turn" if facts["what"] == "claim" else "the continuation of its last turn"
    detail = terminal.one_line(f"{what} was put aside: {facts['error']}")
    if facts.get("sessionExists") is False:
        mend = f"nothing waits for it; delete the row of session_recovery with execution_id {facts['executionID']}"
    elif facts.get("phase", "pending") != "pending":
        mend = "send a prompt: the session goes on with it"
    else:
        mend = f"send a prompt: the session goes on with it; or look whether it is right by now: {named}"
    return Check(trouble.session_id, "warning", detail, mend)


def _differences(facts: dict[str, Any]) -> str:
    places = [
        f"{one['table']} {one['id']}" if one["column"] is None else f"{one['table']}.{one['column']} of {one['id']}"
        for one in facts["differences"]
    ]
    more = facts["count"] - _NAMED
    number = f"{facts['count']} place{'' if facts['count'] == 1 else 's'}"
    return f"{number}: {', '.join(places[:_NAMED])}{f' and {more} more' if more > 0 else ''}"


def _time(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _done(trouble: Trouble) -> str | None:
    if not trouble.deeds:
        return None
    said = ", ".join(dict.fromkeys(_DEEDS[deed] for deed in trouble.deeds))
    return terminal.one_line(f"{said}: {trouble.error}" if trouble.error else said)


def _as_json(found: Findings) -> dict[str, Any]:
    listed = []
    for each in found.troubles:
        check = _check(each)
        one: dict[str, Any] = {"id": each.session_id, "kind": each.kind, "status": check.status, "detail": check.detail}
        one |= {"mend": check.mend, "facts": each.facts}
        if each.deeds:
            one |= {"did": each.deeds, "repaired": each.is_repaired, "done": _done(each)}
        listed.append(one)
    about = {"sessions": found.sessions, "compared": found.compared, "temporal": found.asked, "more": found.more}
    return {"findings": listed, **about}


def _show(found: Findings, *, named: bool, say: Notices) -> None:
    """Write the findings as `doctor` does, then a line for each repair, then what was looked at."""
    if found.troubles:
        findings.show([_check(each) for each in found.troubles])
    for each in found.troubles:
        done = _done(each)
        if done is not None:
            terminal.out(f"{each.session_id}  {done}")
    count = f"{found.sessions} session{'' if found.sessions == 1 else 's'} looked at"
    if not found.troubles:
        terminal.out(f"nothing is stuck: {count}")
    if not named:
        say(f"{count}; {found.compared} compared with their logs, of the {COMPARED} most recently active: name others")
    if found.more:
        say(f"there may be more: at most {MOST} of each kind are looked at; mend these first")
    if not found.asked:
        say("Temporal could not be asked about runs: nothing that depends on them was judged or repaired")
