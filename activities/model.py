"""Resolving what a step runs with: agent, model, tools. The plan holds names only."""

from __future__ import annotations

import difflib

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.guard import guarded, own_run
from fencepost.config import Settings
from fencepost.domain import contracts
from fencepost.domain.contracts import Plan, ResolveInput
from fencepost.domain.errors import AgentNotFoundError, OwnershipLostError
from fencepost.domain.models import ModelRef
from fencepost.services import Services
from fencepost.store import ledger, ownership, sessions
from fencepost.store.sessions import Session


def chosen(settings: Settings, session: Session) -> tuple[str, ModelRef]:
    """Give the agent and model that a session's next step asks for, whether they exist or not."""
    agent = session.agent or settings.default_agent
    configured = settings.agents.get(agent)
    own = configured.model if configured is not None else None
    return agent, session.model or ModelRef.parse(own or settings.default_model)


class ModelActivities:
    """Local activities of model resolution."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.RESOLVE_MODEL)
    @guarded
    async def resolve_model(self, given: ResolveInput) -> Plan:
        """Resolve the step's agent, model and tools. Sampled once: a switch meanwhile is for the next step."""
        services, settings = self._services, self._services.settings
        token = own_run(given.token)

        async def read(conn: AsyncConnection) -> Session:
            try:
                await ownership.hold(conn, token)
            except OwnershipLostError:
                if await ledger.given_back(conn, token) is None:
                    raise
            return await sessions.get(conn, token.session_id)

        session = await services.database.transact(read)
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
            last_step=agent.steps is not None and given.agent_step >= agent.steps,
            workspace_id=session.location.workspace_id,
        )
