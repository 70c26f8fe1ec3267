"""What a worker process shares between its activities: one of each, opened and closed in order.

And what there is to know about a service before anybody relies on it: asked for in short, never changed.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import asyncpg
import httpx2
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError
from temporalio.api.enums.v1 import IndexedValueType, TaskQueueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    DescribeTaskQueueRequest,
    GetClusterInfoRequest,
)
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError, RPCStatusCode

from fencepost.clock import Clock
from fencepost.config import Settings, temporal_connect_options
from fencepost.domain import contracts
from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.domain.models import AgentConfig
from fencepost.domain.permissions import Rule
from fencepost.providers.catalog import Catalog
from fencepost.providers.http import make_client
from fencepost.store import migrate
from fencepost.store.engine import Database, unavailable
from fencepost.store.live import Announcer, listen_url
from fencepost.store.ownership import Lease
from fencepost.store.tables import metadata
from fencepost.tools.builtin import builtin_registry
from fencepost.tools.outputs import OutputStore, keep_swept
from fencepost.tools.processes import Reaper, ShellRunner
from fencepost.tools.registry import Registry

# The reaper must have killed a silent worker's tools before another worker may take its session over.
_REAPER_SHARE = 0.8
_HEARD_SECONDS = 3.0
_POLL_SECONDS = 70  # a poll lasts a minute at most, so a worker that was seen before that is gone


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


async def temporal_when_asked(environ: Mapping[str, str]) -> Client:
    """Give a client that connects when it is first used."""
    options = temporal_connect_options(environ)
    options["target_host"] = options.get("target_host", "localhost:7233")
    return await Client.connect(**options, data_converter=pydantic_data_converter, lazy=True)


async def known_search_attributes(client: Client) -> tuple[str, ...]:
    """Give those of fencepost's search attributes that the server has: one that it has not, or has with another type,
    fails workflow tasks."""
    # None: not allowed, or not offered, by this server; everything works without.
    types = await search_attribute_types(client) or {}
    return tuple(name for name, kind in contracts.SEARCH_ATTRIBUTES if types.get(name) == kind)


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


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """A database as it is found. `missing` are tables, or columns of tables that are there, of this program's schema;
    `broken` are indexes whose making was cut off."""

    version: str
    major: int
    read_only: bool
    revisions: tuple[str, ...]
    tables: int
    missing: tuple[str, ...]
    broken: tuple[str, ...]


async def database_facts(database: Database) -> DatabaseFacts:
    """Look at a database. Raises UnavailableError, and ConfigurationError when it is there and refuses to be read."""
    try:
        async with database.read() as conn:
            version, number, read_only = (
                await conn.execute(
                    text(
                        "SELECT current_setting('server_version'), current_setting('server_version_num')::int, "
                        "pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'"
                    )
                )
            ).one()
            found = await conn.run_sync(_schema)
    except DBAPIError as error:
        reason = str(error.orig).splitlines()[0].rpartition(">: ")[2]
        raise ConfigurationError(
            f"the database cannot be read ({reason}): check the rights of the user that FENCEPOST_DATABASE_URL names, "
            "and that there is no pooler in between that hands connections on after each transaction"
        ) from error
    return DatabaseFacts(version.split()[0], number // 10_000, read_only, *found)


def _schema(sync: Connection) -> tuple[tuple[str, ...], int, tuple[str, ...], tuple[str, ...]]:
    """Give the revisions, how many of our tables there are, and what of them is missing or broken."""
    present = set(inspect(sync).get_table_names())
    # Read as it is: alembic refuses a table with several revisions in it, which is one thing to be found here.
    known = migrate.VERSION_TABLE in present
    rows = sync.execute(text(f"SELECT version_num FROM {migrate.VERSION_TABLE} ORDER BY 1")) if known else ()  # noqa: S608 - a constant
    revisions = tuple(str(row[0]) for row in rows)
    missing = []
    for name, table in sorted(metadata.tables.items()):
        if name not in present:
            missing.append(name)
            continue
        columns = {column["name"] for column in inspect(sync).get_columns(name)}
        missing += [f"{name}.{column.name}" for column in table.columns if column.name not in columns]
    broken = sync.execute(
        text(
            "SELECT indexrelid::regclass::text FROM pg_index "
            "WHERE NOT indisvalid AND indrelid::regclass::text = ANY(:t)"
        ),
        {"t": list(metadata.tables)},
    )
    return revisions, len(present & set(metadata.tables)), tuple(missing), tuple(row[0] for row in broken)


async def hears_notifications(database: Database) -> bool:
    """Say whether a connection that listens hears what another one says: not through a pooler that gives connections
    back after each transaction. Raises UnavailableError."""
    channel, heard = f"fencepost_check_{secrets.token_hex(8)}", asyncio.Event()
    try:
        listening = await asyncpg.connect(listen_url(database.url), timeout=5, command_timeout=5)
        try:
            await listening.add_listener(channel, lambda *_: heard.set())
            async with database.read() as conn:
                await conn.execute(text("SELECT pg_notify(:channel, '')"), {"channel": channel})
                await conn.commit()
            await asyncio.wait_for(heard.wait(), _HEARD_SECONDS)
        finally:
            listening.terminate()
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError, TimeoutError):
        return False
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise unavailable(database.url, error) from error
    return True


async def temporal_version(client: Client) -> str:
    """Give the server's version, empty when it does not tell."""
    try:
        return (await client.workflow_service.get_cluster_info(GetClusterInfoRequest())).server_version
    except RPCError:
        return ""


async def namespace_exists(client: Client) -> bool:
    """Say whether the server has the client's namespace. Raises UnavailableError when it does not tell."""
    try:
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return False
        raise UnavailableError(f"Temporal does not tell about namespace {client.namespace}: {error.message}") from error
    return True


async def search_attribute_types(client: Client) -> Mapping[str, str] | None:
    """Give name and type of the search attributes that the namespace has, None when the server does not tell."""
    try:
        answer = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError:
        return None
    return {
        name: "".join(part.title() for part in IndexedValueType.Name(kind).split("_")[3:])
        for name, kind in answer.custom_attributes.items()
    }


async def pollers(client: Client, queue: str, *, workflows: bool) -> tuple[str, ...]:
    """Give the identities of the workers that asked for work on a task queue within the last minute: for turns, or
    for activities. Raises UnavailableError."""
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
    )
    try:
        answer = await client.workflow_service.describe_task_queue(request)
    except RPCError as error:
        raise UnavailableError(f"Temporal does not tell who serves task queue {queue}: {error.message}") from error
    alive = (one.identity for one in answer.pollers if time.time() - one.last_access_time.seconds < _POLL_SECONDS)
    return tuple(sorted(set(alive)))


async def answers_http(url: str, seconds: float) -> None:
    """Ask a provider's address for anything at all, without a key. Raises UnavailableError when nothing answers."""
    async with make_client(1, 1) as http:
        try:
            await http.get(url, timeout=seconds)
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise UnavailableError(reason[:200]) from error
