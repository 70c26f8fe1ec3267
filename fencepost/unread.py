"""What a run was sent and did not get to: read from its history, and kept under the same ids.

Input goes into the inbox. The next run is told the rest: interrupts, and what it has to refuse as this one would have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.api.common.v1 import Payloads
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHistory
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from fencepost.domain import contracts
from fencepost.domain.contracts import PromptInput, SessionInput
from fencepost.domain.errors import NotFoundError, PromptConflictError, UnavailableError
from fencepost.domain.ids import derived_id
from fencepost.domain.inbox import Delivery
from fencepost.store import event_log, inbox, interrupts, sessions
from fencepost.store.engine import Database
from fencepost.store.sessions import NewSession

_RPC = timedelta(seconds=5)
_DELAY = timedelta(seconds=10)
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


async def read(client: Client, session_id: str, run_id: str) -> Unread:
    """Read it from a run's history. An interrupt is given unless the run went on after it. Raises UnavailableError."""
    try:
        history = await client.get_workflow_handle(session_id, run_id=run_id).fetch_history(rpc_timeout=_RPC)
    except RPCError as error:
        raise UnavailableError(f"Temporal does not give the history of {session_id}: {error.message}") from error
    return _unread(session_id, history)


def _unread(session_id: str, history: WorkflowHistory) -> Unread:
    begun = history.events[0].workflow_execution_started_event_attributes
    start = _object(begun.input) or {}
    run, counts = begun.original_execution_run_id, Counter[str]()
    went_on = _went_on(history)
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
        if payload is None or (kind == "interrupt" and event.event_id < went_on):
            continue  # it could not be understood, or was handled
        name = str(payload.get("id") or derived_id("msg" if prefix == "msg" else "int", session_id, run, counts[kind]))
        sent.append(Sent(given.signal_name, name, {**payload, "id": name}))
    session = start.get("session")
    return Unread(session if isinstance(session, dict) else None, tuple(sent))


def _went_on(history: WorkflowHistory) -> int:
    """Give the last event with which work was begun that nobody has stopped. An interrupt before it stopped what it had
    to stop, or found nothing; after one that is not settled yet, all that was begun is cancelled."""
    stopped = {
        event.activity_task_cancel_requested_event_attributes.scheduled_event_id
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_CANCEL_REQUESTED
    }
    begun = {
        event.event_id for event in history.events if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    }
    return max(begun - stopped, default=0)


def _object(given: Payloads) -> dict[str, Any] | None:
    if len(given.payloads) != 1:
        return None
    try:
        value = json.loads(given.payloads[0].data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def admit(database: Database, session_id: str, found: Unread, prompt_bytes: int) -> Unread:
    """Admit the input in its order, each once, and give what is left for the next run to be told.

    A session that was never created is created, if it says where it works: without, that is its worker's to say.
    """
    if found.session is not None:
        await _create(database, session_id, found.session)
    left = []
    for number, one in enumerate(found.sent):
        if one.signal in _INPUT:
            if not await _admitted(database, session_id, one, prompt_bytes):
                left.append(one)
            continue
        later = [each.id for each in found.sent[number + 1 :] if each.signal in _INPUT]
        placed = await _placed(database, session_id, one, later)
        if placed is not None:
            left.append(placed)
    return replace(found, sent=tuple(left))


async def _create(database: Database, session_id: str, given: dict[str, Any]) -> None:
    try:
        asked = SessionInput.model_validate(given)
    except ValidationError:
        return  # the next run refuses it
    if asked.location is None or not asked.location.directory.startswith("/"):
        return
    new = NewSession(location=asked.location, agent=asked.agent, model=asked.model, title=asked.title)
    await database.transact(lambda conn: sessions.create(conn, session_id, new))


async def _admitted(database: Database, session_id: str, one: Sent, prompt_bytes: int) -> bool:
    """Say whether the input is in the inbox now. What is malformed or too large, or has the id of something else, is
    not, nor is any without its session: the next run is told it, and shows that it refuses it."""
    try:
        given = PromptInput.model_validate(one.payload)
    except ValidationError:
        return False
    delivery: Delivery = "queue" if one.signal == contracts.SIGNAL_QUEUE else "steer"
    given = given.model_copy(update={"delivery": delivery})
    if len(given.model_dump_json(by_alias=True).encode()) > prompt_bytes:
        return False

    async def work(conn: AsyncConnection) -> None:
        head = await event_log.lock(conn, session_id)
        # What was admitted before may have been told to wait since: it is compared, and asks for nothing again.
        resume = given.resume and await inbox.find(conn, one.id) is None
        await inbox.admit(conn, session_id, one.id, given.prompt(), delivery, resume=resume, head=head)

    with suppress(NotFoundError, PromptConflictError):
        await database.transact(work)
        return True
    return False


async def _placed(database: Database, session_id: str, one: Sent, later: Sequence[str]) -> Sent | None:
    """Give an interrupt with its place in the log, before the input that was sent after it: that is not to be stopped.
    None for one that the log has."""
    async with database.read() as conn:
        place = await interrupts.place(conn, session_id, one.id, "")
        if place.recorded:
            return None
        if place.head < 0 or one.payload.get("after") is not None:
            return one
        receipts = [await inbox.find(conn, each) for each in later]
    after = [each.admitted_seq - 1 for each in receipts if each is not None and each.session_id == session_id]
    return replace(one, payload={**one.payload, "after": min([place.head, *after])})


async def send_again(client: Client, session_id: str, task_queue: str, unread: Unread) -> None:
    """Have the session's run look at its inbox, starting one, and tell it what is unread: a new one before it does
    anything, since an interrupt is to stop it before its first step. Raises UnavailableError."""
    start = {} if unread.session is None else {"session": unread.session}

    async def tell(signal: str, arguments: Sequence[Any] = (), delay: timedelta | None = None) -> None:
        await client.start_workflow(
            contracts.SESSION_TURN,
            start,
            id=session_id,
            task_queue=task_queue,
            start_signal=signal,
            start_signal_args=arguments,
            start_delay=delay,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            rpc_timeout=_RPC,
        )

    try:
        if unread.sent:
            # The last wake ends the delay; plain signals do not.
            await tell(contracts.SIGNAL_WAKE, delay=_DELAY)
        for one in unread.sent:
            try:
                handle = client.get_workflow_handle(session_id)
                await handle.signal(one.signal, one.payload, rpc_timeout=_RPC)
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
                await tell(one.signal, [one.payload])  # it was an older run, and has ended
        await tell(contracts.SIGNAL_WAKE)
    except RPCError as error:
        raise UnavailableError(f"Temporal did not start a run of {session_id}: {error.message}") from error
