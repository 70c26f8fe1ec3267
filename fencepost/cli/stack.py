"""Where a command works: the services that are configured, or the local ones, started when they are missing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fencepost.client import Client, Service
from fencepost.config import PREFIX, ExternalServices, Settings, external_services
from fencepost.domain.errors import FencepostError, UnavailableError
from fencepost.local import LocalStack
from fencepost.local.state import Holder
from fencepost.store import migrate

SERVICES: Final[tuple[Service, ...]] = ("PostgreSQL", "Temporal")
_CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Settings and environment with the services' addresses in them.

    `is_local` says that workers are ours to start. `revive` blocks, and starts local servers again that have ended.
    `joined` are the commands that used the local servers before this one came.
    """

    settings: Settings
    environ: Mapping[str, str]
    is_local: bool
    ui_url: str | None = None
    revive: Callable[[], None] | None = None
    joined: tuple[Holder, ...] = ()


@asynccontextmanager
async def open_place(
    settings: Settings,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    only_local: bool = False,
    ports: tuple[int | None, int | None] = (None, None),
) -> AsyncIterator[Place]:
    """Give the place for the time of the block. `only_local` takes no notice of configured services.

    `ports` are those of local Temporal and its UI; None is any. Raises ConfigurationError or UnavailableError.
    """
    given = ExternalServices(temporal=False, postgresql=False) if only_local else external_services(settings, environ)
    if given.temporal and given.postgresql:
        yield Place(settings, environ, is_local=False)
        return

    def stack_of(temporal_port: int | None, ui_port: int | None) -> LocalStack:
        return LocalStack(
            settings.home,
            postgresql=not given.postgresql,
            temporal=not given.temporal,
            temporal_port=temporal_port,
            ui_port=ui_port,
            progress=say,
        )

    def revive() -> None:
        # A second user of the stack starts what is missing when it comes, and ends nothing when it goes.
        with stack_of(None, None):
            pass

    local = stack_of(*ports)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(local)
        url = settings.database_url if given.postgresql else local.database_url
        assert url is not None
        environ = {**environ, f"{PREFIX}DATABASE_URL": url}
        if not given.temporal:
            environ = with_temporal(environ, local.temporal_address)
        settings = settings.model_copy(update={"database_url": url})
        await migrate.upgrade(url, say=say)
        yield Place(settings, environ, True, None if given.temporal else local.ui_url, revive, local.others)


def with_temporal(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Give the environment for clients of the local server, without what it says about another one."""
    others = {name: value for name, value in environ.items() if not name.startswith("TEMPORAL_")}
    # Nor the configuration file of Temporal's clients: it may name a namespace or a certificate.
    return {**others, "TEMPORAL_ADDRESS": address, "TEMPORAL_CONFIG_FILE": os.devnull}


@asynccontextmanager
async def watched(client: Client, place: Place, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Look after both services for the time of the block: say when one goes and when it is back. One that is local is
    started again."""
    watching = asyncio.create_task(_watch(client, place, say))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def _watch(client: Client, place: Place, say: Callable[[str], None]) -> None:
    away: set[Service] = set()
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        for service in SERVICES:
            try:
                await client.check(service)
            except UnavailableError as error:
                if service not in away:
                    say(f"{error.message}; waiting for it")
                away.add(service)
                await _revive(place, say)
            else:
                if service in away:
                    say(f"{service} is back")
                away.discard(service)


async def _revive(place: Place, say: Callable[[str], None]) -> None:
    if place.revive is None:
        return
    reviving = asyncio.ensure_future(asyncio.to_thread(place.revive))
    try:
        await asyncio.shield(reviving)
    except FencepostError as error:
        say(error.message)
    except asyncio.CancelledError:
        await asyncio.wait({reviving})  # the thread goes on, and holds the lock that the clean-up needs
        raise


def worker_environment(place: Place, config: Path | None) -> dict[str, str]:
    """Give the environment for a worker in this place: `config` is its configuration file."""
    environ = dict(place.environ)
    if config is not None:
        environ[f"{PREFIX}CONFIG"] = str(config.absolute())
    if place.settings.log_format == "auto":
        environ[f"{PREFIX}LOG_FORMAT"] = "console"
    return environ
