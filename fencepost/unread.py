"""What a run was sent and did not get to: read from its history, so that the next run is told it under the same ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from temporalio.api.common.v1 import Payloads
from temporalio.client import Client, WorkflowHistory
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from fencepost.domain import contracts
from fencepost.domain.errors import UnavailableError
from fencepost.domain.ids import derived_id

_RPC = timedelta(seconds=5)
_INPUT = (contracts.SIGNAL_STEER, contracts.SIGNAL_QUEUE)


@dataclass(frozen=True, slots=True)
class Sent:
    """One signal with the id by which it counts once, the one that the run itself would have given it."""

    signal: str
    id: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """What the session was created with, and the signals in their order; the prompt of the start input is one."""

    session: dict[str, Any] | None = None
    sent: Sequence[Sent] = field(default=())

    @property
    def inputs(self) -> list[Sent]:
        """Give those that are input: once admitted, the inbox has them by their ids."""
        return [one for one in self.sent if one.signal in _INPUT]


async def read(client: Client, session_id: str, run_id: str) -> Unread:
    """Read it from a run's history. An interrupt is given only if no worker has seen it. Raises UnavailableError."""
    try:
        history = await client.get_workflow_handle(session_id, run_id=run_id).fetch_history(rpc_timeout=_RPC)
    except RPCError as error:
        raise UnavailableError(f"Temporal does not give the history of {session_id}: {error.message}") from error
    return _unread(session_id, history)


def _unread(session_id: str, history: WorkflowHistory) -> Unread:
    begun = history.events[0].workflow_execution_started_event_attributes
    start = _object(begun.input) or {}
    run, counts = begun.original_execution_run_id, Counter[str]()
    seen = max((e.workflow_task_completed_event_attributes.started_event_id for e in history.events), default=0)
    sent = []
    prompt = start.get("prompt")
    if isinstance(prompt, dict):
        queued = prompt.get("delivery") == contracts.SIGNAL_QUEUE
        name = str(prompt.get("id") or derived_id("msg", session_id, run, 0))
        sent.append(Sent(contracts.SIGNAL_QUEUE if queued else contracts.SIGNAL_STEER, name, {**prompt, "id": name}))
    for event in history.events:
        given = event.workflow_execution_signaled_event_attributes
        if given.signal_name not in (*_INPUT, contracts.SIGNAL_INTERRUPT):
            continue
        prefix, kind = ("int", "interrupt") if given.signal_name == contracts.SIGNAL_INTERRUPT else ("msg", "input")
        counts[kind] += 1
        payload = _object(given.input)
        if payload is None and kind == "interrupt" and not given.input.payloads:
            payload = {}
        if payload is None or (kind == "interrupt" and event.event_id < seen):
            continue  # it could not be understood, or was handled
        name = str(payload.get("id") or derived_id("msg" if prefix == "msg" else "int", session_id, run, counts[kind]))
        sent.append(Sent(given.signal_name, name, {**payload, "id": name}))
    session = start.get("session")
    return Unread(session if isinstance(session, dict) else None, tuple(sent))


def _object(given: Payloads) -> dict[str, Any] | None:
    if len(given.payloads) != 1:
        return None
    try:
        value = json.loads(given.payloads[0].data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def send_again(client: Client, session_id: str, task_queue: str, unread: Unread) -> None:
    """Have the session's run look at its inbox, starting one, and tell it what is unread. Raises UnavailableError."""
    start = {} if unread.session is None else {"session": unread.session}
    told: list[tuple[str, list[Any]]] = [(contracts.SIGNAL_WAKE, [])]
    told += [(one.signal, [one.payload]) for one in unread.sent]
    try:
        for signal, arguments in told:
            await client.start_workflow(
                contracts.SESSION_TURN,
                start,
                id=session_id,
                task_queue=task_queue,
                start_signal=signal,
                start_signal_args=arguments,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                rpc_timeout=_RPC,
            )
    except RPCError as error:
        raise UnavailableError(f"Temporal did not start a run of {session_id}: {error.message}") from error
