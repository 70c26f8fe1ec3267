"""`fencepost doctor`: all checks at once, each with a time-out; nothing is started and nothing is changed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from fencepost.cli import findings, machine_checks, model_checks, service_checks, terminal
from fencepost.cli.entry import Signals
from fencepost.cli.findings import Check, ok, wrong
from fencepost.cli.stack import with_temporal
from fencepost.config import ExternalServices, Settings, external_services, find_config_file, load_settings
from fencepost.domain.errors import ConfigurationError
from fencepost.local.upkeep import StackStatus
from fencepost.process import leave

_SECONDS: Final = 15.0
"""The most that any check may take; those that reach for a service give up sooner by themselves."""

_NOT_RUNNING: Final = "not running: `fencepost run` and `fencepost dev` start it"

Checking = tuple[str, Awaitable[list[Check]]]


async def doctor(config: Path | None, as_json: bool, signals: Signals) -> int:
    """Look at everything and show what was found. Leaves the process itself: a thread that hangs in a name look-up or
    on a disk that is gone would keep it."""
    del signals
    checks = await examine(config, dict(os.environ))
    if as_json:
        terminal.out(findings.as_json(checks))
    else:
        findings.show(checks)
    leave(findings.exit_code(checks))


async def examine(config: Path | None, environ: Mapping[str, str]) -> list[Check]:
    """Give what is found, in a fixed order. What depends on something that is wrong is left out."""
    found = machine_checks.program()
    try:
        settings = load_settings(config, environ)
    except ConfigurationError as error:
        mend = "correct that, and run `fencepost doctor` again for the rest"
        return found + wrong("configuration", error.message, mend)
    found += machine_checks.configuration(find_config_file(config, environ))
    try:
        given = external_services(settings, environ)
        found += machine_checks.mode(given)
    except ConfigurationError as error:
        detail, _, mend = error.message.partition(": ")
        found += wrong("mode", detail, mend)
        given = None
    answers = await asyncio.gather(*(_bounded(*each) for each in _checks(settings, environ, given)))
    return [*found, *(check for answer in answers for check in answer)]


def _checks(settings: Settings, environ: Mapping[str, str], given: ExternalServices | None) -> list[Checking]:
    is_local = given is not None and not (given.temporal and given.postgresql)
    looked = asyncio.ensure_future(asyncio.to_thread(machine_checks.stack_status, settings))

    async def state() -> list[Check]:
        status = await asyncio.shield(looked)
        return await asyncio.to_thread(machine_checks.local_state, status)

    checks: list[Checking] = []
    if given is not None:
        checks.append(("postgresql", _postgresql(settings, given, looked)))
        checks.append(("temporal", _temporal(settings, environ, given, looked)))
    checks.append(("model", _in_thread(lambda: model_checks.models(settings, environ, here=is_local))))
    checks.append(("provider", model_checks.provider(settings, here=is_local)))
    checks.append(("workspace", _in_thread(lambda: machine_checks.workspace(settings))))
    checks.append(("tool output", _in_thread(lambda: machine_checks.tool_output(settings))))
    checks.append(("shell", _in_thread(machine_checks.shell)))
    if is_local:
        checks.append(("home", _in_thread(lambda: machine_checks.home(settings))))
    checks.append(("local state", state()))
    return checks


async def _postgresql(settings: Settings, given: ExternalServices, looked: asyncio.Future[StackStatus]) -> list[Check]:
    if given.postgresql:
        assert settings.database_url is not None
        return await service_checks.postgresql(settings.database_url)
    server = (await asyncio.shield(looked)).postgresql
    return ok("postgresql", _NOT_RUNNING) if server is None else await service_checks.postgresql(server.address)


async def _temporal(
    settings: Settings, environ: Mapping[str, str], given: ExternalServices, looked: asyncio.Future[StackStatus]
) -> list[Check]:
    served_here = not (given.temporal and given.postgresql)
    if given.temporal:
        return await service_checks.temporal(settings, environ, served_here=served_here)
    server = (await asyncio.shield(looked)).temporal
    if server is None:
        return ok("temporal", _NOT_RUNNING)
    return await service_checks.temporal(settings, with_temporal(environ, server.address), served_here=served_here)


def _in_thread(check: Callable[[], list[Check]]) -> Awaitable[list[Check]]:
    return asyncio.to_thread(check)


async def _bounded(name: str, check: Awaitable[list[Check]]) -> list[Check]:
    try:
        async with asyncio.timeout(_SECONDS):
            return await check
    except TimeoutError:
        return wrong(name, f"no answer in {_SECONDS:.0f} s", "look at the disk or the network that it is on")
    except ConfigurationError as error:
        return wrong(name, error.message, "correct that")
    except Exception as error:
        return wrong(name, f"unexpected {type(error).__name__}: {error}", "report this as an error of fencepost")
