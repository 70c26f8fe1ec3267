"""The projector: what each durable event does to the tables, inside the transaction that appends it.

One function per event kind, in `PROJECTORS`. Anything raised here rolls the event back with its projection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from sqlalchemy import delete, func, insert, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.errors import LifecycleConflictError, MessageNotFoundError, SessionAlreadyProjectedError
from fencepost.domain.projection import new_assistant, update_assistant
from fencepost.store import tables

Projector: TypeAlias = Callable[[AsyncConnection, Any, int], Awaitable[None]]

_SESSION_COLUMNS = MappingProxyType(
    {
        "id": "id", "projectID": "project_id", "workspaceID": "workspace_id", "parentID": "parent_id", "slug": "slug",
        "directory": "directory", "path": "path", "title": "title", "version": "version", "metadata": "metadata",
        "agent": "agent", "model": "model", "timeCreated": "time_created", "timeUpdated": "time_updated",
    }
)  # fmt: skip


async def project(conn: AsyncConnection, event: events.DurableEvent, seq: int) -> None:
    """Project one event at its sequence. An event kind without a projector changes nothing."""
    projector = PROJECTORS.get(type(event))
    if projector is not None:
        await projector(conn, event, seq)


async def _session_created(conn: AsyncConnection, event: events.SessionCreated, seq: int) -> None:
    info = event.info
    root = {"id": info["projectID"], "worktree": info["directory"]}
    times = {"time_created": event.timestamp, "time_updated": event.timestamp}
    await conn.execute(upsert(tables.project).values(**root, **times).on_conflict_do_nothing(index_elements=["id"]))
    row = {column: info[name] for name, column in _SESSION_COLUMNS.items() if info.get(name) is not None}
    inserted = await conn.execute(
        upsert(tables.session)
        .values(**row)
        .on_conflict_do_nothing(index_elements=["id"])
        .returning(tables.session.c.id)
    )
    if inserted.first() is None:
        raise SessionAlreadyProjectedError(f"session {event.session_id} exists already")
    if info.get("workspaceID") is not None:
        spaces = tables.workspace
        touched = update(spaces).where(spaces.c.id == info["workspaceID"]).values(time_used=event.timestamp)
        await conn.execute(touched)


async def _insert_message(
    conn: AsyncConnection, event: events.DurableEvent, seq: int, message_id: str, kind: str, data: dict[str, Any]
) -> None:
    """A duplicate id is refused, which rolls the event back and keeps the original."""
    messages = tables.session_message
    statement = upsert(messages).values(
        id=message_id,
        session_id=event.session_id,
        type=kind,
        seq=seq,
        time_created=event.timestamp,
        time_updated=event.timestamp,
        data=data,
    )
    once = statement.on_conflict_do_nothing(index_elements=["id"]).returning(messages.c.id)
    if (await conn.execute(once)).first() is None:
        raise LifecycleConflictError(f"there is a message {message_id} already: {event.type} cannot make another")


def _created(event: events.DurableEvent) -> dict[str, Any]:
    return {"time": {"created": event.timestamp}}


async def _touch_session(conn: AsyncConnection, event: events.DurableEvent, **values: Any) -> None:
    sessions = tables.session
    statement = update(sessions).where(sessions.c.id == event.session_id)
    await conn.execute(statement.values(time_updated=event.timestamp, **values))


async def _agent_switched(conn: AsyncConnection, event: events.AgentSwitchedEvent, seq: int) -> None:
    await _touch_session(conn, event, agent=event.agent)
    data = {"agent": event.agent, **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "agent-switched", data)


async def _model_switched(conn: AsyncConnection, event: events.ModelSwitchedEvent, seq: int) -> None:
    model = event.model.to_wire()
    await _touch_session(conn, event, model=model)
    data = {"model": model, **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "model-switched", data)


async def _moved(conn: AsyncConnection, event: events.Moved, seq: int) -> None:
    where = event.location
    await _touch_session(
        conn, event, directory=where.directory, workspace_id=where.workspace_id, path=event.subdirectory
    )


async def _prompt_admitted(conn: AsyncConnection, event: events.PromptAdmitted, seq: int) -> None:
    messages, inbox = tables.session_message, tables.session_input
    visible = await conn.execute(select(messages.c.id).where(messages.c.id == event.message_id))
    if visible.first() is not None:
        raise LifecycleConflictError(f"{event.message_id} is a message already and cannot be admitted again")
    row = {
        "id": event.message_id,
        "session_id": event.session_id,
        "prompt": event.prompt.to_wire(),
        "delivery": event.delivery,
        "admitted_seq": seq,
        "time_created": event.timestamp,
    }
    inserted = await conn.execute(
        upsert(inbox).values(**row).on_conflict_do_nothing(index_elements=["id"]).returning(inbox.c.id)
    )
    if inserted.first() is None:
        raise LifecycleConflictError(f"input {event.message_id} is in the inbox already")


async def _prompted(conn: AsyncConnection, event: events.Prompted, seq: int) -> None:
    inbox = tables.session_input
    prompt = event.prompt.to_wire()
    found = await conn.execute(select(inbox).where(inbox.c.id == event.message_id).with_for_update())
    row = found.mappings().first()
    if row is None:
        # A log from before there was an inbox: admitted and promoted at once.
        values = {"id": event.message_id, "session_id": event.session_id, "prompt": prompt, "delivery": event.delivery}
        places = {"admitted_seq": seq, "promoted_seq": seq, "time_created": event.timestamp}
        await conn.execute(insert(inbox).values(**values, **places))
    elif row["promoted_seq"] is not None:
        if row["session_id"] != event.session_id or row["promoted_seq"] != seq:
            raise LifecycleConflictError(f"input {event.message_id} was promoted at {row['promoted_seq']} already")
    else:
        same = (row["session_id"], row["prompt"], row["delivery"], row["time_created"])
        if same != (event.session_id, prompt, event.delivery, event.timestamp):
            raise LifecycleConflictError(f"input {event.message_id} was admitted with other content")
        await conn.execute(update(inbox).where(inbox.c.id == event.message_id).values(promoted_seq=seq))
    await _insert_message(conn, event, seq, event.message_id, "user", {**prompt, **_created(event)})


async def _context_updated(conn: AsyncConnection, event: events.ContextUpdated, seq: int) -> None:
    data = {"text": event.text, **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "system", data)


async def _synthetic(conn: AsyncConnection, event: events.Synthetic, seq: int) -> None:
    data = {"sessionID": event.session_id, "text": event.text, **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "synthetic", data)


async def _shell_started(conn: AsyncConnection, event: events.ShellStarted, seq: int) -> None:
    data = {"callID": event.call_id, "command": event.command, "output": "", **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "shell", data)


async def _shell_ended(conn: AsyncConnection, event: events.ShellEnded, seq: int) -> None:
    messages = tables.session_message
    newest = (
        select(messages.c.id, messages.c.data)
        .where(
            messages.c.session_id == event.session_id,
            messages.c.type == "shell",
            messages.c.data["callID"].astext == event.call_id,
        )
        .order_by(messages.c.seq.desc())
        .limit(1)
        .with_for_update()
    )
    row = (await conn.execute(newest)).first()
    if row is not None:
        time = {**row.data["time"], "completed": event.timestamp}
        data = {**row.data, "output": event.output, "time": time}
        await _write_message(conn, event, row.id, data)


async def _compaction_ended(conn: AsyncConnection, event: events.CompactionEnded, seq: int) -> None:
    data = {"reason": event.reason, "summary": event.text, "recent": event.recent, **_created(event)}
    await _insert_message(conn, event, seq, event.message_id, "compaction", data)


async def _write_message(
    conn: AsyncConnection, event: events.DurableEvent, message_id: str, data: dict[str, Any]
) -> None:
    messages = tables.session_message
    statement = update(messages).where(messages.c.id == message_id)
    await conn.execute(statement.values(data=data, time_updated=event.timestamp))


async def _step_started(conn: AsyncConnection, event: events.StepStarted, seq: int) -> None:
    """An older step that never settled is closed, without finish and error, so that it is never current again."""
    messages = tables.session_message
    newest = (
        select(messages.c.id, messages.c.data)
        .where(messages.c.session_id == event.session_id, messages.c.type == "assistant")
        .order_by(messages.c.seq.desc())
        .limit(1)
        .with_for_update()
    )
    row = (await conn.execute(newest)).first()
    if row is not None and "completed" not in row.data["time"]:
        time = {**row.data["time"], "completed": event.timestamp}
        await _write_message(conn, event, row.id, {**row.data, "time": time})
    await _insert_message(conn, event, seq, event.assistant_message_id, "assistant", new_assistant(event))


async def _assistant(conn: AsyncConnection, event: events.StepEvent | events.StepInterrupted, seq: int) -> None:
    """An event for an unknown or foreign assistant changes nothing."""
    if event.assistant_message_id is None:
        return
    messages = tables.session_message
    named = (
        select(messages.c.data)
        .where(
            messages.c.id == event.assistant_message_id,
            messages.c.session_id == event.session_id,
            messages.c.type == "assistant",
        )
        .with_for_update()
    )
    data = (await conn.execute(named)).scalar_one_or_none()
    changed = update_assistant(data, event) if data is not None else None
    if changed is not None:
        await _write_message(conn, event, event.assistant_message_id, changed)


async def _step_ended(conn: AsyncConnection, event: events.StepEnded, seq: int) -> None:
    """Also sums the session's cost and tokens."""
    await _assistant(conn, event, seq)
    columns = tables.session.c
    tokens = event.tokens
    await _touch_session(
        conn,
        event,
        cost=columns.cost + event.cost,
        tokens_input=columns.tokens_input + tokens.input,
        tokens_output=columns.tokens_output + tokens.output,
        tokens_reasoning=columns.tokens_reasoning + tokens.reasoning,
        tokens_cache_read=columns.tokens_cache_read + tokens.cache.read,
        tokens_cache_write=columns.tokens_cache_write + tokens.cache.write,
    )


