"""`fencepost dev`: the local stack and a worker in the foreground, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from fencepost.cli import terminal
from fencepost.cli.choice import SCRIPTED
from fencepost.cli.entry import OK, Signals
from fencepost.cli.scripted import scripted_provider
from fencepost.cli.stack import Place, open_place, watched, worker_environment
from fencepost.cli.terminal import Notices
from fencepost.cli.workers import SharedWorker, joined, shared_scripted
from fencepost.client import open_client
from fencepost.config import PREFIX, find_config_file, load_settings
from fencepost.domain.errors import UnavailableError

_LOOK_SECONDS = 0.2


async def dev(config: Path | None, ports: tuple[int | None, int | None], signals: Signals) -> int:
    """Run until a signal comes, which is how it ends well."""
    say = Notices()
    settings, environ = load_settings(config), dict(os.environ)
    ignored = [name for name in (f"{PREFIX}DATABASE_URL", "TEMPORAL_ADDRESS") if environ.get(name)]
    if ignored:
        say(f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored: this is the local stack")
    try:
        async with AsyncExitStack() as stack:
            place = await stack.enter_async_context(open_place(settings, environ, say, only_local=True, ports=ports))
            scripted = await _scripted(stack, place, say)
            worker = SharedWorker(
                settings.home,
                settings.task_queue,
                place.settings,
                worker_environment(place, find_config_file(config, environ)),
                others="refuse",
                scripted=scripted,
                say=say,
            )
            await stack.enter_async_context(joined(worker, say))
            client = await stack.enter_async_context(open_client(place.settings, place.environ))
            await stack.enter_async_context(watched(client, place, say))
            if place.joined:
                users = ", ".join(f"{one.command()[:60]} (process {one.pid})" for one in place.joined)
                say(f"joined the local stack that is used already by {users}; the last one that leaves stops it")
            _tell(place, worker, has_scripted=scripted is not None)
            await _show_log(worker.log)
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        say("stopped; the state stays for the next time")
    return OK


async def _scripted(stack: AsyncExitStack, place: Place, say: Notices) -> str | None:
    """See to the scripted provider for the worker: one that is shared already, or one of this command's own."""
    if SCRIPTED in place.settings.providers:
        return None
    shared = await asyncio.to_thread(shared_scripted, place.settings, place.environ)
    try:
        return shared or await stack.enter_async_context(scripted_provider(place.environ))
    except UnavailableError as error:
        say(error.message)
        return None


def _tell(place: Place, worker: SharedWorker, *, has_scripted: bool) -> None:
    settings, address = place.settings, place.environ["TEMPORAL_ADDRESS"]
    for line in (
        "fencepost runs on this machine; Ctrl-C stops it.",
        "",
        f"  Temporal UI  {place.ui_url}",
        f"  Temporal     {address}, task queue {worker.queue}",
        f"  PostgreSQL   {settings.database_url}",
        f"  state, logs  {settings.home}",
        "",
        "In another terminal:",
        "",
        '  fencepost run "Read README.md and sum it up"',
        *(['  fencepost run --model scripted/demo "Read README.md"      # without a key'] if has_scripted else []),
        "",
        "For other programs, and workers of your own:",
        "",
        f"  export TEMPORAL_ADDRESS={address}",
        f"  export {PREFIX}DATABASE_URL='{settings.database_url}'",
        "",
    ):
        terminal.out(line)


async def _show_log(file: Path) -> None:
    """Show the worker's log for ever, as it grows; from the beginning again after a restart."""
    position, number = 0, 0
    while True:
        try:
            with file.open("rb") as log:
                node = os.fstat(log.fileno()).st_ino
                position, number = (position, number) if node == number else (0, node)
                log.seek(position)
                fresh = log.read()
            position += len(fresh)
            sys.stderr.write(terminal.plain(fresh.decode(errors="replace")))
            sys.stderr.flush()
        except FileNotFoundError:
            pass  # between the end of one worker and the start of the next
        await asyncio.sleep(_LOOK_SECONDS)
