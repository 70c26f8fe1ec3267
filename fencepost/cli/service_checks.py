"""Checks of PostgreSQL and Temporal: there, of a version that is known to work, and set up as fencepost needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from temporalio.client import Client

from fencepost import services
from fencepost.cli.findings import Check, ok, warning, wrong
from fencepost.config import Settings, temporal_connect_options
from fencepost.domain.contracts import SEARCH_ATTRIBUTES, workspace_queue
from fencepost.domain.errors import ConfigurationError, SchemaVersionError, UnavailableError
from fencepost.services import DatabaseFacts
from fencepost.store import migrate
from fencepost.store.engine import Database

TESTED_POSTGRESQL: Final = 18
_OLDEST_POSTGRESQL: Final = 14
"""Older ones get no corrections any more from those who make PostgreSQL."""

_SECONDS: Final = 6.0
_LISTED: Final = 4


async def postgresql(address: str) -> list[Check]:
    """Check the database at an address."""
    try:
        database = Database(address, pool_size=2)
    except ConfigurationError as error:
        return wrong("postgresql", error.message, "correct FENCEPOST_DATABASE_URL")
    where = _database_name(database)
    try:
        async with asyncio.timeout(_SECONDS):
            facts = await services.database_facts(database)
        found = [*version_check(facts.version, facts.major, where)]
        if facts.read_only:
            found += wrong(
                "writing",
                f"{where} takes no writes: it is a replica, or read-only by default",
                "name the primary server in FENCEPOST_DATABASE_URL, or set default_transaction_read_only to off",
            )
        return [*found, *await _schema(database, facts), *await _notifications(database)]
    except ConfigurationError as error:
        detail, _, mend = error.message.rpartition(": ")
        return wrong("postgresql", detail, mend)
    except (UnavailableError, TimeoutError) as error:
        detail = error.message if isinstance(error, UnavailableError) else f"{where} did not answer in {_SECONDS:.0f} s"
        return _unreachable("postgresql", detail, "check that it runs and that FENCEPOST_DATABASE_URL is right")
    finally:
        await database.close()


def version_check(version: str, major: int, where: str) -> list[Check]:
    """Judge PostgreSQL's version."""
    detail = f"PostgreSQL {version} at {where}"
    mend = f"upgrade it to PostgreSQL {TESTED_POSTGRESQL}, the version that fencepost is tested with"
    if major < _OLDEST_POSTGRESQL:
        return wrong("postgresql", f"{detail} is too old", mend)
    if major < TESTED_POSTGRESQL:
        return warning("postgresql", f"{detail} is older than what fencepost is tested with", mend)
    return ok("postgresql", detail)


async def _schema(database: Database, facts: DatabaseFacts) -> list[Check]:
    wanted = migrate.wanted_version()
    if len(facts.revisions) > 1:
        return wrong(
            "schema",
            f"{migrate.VERSION_TABLE} names several migrations at once: {', '.join(facts.revisions)}",
            f"delete all rows but the true one, or restore a backup; fencepost needs {wanted}",
        )
    if not facts.revisions and facts.tables:
        return wrong(
            "schema",
            f"{facts.tables} of fencepost's tables are there, and no migration is recorded",
            "restore the database whole, or use an empty one; then run `fencepost db upgrade`",
        )
    try:
        await migrate.check(database)
    except SchemaVersionError as error:
        detail, _, mend = error.message.rpartition(": ")
        return wrong("schema", detail, mend)
    if facts.missing:
        return wrong(
            "schema",
            f"at migration {wanted}, but half of it: {_some(facts.missing)} missing",
            "restore the database whole from a backup, or use an empty one and run `fencepost db upgrade`",
        )
    if facts.broken:
        return wrong(
            "schema",
            f"at migration {wanted}, but an index was not made to its end: {_some(facts.broken)}",
            f"run REINDEX INDEX {facts.broken[0]} in the database",
        )
    return ok("schema", f"at migration {wanted}, as it should be")


async def _notifications(database: Database) -> list[Check]:
    try:
        if await services.hears_notifications(database):
            return ok("notifications", "LISTEN and NOTIFY work through this connection")
    except UnavailableError as error:
        return _unreachable("notifications", error.message, "allow more connections in PostgreSQL")
    return wrong(
        "notifications",
        "NOTIFY does not arrive through this connection, so nothing is shown live: a pooler that hands connections on "
        "after each transaction does that",
        "let FENCEPOST_DATABASE_URL name PostgreSQL itself, or the pooler's port for session pooling",
    )


