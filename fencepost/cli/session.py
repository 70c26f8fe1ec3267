"""What commands that run turns share: a session, on the local stack or configured services, and a worker for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fencepost.cli import choice as choices
from fencepost.cli.choice import SCRIPTED, Choice
from fencepost.cli.scripted import scripted_provider
from fencepost.cli.stack import Place, open_place, watched, worker_environment
from fencepost.cli.workers import SharedWorker, joined, shared_scripted
from fencepost.client import Client, open_client
from fencepost.config import find_config_file
from fencepost.domain.errors import InvalidInputError, UnavailableError
from fencepost.local.state import StateFile
from fencepost.store.sessions import Session

_WORKER_SECONDS = 5.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command wants of a session: an existing one by its id, or a new one.

    `verify` looks at the existing one before anything is started to serve it, and raises what it will.
    """

    choice: Choice
    config: Path | None
    session_id: str | None = None
    only_local: bool = False
    verify: Callable[[Session], None] | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A place with a client whose task queue is served. `existing` is the session that was asked for.

    `worker` is this command's share in a local worker, None when workers are somebody else's.
    """

    place: Place
    client: Client
    choice: Choice
    existing: Session | None
    worker: SharedWorker | None = None

    def is_last_user(self) -> bool:
        """Say whether the worker would end if this command did now."""
        if self.worker is None:
            return False
        holders = StateFile(self.worker.log.parent).read().holders
        return all(holder.pid == os.getpid() for holder in holders)

    def why_last_user(self) -> str:
        """Say why nobody else keeps the worker."""
        if self.worker is not None and self.worker.apart is not None:
            return f"the one of the other fencepost command {self.worker.apart}"
        return "no other fencepost command uses it, as `fencepost dev` in another terminal would"


@asynccontextmanager
async def ready(wanted: Wanted, say: Callable[[str], None], progress: Callable[[str], None]) -> AsyncIterator[Ready]:
    """Start what is missing for the time of the block; `progress` is told of what takes time.

    A new session's choice is already checked. Raises what `open_place` and `open_client` raise, NotFoundError for an
    unknown session, and UnavailableError when no worker serves configured services.
    """
    choice, scripted = wanted.choice, None
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(
            open_place(choice.settings, choice.environ, progress, only_local=wanted.only_local)
        )
        if choice.is_overridden and not place.is_local:
            raise InvalidInputError(
                "--base-url has no effect on workers that run elsewhere: configure the provider for them"
            )
        if place.is_local and wanted.session_id is None:
            place, choice, scripted = await _with_provider(stack, place, choice)
        client = await stack.enter_async_context(open_client(place.settings, place.environ))
        await stack.enter_async_context(watched(client, place, say))
        existing = None
        if wanted.session_id is not None:
            existing = await client.get(wanted.session_id)
            if wanted.verify is not None:
                wanted.verify(existing)
            if place.is_local:
                choice = replace(choice, model=existing.model, agent=existing.agent)
                choices.check(choice, is_new=False)
                place, choice, scripted = await _with_provider(stack, place, choice)
        worker = None
        if place.is_local:
            worker = await _serve(stack, place, choice, wanted, client, say, progress, scripted)
            client.settings = place.settings.model_copy(update={"task_queue": worker.queue})
        else:
            await _wait_for_worker(client, say)
        yield Ready(place, client, choice, existing, worker)


async def _with_provider(stack: AsyncExitStack, place: Place, choice: Choice) -> tuple[Place, Choice, str | None]:
    """Take the place's addresses over into the choice, and start the scripted provider if it is asked for.

    It is not started where a worker that can be shared has one, as that of `fencepost dev`: the address is given then.
    """
    choice, shared = replace(choice, settings=place.settings, environ=place.environ), None
    if choice.needs_scripted():
        shared = await asyncio.to_thread(shared_scripted, place.settings, place.environ)
    if choice.needs_scripted() and shared is None:
        url = await stack.enter_async_context(scripted_provider(choice.environ))
        choice = replace(choices.with_provider(choice, SCRIPTED, url), is_ephemeral=True)
    return replace(place, settings=choice.settings, environ=choice.environ), choice, shared


async def _serve(
    stack: AsyncExitStack,
    place: Place,
    choice: Choice,
    wanted: Wanted,
    client: Client,
    say: Callable[[str], None],
    progress: Callable[[str], None],
    scripted: str | None,
) -> SharedWorker:
    """See to a worker on the task queue of the session's open run, or another one if there is none."""
    config = find_config_file(wanted.config, choice.environ)
    open_queue = await client.open_queue(wanted.session_id) if wanted.session_id is not None else None
    worker = SharedWorker(
        place.settings.home,
        open_queue or place.settings.task_queue,
        place.settings,
        worker_environment(place, config),
        others="share" if open_queue is not None else "avoid",
        private=choice.is_ephemeral,
        scripted=scripted,
        say=progress,
    )
    await stack.enter_async_context(joined(worker, say))
    return worker


async def _wait_for_worker(client: Client, say: Callable[[str], None]) -> None:
    queue = client.settings.task_queue
    deadline = asyncio.get_running_loop().time() + _WORKER_SECONDS
    told = False
    while not await client.is_served():
        if asyncio.get_running_loop().time() > deadline:
            raise UnavailableError(f"no worker serves task queue {queue}: start one with `python -m worker`")
        if not told:
            say(f"waiting for a worker on task queue {queue}")
            told = True
        await asyncio.sleep(_LOOK_SECONDS)
