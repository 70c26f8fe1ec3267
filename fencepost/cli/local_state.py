"""`fencepost local`: what the local stack is doing, how it is stopped by hand, and how its state is deleted."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

from fencepost.cli import terminal
from fencepost.cli.entry import FAILED, OK, Signals
from fencepost.cli.machine_checks import size_text
from fencepost.cli.terminal import Notices
from fencepost.cli.workers import RunningWorker, running_workers, sweep_workers
from fencepost.config import Settings, load_settings
from fencepost.domain.errors import InvalidInputError
from fencepost.local import sweep, upkeep
from fencepost.local.state import Holder
from fencepost.local.upkeep import Server, StackStatus

_COMMAND_CHARACTERS: Final = 80
_INDENT: Final = "  "


async def status(config: Path | None, as_json: bool, signals: Signals) -> int:
    """Show what runs, who uses it, and what the state takes on the disk."""
    del signals
    home = load_settings(config).home
    found = upkeep.look(home)
    workers = running_workers(home)
    size = await asyncio.to_thread(upkeep.disk_use, home)
    if as_json:
        terminal.out(json.dumps(_as_object(found, workers, size), ensure_ascii=False))
        return OK
    for name, server in (("PostgreSQL", found.postgresql), ("Temporal", found.temporal)):
        _show_server(name, server)
    for worker in workers:
        terminal.out(f"worker: process {worker.pid}, task queue {worker.queue}")
    for holder in found.holders:
        terminal.out(f"used by: {_named(holder)}")
    if not found.holders:
        left = found.runs or workers
        terminal.out("used by: nobody" + ("; `fencepost local stop` ends what was left" if left else ""))
    terminal.out(f"state: {home}, {size_text(size)}")
    return OK


async def stop(config: Path | None, force: bool, signals: Signals) -> int:
    """Stop what nobody uses; with `force` end those who use it first."""
    del signals
    say = Notices()
    settings = load_settings(config)
    found = upkeep.look(settings.home)
    if found.holders and not force:
        say(f"fencepost: the local stack is in use by {_users(found)}: end that, or stop it with --force")
        return FAILED
    if found.holders:
        say(f"ending {_users(found)} ...")
        await asyncio.to_thread(upkeep.end_holders, found.holders)
    ended = await asyncio.to_thread(sweep_workers, settings.home, settings.limits.drain_grace_seconds + 5)
    if not await asyncio.to_thread(sweep, settings.home):
        now = upkeep.look(settings.home)
        say(f"fencepost: the local stack is in use again, by {_users(now)}")
        return FAILED
    did = found.runs or found.holders or ended
    terminal.out("stopped; the state stays" if did else "nothing was running")
    return OK


async def reset(config: Path | None, yes: bool, signals: Signals) -> int:
    """Delete the state, once somebody has said yes."""
    del signals
    say = Notices()
    settings = load_settings(config)
    found = upkeep.look(settings.home)
    if found.runs or found.holders or running_workers(settings.home):
        return _refuse(found, say)
    size = await asyncio.to_thread(upkeep.disk_use, settings.home)
    if not yes and not await _agreed(settings, size):
        say("nothing was deleted")
        return FAILED
    # Tool output of sessions elsewhere may be in the same directory, beside configured services.
    outputs = settings.database_url is None
    if not await asyncio.to_thread(upkeep.remove, settings.home, outputs=outputs):
        return _refuse(upkeep.look(settings.home), say)
    freed = size - await asyncio.to_thread(upkeep.disk_use, settings.home)
    terminal.out(f"deleted the local state in {settings.home} ({size_text(freed)})")
    return OK


def _refuse(found: StackStatus, say: Notices) -> int:
    if found.holders:
        mend = "end that first, or do it with `fencepost local stop --force`"
        say(f"fencepost: the local stack is in use by {_users(found)}: {mend}")
    else:
        say("fencepost: the local stack runs, though nobody uses it: stop it first, with `fencepost local stop`")
    return FAILED


async def _agreed(settings: Settings, size: int) -> bool:
    """Ask, without holding up the loop: so Ctrl-C works. Raises InvalidInputError when nobody can be asked."""
    if not sys.stdin.isatty():
        raise InvalidInputError("nobody can be asked here: add --yes to delete the local state")
    sys.stderr.write(f"Delete all local sessions in {settings.home} ({size_text(size)})? [y/N] ")
    sys.stderr.flush()
    loop, answered = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), answered.set)
    try:
        await answered.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show_server(name: str, server: Server | None) -> None:
    if server is None:
        terminal.out(f"{name}: not running")
        return
    silent = "" if server.answers else ", does not answer"
    terminal.out(f"{name}: process {server.pid}{silent}")
    terminal.out(f"{_INDENT}{server.address}")
    if server.ui_url is not None:
        terminal.out(f"{_INDENT}{server.ui_url}")


def _as_object(found: StackStatus, workers: list[RunningWorker], size: int) -> dict[str, Any]:
    return {
        "home": str(found.home),
        "size": size,
        "postgresql": _server_object(found.postgresql),
        "temporal": _server_object(found.temporal),
        "workers": [
            {"pid": each.pid, "queue": each.queue, "holders": [one.pid for one in each.holders]} for each in workers
        ],
        "holders": [{"pid": one.pid, "command": one.command()} for one in found.holders],
    }


def _server_object(server: Server | None) -> dict[str, Any] | None:
    if server is None:
        return None
    return {"pid": server.pid, "address": server.address, "ui": server.ui_url, "answers": server.answers}


def _named(holder: Holder) -> str:
    command = terminal.one_line(holder.command())
    cut = f"{command[:_COMMAND_CHARACTERS]}..." if len(command) > _COMMAND_CHARACTERS else command
    return f"{cut} (process {holder.pid})"


def _users(found: StackStatus) -> str:
    return ", ".join(_named(holder) for holder in found.holders) or "a command that has just ended"
