"""What a worker process shares between its activities: one of each, opened and closed in order."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx2
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from fencepost.clock import Clock
from fencepost.config import Settings, temporal_connect_options
from fencepost.domain import contracts
from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.domain.models import AgentConfig
from fencepost.domain.permissions import Rule
from fencepost.providers.catalog import Catalog
from fencepost.providers.http import make_client
from fencepost.store import migrate
from fencepost.store.engine import Database
from fencepost.store.live import Announcer
from fencepost.store.ownership import Lease
from fencepost.tools.builtin import builtin_registry
from fencepost.tools.outputs import OutputStore, keep_swept
from fencepost.tools.processes import Reaper, ShellRunner
from fencepost.tools.registry import Registry

# The reaper must have killed a silent worker's tools before another worker may take its session over.
_REAPER_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Services:
    """Everything an activity uses. `environ` is where providers' keys are read from, at the moment of use."""

    settings: Settings
    database: Database
    temporal: Client
    http: httpx2.AsyncClient
    catalog: Catalog
    registry: Registry
    runner: ShellRunner
    announcer: Announcer
    environ: Mapping[str, str]
    search_attributes: tuple[str, ...] = ()

    @property
    def lease(self) -> Lease:
        """Give the lease's times in milliseconds."""
        limits = self.settings.limits
        return Lease(int(limits.lease_seconds * 1000), int(limits.renew_seconds * 1000))

    @property
    def outputs(self) -> OutputStore:
        """Give the keeper of tool output that is too long for a model."""
        given = self.settings.tool_output
        return OutputStore(self.settings.tool_output_directory, given.max_lines, given.max_bytes)

    def rules(self, agent: AgentConfig | None) -> tuple[Rule, ...]:
        """Give the permission rules of an agent: the configured ones, then its own."""
        return (*self.settings.permissions, *(agent.permissions if agent is not None else ()))


async def connect_temporal(environ: Mapping[str, str] | None = None) -> Client:
    """Connect as Temporal's own configuration says. Raises UnavailableError in one line."""
    options = temporal_connect_options(environ)
    where = options.get("target_host", "localhost:7233")
    try:
        return await Client.connect(**options, data_converter=pydantic_data_converter)
    except (RuntimeError, RPCError, OSError) as error:
        # Temporal's native part nests its errors; the innermost kind says it all.
        kind = re.search(r"kind: (\w+)", str(error))
        reason = kind[1] if kind else (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UnavailableError(
            f"Temporal at {where} cannot be reached ({reason}): check that it runs and that TEMPORAL_ADDRESS is right"
        ) from error


async def known_search_attributes(client: Client) -> tuple[str, ...]:
    """Give those of fencepost's search attributes that the server has: one that it has not fails workflow tasks."""
    try:
        answer = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError:
        return ()  # not allowed, or not offered, by this server: everything works without
    return tuple(name for name, _ in contracts.SEARCH_ATTRIBUTES if name in answer.custom_attributes)


@asynccontextmanager
async def _swept(settings: Settings) -> AsyncIterator[None]:
    """Keep the directory of managed tool output free of expired files for as long as the body runs."""
    task = asyncio.create_task(keep_swept(settings.tool_output_directory, settings.tool_output.days, Clock()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def open_services(
    settings: Settings, *, environ: Mapping[str, str] | None = None, registry: Registry | None = None
) -> AsyncIterator[Services]:
    """Open everything a worker needs. Raises ConfigurationError, UnavailableError or SchemaVersionError."""
    environ = os.environ if environ is None else environ
    if settings.database_url is None:
        raise ConfigurationError("no database: set FENCEPOST_DATABASE_URL, or use `fencepost dev` for a local one")
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url, pool_size=settings.worker.database_pool_size)
        stack.push_async_callback(database.close)
        await migrate.check(database)
        temporal = await connect_temporal(environ)
        http = await stack.enter_async_context(make_client())
        secrets = frozenset(p.api_key_env for p in settings.providers.values() if p.api_key_env)
        reaper = Reaper(silence=settings.limits.heartbeat_timeout_seconds * _REAPER_SHARE)
        runner = ShellRunner(reaper, secret_env=secrets, environment=environ)
        await runner.start()
        stack.push_async_callback(runner.close)
        announcer = Announcer(database)
        await announcer.start()
        stack.push_async_callback(announcer.close)
        await stack.enter_async_context(_swept(settings))
        yield Services(
            settings=settings,
            database=database,
            temporal=temporal,
            http=http,
            catalog=Catalog(settings.providers),
            registry=registry or builtin_registry(),
            runner=runner,
            announcer=announcer,
            environ=environ,
            search_attributes=await known_search_attributes(temporal),
        )
