"""Beginning a step: what the model will see that it has not seen before, and what the step runs with."""

from __future__ import annotations

import asyncio
import difflib
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.guard import guarded, own_run
from fencepost.config import Settings
from fencepost.domain import contracts
from fencepost.domain.contracts import Plan, Resolved, ResolveInput
from fencepost.domain.errors import AgentNotFoundError, ContextError, FencepostError
from fencepost.domain.models import ModelRef
from fencepost.services import Services
from fencepost.store import sessions, steps
from fencepost.store.live import Notice
from fencepost.store.ownership import Locked
from fencepost.store.sessions import Session
from fencepost.store.steps import Prepared
from fencepost.telemetry import remember


def chosen(settings: Settings, session: Session) -> tuple[str, ModelRef]:
    """Give the agent and model that a session's next step asks for, whether they exist or not."""
    agent = session.agent or settings.default_agent
    configured = settings.agents.get(agent)
    own = configured.model if configured is not None else None
    return agent, session.model or ModelRef.parse(own or settings.default_model)


@dataclass(frozen=True, slots=True)
class Begun:
    """A prepared step, and the session if there is something to answer and it can be answered."""

    prepared: Prepared
    session: Session | None


class ModelActivities:
    """Local activities of a step's beginning."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.RESOLVE_MODEL)
    @guarded
    async def resolve_model(self, given: ResolveInput) -> Resolved:
        """Fail interrupted tools and promote input; then, if there is something to answer, resolve agent, model and
        tools. They are sampled once, in the same transaction: a switch meanwhile is for the next step."""
        own_run(given.token)
        transact = self._services.database.transact
        try:
            begun = await transact(lambda conn: self.prepare(conn, given))
        except ContextError as error:
            # Nothing of the step has stayed. It begins without its context, and can only be settled as failed.
            refused = error.message
            begun = await transact(lambda conn: self.prepare(conn, given, refused=refused))
        return self.resolved(given, begun)

    async def prepare(
        self, conn: AsyncConnection, given: ResolveInput, locked: Locked | None = None, refused: str | None = None
    ) -> Begun:
        """Prepare the step, in the caller's transaction. Raises what `steps.prepare` raises."""
        token = given.token
        remember("step", token.execution_id, given.step, value=asyncio.get_running_loop().time())
        prepared = await steps.prepare(
            conn,
            token,
            given.step,
            queued=given.queued,
            lease=self._services.lease,
            required=given.required,
            refused=refused,
            locked=locked,
        )
        due = prepared.refused is None and (given.required or prepared.promoted or prepared.continued)
        session = prepared.session
        if due and session is None:  # prepared before, by a twin
            session = await sessions.get(conn, token.session_id)
        return Begun(prepared, session)

    def resolved(self, given: ResolveInput, begun: Begun) -> Resolved:
        """Resolve what the prepared step runs with, once that is committed."""
        prepared, session = begun.prepared, begun.session
        if prepared.promoted or prepared.continued:
            self._services.announcer.send(given.token.session_id, Notice.look())
        plan, error = None, prepared.refused
        if session is not None:
            try:
                plan = self._plan(session, 1 if prepared.promoted else given.agent_step + 1)
            except FencepostError as failure:
                error = failure.message
        return Resolved(
            assistant_message_id=prepared.assistant_message_id,
            promoted=prepared.promoted,
            continued=prepared.continued,
            plan=plan,
            error=error,
        )

    def _plan(self, session: Session, agent_step: int) -> Plan:
        """Give the plan; it holds names only. Raises AgentNotFoundError and what the catalog raises."""
        services, settings = self._services, self._services.settings
        name, model = chosen(settings, session)
        agent = settings.agents.get(name)
        if agent is None:
            close = difflib.get_close_matches(name, settings.agents, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise AgentNotFoundError(
                f"there is no agent {name!r}{hint}: configured are {', '.join(sorted(settings.agents))}"
            )
        services.catalog.resolve(model)
        tools = services.registry.definitions(services.rules(agent), agent.tools)
        return Plan(
            agent=name,
            model=model,
            tools=tuple(tool.name for tool in tools),
            last_step=agent.steps is not None and agent_step >= agent.steps,
            workspace_id=session.location.workspace_id,
        )
