"""Preparing a step: what the model will see that it has not seen before."""

from __future__ import annotations

import asyncio

from temporalio import activity

from activities.guard import guarded, own_run
from fencepost.domain import contracts
from fencepost.domain.contracts import PrepareInput, PrepareResult
from fencepost.services import Services
from fencepost.store import steps
from fencepost.store.live import Notice
from fencepost.telemetry import remember


class ContextActivities:
    """Local activities of a step's beginning."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.PREPARE_STEP)
    @guarded
    async def prepare_step(self, given: PrepareInput) -> PrepareResult:
        """Fail interrupted tools and promote input, under the fence."""
        token, lease = own_run(given.token), self._services.lease
        remember("step", token.execution_id, given.step, value=asyncio.get_running_loop().time())
        prepared = await self._services.database.transact(
            lambda conn: steps.prepare(conn, token, given.step, queued=given.queued, lease=lease)
        )
        if prepared.promoted or prepared.continued:
            self._services.announcer.send(token.session_id, Notice.look())
        return PrepareResult(
            assistant_message_id=prepared.assistant_message_id,
            promoted=prepared.promoted,
            continued=prepared.continued,
        )
