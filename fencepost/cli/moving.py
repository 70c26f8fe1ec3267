"""`fencepost session move`: where a session works from now on."""

from __future__ import annotations

import os
from pathlib import Path

from fencepost.cli import arguments, listing, terminal
from fencepost.cli.entry import OK
from fencepost.cli.stack import open_place
from fencepost.cli.terminal import Notices
from fencepost.client import open_client
from fencepost.config import load_settings
from fencepost.domain.inbox import Location
from fencepost.store import moves


async def move(session_id: str, directory: Path, workspace: str | None, *, as_json: bool, config: Path | None) -> int:
    """Move a session, and say where it works. A directory of another workspace is there for its own workers only."""
    arguments.session_id(session_id)
    settings, environ = load_settings(config), dict(os.environ)
    seen_here = workspace is None or workspace == settings.workspace.id
    place = moves.checked(
        Location(directory=arguments.directory(directory, exists=seen_here, option="DIRECTORY"), workspace_id=workspace)
    )
    say = Notices()
    async with (
        open_place(settings, environ, say) as where,
        open_client(where.settings, where.environ) as client,
    ):
        before = await client.get(session_id)
        done = await client.move(session_id, place)
    if as_json:
        listing.put_json(listing.session_json(done.session) | {"moved": done.moved})
    else:
        shown = terminal.one_line(place.directory)
        whose = "all workers" if workspace is None else f"workspace {workspace}"
        terminal.out(f"{session_id} works in {shown} ({whose})")
    if not done.moved:
        say("it was there already: nothing has changed")
    elif done.fenced is not None and done.owed:
        say("the turn that ran was interrupted, and goes on there")
    if done.moved and workspace is None and before.location.workspace_id is not None:
        say(f"its tools are not bound to workspace {before.location.workspace_id} any more: --workspace names one")
    return OK
