"""The floor: a bare Temporal workflow with the same shape of work and nothing in it.

Per step two empty local activities and one empty activity, and one empty activity per tool call. No database.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

SHORT = timedelta(seconds=10)


@activity.defn
async def nothing() -> None:
    """Do nothing."""


@workflow.defn
class Floor:
    """Two steps with one tool call between them."""

    @workflow.run
    async def run(self) -> None:
        """Run the steps."""
        for step in (1, 2):
            await workflow.execute_local_activity(nothing, start_to_close_timeout=SHORT)
            await workflow.execute_activity(nothing, start_to_close_timeout=SHORT)
            if step == 1:
                await workflow.execute_activity(nothing, start_to_close_timeout=SHORT)
            await workflow.execute_local_activity(nothing, start_to_close_timeout=SHORT)


def floor_worker(client: Client, task_queue: str) -> Worker:
    """Give a worker of the floor, in its stock set-up."""
    return Worker(client, task_queue=task_queue, workflows=[Floor], activities=[nothing])
