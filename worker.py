"""The worker's entry: settings, services, then one Temporal worker per task queue until it is told to stop."""

import argparse
import asyncio
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.worker import Worker

from activities import tool_activities, turn_activities
from fencepost.config import load_settings
from fencepost.domain.contracts import workspace_queue
from fencepost.process import run_and_exit
from fencepost.services import Services, open_services
from fencepost.serving import forward_native_log, serve
from fencepost.telemetry import configure_logging
from workflows.runtime import served_workflows


def build_workers(services: Services) -> list[Worker]:
    """Give the worker of the main queue and, when this process serves a workspace, the one of its queue."""
    settings, limits = services.settings, services.settings.worker
    options: dict[str, Any] = {
        "graceful_shutdown_timeout": timedelta(seconds=settings.limits.drain_grace_seconds),
        # By Temporal's defaults a cancellation is held back for many seconds, and a dead worker's session for ten.
        "max_heartbeat_throttle_interval": timedelta(milliseconds=500),
        "default_heartbeat_throttle_interval": timedelta(milliseconds=500),
        "max_concurrent_activities": limits.max_concurrent_activities,
    }
    queue, workspace = settings.task_queue, settings.workspace.id
    turns = served_workflows(services.temporal) | {
        "max_concurrent_local_activities": limits.max_concurrent_local_activities,
        "max_concurrent_workflow_tasks": limits.max_concurrent_workflow_tasks,
        "max_cached_workflows": limits.max_cached_workflows,
    }
    main = Worker(task_queue=queue, activities=turn_activities(services), **turns, **options)
    if workspace is None:
        return [main]
    options |= {"task_queue": workspace_queue(queue, workspace), "activities": tool_activities(services)}
    return [main, Worker(services.temporal, **options)]


async def run(health_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT, then hand running work over. Raises FencepostError when it cannot start."""
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    forward_native_log()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_services(settings) as services:
        await serve(services, build_workers(services), stop, health_file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="worker")
    parser.add_argument("--health-file", type=Path, help="a file that is fresh for as long as this worker can work")
    run_and_exit("worker", run(parser.parse_args().health_file))
