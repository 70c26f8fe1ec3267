"""Moving a session: in the database first, which makes the old place's work stale; then its run is told."""

from __future__ import annotations

import asyncio

from fencepost.domain.errors import ClaimRefusedError
from fencepost.domain.inbox import Location
from fencepost.runs import Runs
from fencepost.store import moves, ownership
from fencepost.store.claims import AskAgainError, Seen
from fencepost.store.engine import Database
from fencepost.store.moves import Move

_LOOKS = 20
_AGAIN_SECONDS = 1.0


async def relocate(database: Database, runs: Runs, session_id: str, location: Location, task_queue: str) -> Move:
    """Move a session, and have its run go on at the new place, on the task queue if none is open.

    Of a session at work Temporal is asked first whether somebody has stopped its run, and an outage is waited out.
    Raises NotFoundError, InvalidInputError for what cannot be a location, and ClaimRefusedError when the session
    changes hands each time that it is looked at.
    """
    place, seen = moves.checked(location), None
    for _ in range(_LOOKS):
        try:
            move: Move = await database.transact(
                lambda conn, seen=seen: moves.move(conn, session_id, place, seen)  # type: ignore[misc]
            )
        except AskAgainError:
            seen = await _ask(database, runs, session_id)
            continue
        if move.fenced is not None or (move.moved and move.owed):
            await runs.relocated(session_id, task_queue, move.fenced, owed=move.owed)
        return move
    raise ClaimRefusedError(f"session {session_id} changes hands too fast to be moved: try again")


async def _ask(database: Database, runs: Runs, session_id: str) -> Seen | None:
    async with database.read() as conn:
        owner = await ownership.owner_of(conn, session_id)
    if owner is None:
        return None
    while (run := await runs.state(session_id, owner.owner_id)) == "unreachable":  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_AGAIN_SECONDS)
    return Seen(owner, run)
