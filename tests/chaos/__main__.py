"""`make chaos N=200 SEED=7`: random sessions under random faults, then one line that has to be all zeros."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fencepost.domain.errors import UnavailableError
from fencepost.process import leave
from fencepost.serving import forward_native_log
from fencepost.store import event_log
from fencepost.telemetry import configure_logging
from tests.chaos.arena import Arena, open_arena, say
from tests.chaos.faults import supervise, trouble
from tests.chaos.player import Player
from tests.checker import KINDS, LEFT_OVER, LOST, Violation, check


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--sessions", type=int, default=200, help="how many sessions are played (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="what all choices follow from (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (%(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="sessions at the same time (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the directory with the servers' state and the logs")
    return parser.parse_args()


async def play(arena: Arena, players: list[Player], at_once: int) -> None:
    """Play all sessions under faults, then wait for rest without new ones."""
    places = asyncio.Semaphore(at_once)

    async def one(player: Player) -> None:
        async with places:
            await player.play()

    troubling, supervising = asyncio.create_task(trouble(arena)), asyncio.create_task(supervise(arena))
    try:
        await asyncio.gather(*(one(player) for player in players))
    finally:
        troubling.cancel()
        with suppress(asyncio.CancelledError):
            await troubling
    say("waiting for rest")
    await asyncio.gather(*(player.rest() for player in players))
    supervising.cancel()
    for worker in arena.workers:
        # Whatever any hand still does is done before the check.
        if worker.process.returncode is None:
            worker.process.send_signal(signal.SIGTERM)
            await worker.process.wait()


_CHECKS = 5


async def verify(arena: Arena, players: list[Player]) -> list[Violation]:
    """Check every session."""
    found: list[Violation] = []
    for player in players:
        await player.close()
        if not player.rested:
            found.append(Violation(LEFT_OVER, player.session_id, "the session did not come to rest"))
        if player.cut_off is not None:
            found.append(Violation(LOST, player.session_id, f"its reader was cut off: {player.cut_off}"))
        found += await _checked(arena, player)
    return found


async def _checked(arena: Arena, player: Player) -> list[Violation]:
    """Check one session, again where the database was not there: on a crowded machine it ends a transaction whose
    client has not come to its next statement for seconds."""
    for _ in range(_CHECKS):
        try:
            return await check(arena.client._database, player.session_id, player.evidence)
        except UnavailableError as error:
            say(f"not checked: {error.message}")
    raise UnavailableError(f"session {player.session_id} could not be checked")


async def show(arena: Arena, session_id: str) -> None:
    """Show the log of a session in which something is wrong."""
    say(f"\n{session_id}")
    async with arena.client._database.read() as conn:
        for event in await event_log.read_after(conn, session_id, -1, 100_000):
            say(f"{event.seq:4} {event.type.removeprefix('session.next.')} {str(event.data)[:300]}")


async def run(options: argparse.Namespace, home: Path) -> int:
    """Do the whole run. Gives the exit code."""
    async with open_arena(options.seed, home, options.workers) as arena:
        players = [Player(arena, number) for number in range(options.sessions)]
        await play(arena, players, options.at_once)
        found = await verify(arena, players)
        arena.note_probes()
        for violation in found:
            say(str(violation))
        for session_id in sorted({violation.session_id for violation in found}):
            await show(arena, session_id)
        say(", ".join(f"{kind} {times}" for kind, times in sorted(Counter(arena.faults).items())))
    counts = Counter(violation.kind for violation in found)
    turns = sum(player.turns for player in players)
    parts = [f"sessions {len(players)}", f"turns {turns}", f"faults {len(arena.faults)}"]
    sys.stdout.write(", ".join([*parts, *(f"{kind} {counts[kind]}" for kind in KINDS)]) + "\n")
    if found:
        names = " ".join(sorted({violation.session_id for violation in found}))
        sys.stdout.write(f"seed {options.seed}: something is wrong with {names}\n")
    return 1 if found else 0


def main() -> int:
    """Run, and clean up. Gives the exit code."""
    options = parsed()
    configure_logging("error", "json")
    forward_native_log()  # else it goes to standard output, which is for the result
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: with all its processes
    home = Path(tempfile.mkdtemp(prefix="fencepost-chaos-", dir="/tmp"))
    home.chmod(0o711)
    try:
        return asyncio.run(run(options, home))
    finally:
        if options.keep:
            say(f"kept: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    for name in list(os.environ):
        if name.startswith(("FENCEPOST_", "TEMPORAL_", "PG")):
            del os.environ[name]
    leave(main())
