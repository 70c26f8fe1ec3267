"""The activities: what a turn does to the world. Each calls the store, a provider or a tool, under the fence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from activities.inbox import InboxActivities
from activities.model import ModelActivities
from activities.ownership import OwnershipActivities
from activities.provider import ProviderActivities
from activities.recovery import RecoveryActivities
from activities.step import StepActivities
from activities.tool import ToolActivities
from fencepost.services import Services


def turn_activities(services: Services) -> list[Callable[..., Any]]:
    """Give the activities of the turn workflow's own queue; those of a workspace's queue are `tool_activities`."""
    ownership = OwnershipActivities(services)
    models = ModelActivities(services)
    inbox = InboxActivities(services, ownership, models)
    return [
        inbox.admit_start,
        inbox.admit_input,
        inbox.place_interrupt,
        ownership.claim_session,
        ownership.release_session,
        models.resolve_model,
        ProviderActivities(services).stream_provider,
        StepActivities(services, models).settle_step,
        RecoveryActivities(services).recover_sessions,
        ToolActivities(services).refuse_tool,
        *tool_activities(services),
    ]


def tool_activities(services: Services) -> list[Callable[..., Any]]:
    """Give the activities that run where a session's files are."""
    return [ToolActivities(services).execute_tool]
