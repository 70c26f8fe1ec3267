"""Settling a step: exactly one terminal event, whatever happened."""

from __future__ import annotations

import asyncio

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.guard import guarded, own_run
from activities.model import Begun, ModelActivities, chosen
from activities.ownership import tell_release
from fencepost.domain import contracts
from fencepost.domain.contracts import ReleaseState, ResolveInput, SettleInput, SettleResult
from fencepost.domain.errors import OwnershipLostError, UnavailableError
from fencepost.domain.events import StepEnded, StepFailed, StepStarted
from fencepost.domain.messages import MessageError
from fencepost.domain.projection import UNSETTLED
from fencepost.services import Services
from fencepost.store import claims, ownership, sessions, steps
from fencepost.store.live import Notice
from fencepost.store.steps import Interruption, Settlement
from fencepost.telemetry import get_logger, recall, remember, since

_log = get_logger("fencepost.step")


def _tell(given: SettleInput, *, continued: bool) -> str:
    """Log how a step ended, and give it: never the provider's words, which may quote what it was sent."""
    execution_id, result = given.token.execution_id, given.result
    status = "interrupted" if given.interrupt is not None else "done" if result is not None and result.ok else "failed"
    remember("ended", execution_id, value=status)
    (_log.warning if status == "failed" else _log.info)(
        "step settled",
        status=status,
        continued=continued or None,
        model=str(given.plan.model) if given.plan is not None else None,
        finish=result.finish if result is not None else None,
        tokens_in=result.tokens.input if result is not None else None,
        tokens_out=result.tokens.output if result is not None else None,
        seconds=since(recall("step", execution_id, given.step), asyncio.get_running_loop().time()),
    )
    return status


class StepActivities:
    """Local activities of a step's end."""

    def __init__(self, services: Services, models: ModelActivities) -> None:
        self._services = services
        self._models = models

    @activity.defn(name=contracts.SETTLE_STEP)
    @guarded
    async def settle_step(self, given: SettleInput) -> SettleResult:
        """Settle the step under the fence; a failure that may pass also records how the turn goes on.

        In the same transaction the session is given back with the turn's last step, or the next step is begun.
        """
        token, lease = own_run(given.token), self._services.lease

        async def work(
            conn: AsyncConnection, following: ResolveInput | None = given.next
        ) -> tuple[bool, ReleaseState | None, Begun | None]:
            settlement = await self._settlement(conn, given)
            locked = await ownership.lock(conn, token)
            if await steps.settle(conn, token, given.step, settlement, lease, locked=locked):
                return True, None, None
            if given.release:
                return False, await claims.release(conn, token, given.step, interrupted=False, locked=locked), None
            return False, None, await self._models.prepare(conn, following, locked) if following else None

        transact = self._services.database.transact
        try:
            continued, released, begun = await transact(work)
        except (OwnershipLostError, UnavailableError):
            raise
        except Exception:
            if given.next is None:
                raise
            # The next step cannot be begun. This one is settled all the same, and that one fails by itself.
            continued, released, begun = await transact(lambda conn: work(conn, None))
        status = _tell(given, continued=continued)
        if released is not None:
            tell_release(status, released)
        self._services.announcer.send(token.session_id, Notice.look())
        return SettleResult(
            continued=continued,
            released=released,
            begun=self._models.resolved(given.next, begun) if given.next and begun else None,
        )

    async def _settlement(self, conn: AsyncConnection, given: SettleInput) -> Settlement:
        session_id = given.token.session_id
        if given.interrupt is not None:
            stop = given.interrupt
            return Settlement(Interruption(given.interrupt_reason, stop.id, stop.reason, stop.after))
        assert given.assistant_message_id is not None, "a step that did not begin can only be interrupted"
        message_id = given.assistant_message_id
        if given.plan is not None:
            agent, model = given.plan.agent, given.plan.model
        else:
            agent, model = chosen(self._services.settings, await sessions.get(conn, session_id))
        about = {"timestamp": 0, "session_id": session_id, "assistant_message_id": message_id}
        start = StepStarted(**about, agent=agent, model=model)
        result = given.result
        if result is not None and result.ok:
            ended = StepEnded(**about, finish=result.finish or "unknown", cost=result.cost, tokens=result.tokens)
            return Settlement(ended, start)
        reason = given.error or (result.error if result is not None else None) or UNSETTLED
        passing = result is not None and result.transient and result.output
        return Settlement(
            StepFailed(**about, error=MessageError(message=reason)),
            start,
            max_continuations=self._services.settings.limits.max_continuations if passing else None,
        )
