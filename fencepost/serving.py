"""A worker process while it serves: that it is ready, how it drains, and the sign of life for a health check."""

from __future__ import annotations

import asyncio
import gc
import logging
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import temporalio.service
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError
from temporalio.worker import Worker

from fencepost import __version__
from fencepost.domain.errors import UnavailableError
from fencepost.recoveries import schedule
from fencepost.services import Services
from fencepost.telemetry import get_logger, since

BEAT_SECONDS = 5.0
"""How often the health file is made fresh. A check should allow several times as much."""

REPEAT_SECONDS = 30.0
"""How long a warning of Temporal's native part is not said again: while the server is away, each poller says it."""

_log = get_logger("fencepost.worker")


class Seldom(logging.Filter):
    """Lets one of many lines pass that are alike, each REPEAT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the first of the lines pass that are alike but for numbers and details."""
        kind = record.getMessage()[:40]
        if record.created - self._said.get(kind, float("-inf")) < REPEAT_SECONDS:
            return False
        self._said[kind] = record.created
        return True


def forward_native_log() -> None:
    """Bring the warnings of Temporal's native part into the log, instead of onto standard output.

    To be called before the process's first connection to Temporal.
    """
    logger = logging.getLogger("temporalio.native")
    logger.addFilter(Seldom())
    logged = LoggingConfig(
        TelemetryFilter(core_level="WARN", other_level="ERROR"),
        forwarding=LogForwardingConfig(logger, append_target_to_name=False, overwrite_log_record_time=False),
    )
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=logged)))


def spare_collector() -> None:
    """Tell the garbage collector that this process serves: what is loaded by now stays, and is not looked through again
    and again; and a step makes thousands of objects at once, which is no reason to look."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def serve(services: Services, workers: Sequence[Worker], stop: asyncio.Event, health_file: Path | None) -> None:
    """Run the workers until `stop` is set or one of them fails, then let them hand over what they do.

    Raises what a worker failed with.
    """
    spare_collector()
    now = asyncio.get_running_loop().time
    running = [asyncio.create_task(worker.run()) for worker in workers]
    beating = asyncio.create_task(beat(services, health_file)) if health_file is not None else None
    _log.info(
        "worker ready",
        queues=[worker.task_queue for worker in workers],
        fencepost=__version__,
        temporalio=temporalio.service.__version__,
        python=platform.python_version(),
    )
    settings = services.settings
    recovering = asyncio.create_task(_recover(services))
    told = asyncio.create_task(stop.wait())
    await asyncio.wait([told, *running], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    recovering.cancel()
    if beating is not None and health_file is not None:
        beating.cancel()
        _remove(health_file)
    _log.info("drain started", grace_seconds=settings.limits.drain_grace_seconds)
    began = now()
    await asyncio.gather(*(worker.shutdown() for worker in workers), *running)
    _log.info("drain finished", seconds=since(began, now()))


async def _recover(services: Services) -> None:
    settings = services.settings
    if settings.worker.recover:
        await schedule(services.temporal, settings.deployment, settings.task_queue)


def _freshen(file: Path) -> None:
    file.touch()


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)


async def beat(services: Services, file: Path, every: float = BEAT_SECONDS) -> None:
    """Make the file fresh for as long as this process's event loop turns and both services answer it."""
    well = True
    while True:
        try:
            async with asyncio.timeout(BEAT_SECONDS):  # a service that does not answer is away
                await services.database.ping()
                await services.temporal.workflow_service.get_system_info(GetSystemInfoRequest())
            _freshen(file)
            well = True
        except (UnavailableError, RPCError, TimeoutError, OSError) as error:
            _remove(file)
            if well:
                _log.warning("not healthy", kind=type(error).__name__)
            well = False
        await asyncio.sleep(every)
