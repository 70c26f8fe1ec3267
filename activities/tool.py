"""One tool call: fenced start, the effect, fenced settlement."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity
from temporalio.service import RPCError

from activities.guard import guarded, kept, own_run
from fencepost.domain import contracts
from fencepost.domain.contracts import RefuseTool, ToolBegun, ToolInput, ToolOutcome
from fencepost.domain.events import ToolFailed, ToolProviderInfo, ToolSuccess
from fencepost.domain.messages import MessageError
from fencepost.domain.ownership import Token
from fencepost.domain.tools import Invocation, ToolFailure, ToolOutput
from fencepost.services import Services
from fencepost.store import ownership, tool_calls
from fencepost.store.live import Notice
from fencepost.store.tool_calls import PlannedCall
from fencepost.telemetry import get_logger, since
from fencepost.tools.registry import ToolContext

_TELLING = timedelta(seconds=2)

_log = get_logger("fencepost.tool")


class ToolActivities:
    """The activity that executes local tools. It has one attempt, and no second one ever."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.EXECUTE_TOOL)
    @guarded
    async def execute_tool(self, given: ToolInput) -> ToolOutcome:
        """Start the call, execute it and settle it. A call that was started before is never executed again."""
        services = self._services
        token = own_run(given.token)
        async with kept(services, token) as keeper:
            asked = asyncio.get_running_loop().time()
            planned = await services.database.transact(
                lambda conn: tool_calls.start(conn, token, given.assistant_message_id, given.call_id, services.lease),
                alone=True,
            )
            keeper.renewed()
            if given.waited:
                await self._tell_begun(given)
            await self._still_held(token, asked)
            began, fault = asyncio.get_running_loop().time(), None
            try:
                outcome = self._success(given, await self._execute(given, planned))
            except ToolFailure as failure:
                outcome = self._failure(given, failure.message)
            except Exception as error:
                # A fault of the tool itself. The model sees it, and the turn goes on.
                fault = type(error).__name__
                _log.debug("tool fault", exc_info=error)
                outcome = self._failure(given, f"Tool execution failed: {str(error) or type(error).__name__}")
            await services.database.transact(
                lambda conn: tool_calls.settle(
                    conn, token, given.assistant_message_id, given.call_id, outcome, services.lease
                )
            )
            services.announcer.send(token.session_id, Notice.look())
            ok = isinstance(outcome, ToolSuccess)
            (_log.info if fault is None else _log.warning)(
                "tool done",
                tool=planned.name if planned.name in given.plan.tools else "unknown",
                status="done" if ok else "failed",
                fault=fault,
                seconds=since(began, asyncio.get_running_loop().time()),
            )
            return ToolOutcome(ok=ok)

    async def _still_held(self, token: Token, asked: float) -> None:
        """Prove ownership again before the effect when the start has taken so long that the session may have been taken
        over since it was committed: a worker that stood still must not begin now. Raises OwnershipLostError."""
        services = self._services
        if asyncio.get_running_loop().time() - asked > services.settings.limits.heartbeat_seconds:
            await services.database.transact(lambda conn: ownership.hold(conn, token, unexpired=True))

    async def _tell_begun(self, given: ToolInput) -> None:
        """Tell the own run that the call waits no longer. May be lost: its end says so too."""
        info = activity.info()
        assert info.workflow_id is not None
        run = self._services.temporal.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        said = ToolBegun(execution_id=given.token.execution_id, call_id=given.call_id)
        try:
            await run.signal(contracts.SIGNAL_BEGUN, said, rpc_timeout=_TELLING)
        except RPCError as error:
            _log.debug("tool start not announced", error=str(error))

    @activity.defn(name=contracts.REFUSE_TOOL)
    @guarded
    async def refuse_tool(self, given: RefuseTool) -> ToolOutcome:
        """Settle a call as failed that no worker of its workspace has taken. Runs locally, on the turn's own queue."""
        token, lease = own_run(given.token), self._services.lease
        outcome = self._failure(given, given.error)
        await self._services.database.transact(lambda conn: tool_calls.refuse(conn, token, outcome, lease))
        self._services.announcer.send(token.session_id, Notice.look())
        return ToolOutcome(ok=False)

    async def _execute(self, given: ToolInput, planned: PlannedCall) -> ToolOutput:
        services = self._services
        agent = services.settings.agents.get(planned.agent)
        if planned.name not in given.plan.tools:
            raise ToolFailure(f"Unknown tool: {planned.name}")
        context = ToolContext(
            Invocation(
                session_id=given.token.session_id,
                agent=planned.agent,
                assistant_message_id=given.assistant_message_id,
                tool_call_id=given.call_id,
                directory=planned.directory,
                effect_key=planned.effect_key,
            ),
            services.rules(agent),
            services.runner,
            services.outputs,
        )
        return await services.registry.execute(planned.name, planned.input, context)

    def _success(self, given: ToolInput, output: ToolOutput) -> ToolSuccess | ToolFailed:
        return ToolSuccess(
            timestamp=0,
            session_id=given.token.session_id,
            assistant_message_id=given.assistant_message_id,
            call_id=given.call_id,
            structured=output.structured,
            content=output.content,
            output_paths=output.output_paths or None,
            provider=ToolProviderInfo(executed=False),
        )

    def _failure(self, given: ToolInput | RefuseTool, message: str) -> ToolFailed:
        return ToolFailed(
            timestamp=0,
            session_id=given.token.session_id,
            assistant_message_id=given.assistant_message_id,
            call_id=given.call_id,
            error=MessageError(message=message),
            provider=ToolProviderInfo(executed=False),
        )