async def temporal(settings: Settings, environ: Mapping[str, str], *, served_here: bool) -> list[Check]:
    """Check the Temporal server that an environment names. `served_here` says that commands start workers when they
    need one, so that none has to be there now."""
    options = temporal_connect_options(environ)
    where, namespace = options.get("target_host", "localhost:7233"), options.get("namespace", "default")
    try:
        async with asyncio.timeout(_SECONDS):
            client = await services.connect_temporal(environ)
    except (UnavailableError, TimeoutError) as error:
        detail = error.message if isinstance(error, UnavailableError) else f"{where} did not answer in {_SECONDS:.0f} s"
        return _unreachable("temporal", detail, "check that it runs and that TEMPORAL_ADDRESS is right")
    try:
        async with asyncio.timeout(_SECONDS):
            version = await services.temporal_version(client)
            found = ok("temporal", f"Temporal {version or 'of a version that it does not tell'} at {where}")
            if not await services.namespace_exists(client):
                return found + wrong(
                    "namespace",
                    f"there is no namespace {namespace}",
                    f"set TEMPORAL_NAMESPACE, or run `temporal operator namespace create --namespace {namespace}`",
                )
            found += ok("namespace", namespace)
            found += await _search_attributes(client)
            return found + await _workers(client, settings, served_here=served_here)
    except UnavailableError as error:
        return _unreachable("temporal", error.message, "check the permissions of the key or certificate that is used")
    except TimeoutError:
        return _unreachable("temporal", f"{where} takes connections and does not answer", "look at the server's log")


async def _search_attributes(client: Client) -> list[Check]:
    name = "search attributes"
    types = await services.search_attribute_types(client)
    if types is None:
        return warning(name, "the server does not tell which it has", "nothing has to be done: all works without them")
    create = "temporal operator search-attribute create"
    other = [f"{each} is {types[each]}" for each, kind in SEARCH_ATTRIBUTES if types.get(each, kind) != kind]
    if other:
        wanted = ", ".join(f"{each} {kind}" for each, kind in SEARCH_ATTRIBUTES)
        return warning(
            name,
            f"of another type than fencepost's, and not set: {', '.join(other)}",
            f"remove them with `temporal operator search-attribute remove` and create them as {wanted}",
        )
    missing = [(each, kind) for each, kind in SEARCH_ATTRIBUTES if each not in types]
    if missing:
        arguments = " ".join(f"--name {each} --type {kind}" for each, kind in missing)
        detail = f"not registered: {', '.join(each for each, _ in missing)}; sessions cannot be searched by them"
        return warning(
            name, detail, f"run `{create} --namespace {client.namespace} {arguments}` and start the workers again"
        )
    return ok(name, f"{', '.join(each for each, _ in SEARCH_ATTRIBUTES)}")


async def _workers(client: Client, settings: Settings, *, served_here: bool) -> list[Check]:
    queue, workspace = settings.task_queue, settings.workspace.id
    found = await _pollers("workers", client, queue, served_here, both=True)
    if workspace is not None:
        found += await _pollers("workspace workers", client, workspace_queue(queue, workspace), served_here, both=False)
    return found


async def _pollers(name: str, client: Client, queue: str, served_here: bool, *, both: bool) -> list[Check]:
    activities = await services.pollers(client, queue, workflows=False)
    workflows = await services.pollers(client, queue, workflows=True) if both else activities
    if workflows and activities:
        names = sorted({*workflows, *activities})
        return ok(name, f"{len(names)} on task queue {queue}: {_some(names)}")
    if served_here:
        return ok(name, f"none on task queue {queue} now: `fencepost run` and `fencepost dev` start one")
    kind = "" if workflows == activities else " for activities" if workflows else " for workflows"
    return wrong(
        name, f"no worker serves task queue {queue}{kind}", "start one with `python -m worker`", unreachable=True
    )


def _unreachable(name: str, detail: str, mend: str) -> list[Check]:
    """Keep what is wrong of an error's line, and say once what to do."""
    words, colon, advice = detail.rpartition(": ")
    known = colon and advice.startswith("check that")
    return wrong(name, words if known else detail, advice if known else mend, unreachable=True)


def _database_name(database: Database) -> str:
    url = database.url
    return f"{url.host or url.query.get('host') or 'local socket'}:{url.port or 5432}/{url.database or ''}"


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