async def _revert_staged(conn: AsyncConnection, event: events.RevertStaged, seq: int) -> None:
    await _touch_session(conn, event, revert=event.revert)


async def _revert_cleared(conn: AsyncConnection, event: events.RevertCleared, seq: int) -> None:
    await _touch_session(conn, event, revert=None)


async def _revert_committed(conn: AsyncConnection, event: events.RevertCommitted, seq: int) -> None:
    messages, inbox = tables.session_message, tables.session_input
    mine = messages.c.session_id == event.session_id
    found = await conn.execute(select(messages.c.seq).where(mine, messages.c.id == event.message_id))
    boundary = found.scalar_one_or_none()
    if boundary is None:
        raise MessageNotFoundError(f"no message {event.message_id} in session {event.session_id} to revert to")
    await conn.execute(delete(messages).where(mine, messages.c.seq > boundary))
    later = or_(inbox.c.admitted_seq > boundary, func.coalesce(inbox.c.promoted_seq, text("-1")) > boundary)
    await conn.execute(delete(inbox).where(inbox.c.session_id == event.session_id, later))
    await _touch_session(conn, event, revert=None)


PROJECTORS: Mapping[type[events.DurableEvent], Projector] = MappingProxyType(
    cast(
        "dict[type[events.DurableEvent], Projector]",
        {
            events.SessionCreated: _session_created,
            events.AgentSwitchedEvent: _agent_switched,
            events.ModelSwitchedEvent: _model_switched,
            events.Moved: _moved,
            events.PromptAdmitted: _prompt_admitted,
            events.Prompted: _prompted,
            events.ContextUpdated: _context_updated,
            events.Synthetic: _synthetic,
            events.ShellStarted: _shell_started,
            events.ShellEnded: _shell_ended,
            events.StepStarted: _step_started,
            events.StepEnded: _step_ended,
            events.StepFailed: _assistant,
            events.StepInterrupted: _assistant,
            events.TextStarted: _assistant,
            events.TextEnded: _assistant,
            events.ReasoningStarted: _assistant,
            events.ReasoningEnded: _assistant,
            events.ToolInputStarted: _assistant,
            events.ToolInputEnded: _assistant,
            events.ToolCalled: _assistant,
            events.ToolProgress: _assistant,
            events.ToolSuccess: _assistant,
            events.ToolFailed: _assistant,
            events.CompactionEnded: _compaction_ended,
            events.RevertStaged: _revert_staged,
            events.RevertCleared: _revert_cleared,
            events.RevertCommitted: _revert_committed,
        },
    )
)
