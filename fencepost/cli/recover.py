"""`fencepost recover`: one recovery scan, by hand, and what it did or would do for each session."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from fencepost.cli import terminal
from fencepost.cli.entry import OK
from fencepost.cli.stack import open_place
from fencepost.cli.terminal import Notices
from fencepost.config import load_settings
from fencepost.domain.errors import UnavailableError
from fencepost.recoveries import Finding, Scan
from fencepost.runs import Runs
from fencepost.services import connect_temporal
from fencepost.store import migrate
from fencepost.store.engine import Database
from fencepost.store.ownership import Lease
from fencepost.store.recovery import Did

_BATCH: Final = 200

DONE: Final[dict[Did, str]] = {
    "continued": "settled as interrupted, and it goes on",
    "settled": "settled as interrupted; it goes on with the next prompt",
    "freed": "its claim was given back; nothing was in progress",
    "given-up": "put aside",
    "overtaken": "its claim was given back; a newer answer is there",
    "postponed": "left alone; its run is open",
    "quarantined": "put aside",
    "woken": "started",
    "passed": "left alone; somebody else has it in hand",
}
_WOULD: Final[dict[Did, str]] = {
    "continued": "would be settled as interrupted, and go on",
    "settled": "would be settled as interrupted, and go on with the next prompt",
    "freed": "its claim would be given back; nothing was in progress",
    "given-up": "would be put aside",
    "overtaken": "its claim would be given back; a newer answer is there",
    "postponed": "would be left alone; its run is open",
    "quarantined": "would be put aside",
    "woken": "would be started",
    "passed": "would be left alone; somebody else has it in hand",
}


async def recover(config: Path | None, *, dry_run: bool, as_json: bool) -> int:
    """Scan once and show each session in a line. Raises UnavailableError when a service is away, after showing what was
    done before it went."""
    settings, environ = load_settings(config), dict(os.environ)
    say = Notices()
    async with open_place(settings, environ, say) as place:
        assert place.settings.database_url is not None
        limits = settings.limits
        database = Database(place.settings.database_url, pool_size=2)
        try:
            await migrate.check(database)
            scan = Scan(
                database,
                Runs(await connect_temporal(place.environ)),
                settings.task_queue,
                Lease(int(limits.lease_seconds * 1000), int(limits.renew_seconds * 1000)),
                limits.max_recovery_attempts,
                _BATCH,
                dry_run,
            )
            report = await scan.run()
        finally:
            await database.close()
    for line in _lines(report.findings, dry_run=dry_run, as_json=as_json):
        terminal.out(line)
    if report.cut_off is not None:
        raise UnavailableError(report.cut_off)
    if not report.findings:
        say("no session waits for recovery")
    elif len(report.findings) >= _BATCH:
        say("there may be more: the same command again goes on")
    return OK


def _lines(findings: list[Finding], *, dry_run: bool, as_json: bool) -> list[str]:
    sessions: dict[str, list[Finding]] = {}
    for finding in findings:
        sessions.setdefault(finding.session_id, []).append(finding)
    words = _WOULD if dry_run else DONE
    lines = []
    for session_id, found in sessions.items():
        errors = [one.outcome.error for one in found if one.outcome.error is not None]
        if as_json:
            about = {"id": session_id, "did": [one.outcome.did for one in found], "dryRun": dry_run}
            lines.append(json.dumps(about | ({"error": "; ".join(errors)} if errors else {}), ensure_ascii=False))
            continue
        said = ", ".join(dict.fromkeys(words[one.outcome.did] for one in found))
        lines.append(f"{session_id}  {terminal.one_line(': '.join([said, *errors]))}")
    return lines
