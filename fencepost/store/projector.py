"""The projector: what each durable event does to the tables, inside the transaction that appends it.

One function per event kind, in `PROJECTORS`; how events change an assistant message is in `domain/projection.py`.
Anything raised here rolls the event back with its projection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from pydantic_core import to_json
from sqlalchemy import BigInteger, Text, bindparam, delete, func, literal, or_, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from fencepost.domain import events
from fencepost.domain.errors import LifecycleConflictError, MessageNotFoundError, SessionAlreadyProjectedError
from fencepost.domain.projection import new_assistant, update_assistant
from fencepost.store import promotions, tables
from fencepost.store.statement import Statement

Projector: TypeAlias = Callable[[AsyncConnection, Any, int], Awaitable[None]]

_SESSION_COLUMNS = MappingProxyType(
    {
        "id": "id", "projectID": "project_id", "workspaceID": "workspace_id", "parentID": "parent_id", "slug": "slug",
        "directory": "directory", "path": "path", "title": "title", "version": "version", "metadata": "metadata",
        "agent": "agent", "model": "model", "timeCreated": "time_created", "timeUpdated": "time_updated",
    }
)  # fmt: skip


class Projection:
    """Projects the events of one append, in order. An assistant message that several of them change is read and
    written once, and inputs promoted together are written together. `write` has to be called after the last event, in
    the same transaction."""

    def __init__(self, conn: AsyncConnection, message: tuple[str, dict[str, Any]] | None = None) -> None:
        self._conn = conn
        self._assistants: dict[str, _Assistant | None] = {}
        self._promoted: dict[str, tuple[events.Prompted, int]] = {}
        self._ended: events.StepEnded | None = None
        if message is not None:
            self._assistants[message[0]] = _Assistant(message[1])

    async def apply(self, event: events.DurableEvent, seq: int) -> None:
        """Project one event at its sequence. An event kind without a projector changes nothing."""
        if isinstance(event, events.StepStarted):
            await self.write()
            self._assistants[event.assistant_message_id] = _Assistant(new_assistant(event), event, event, seq)
            return
        if isinstance(event, events.StepEvent | events.StepInterrupted):
            await self._change(event)
            if isinstance(event, events.StepEnded):
                self._ended = event
                await self.write()
            return
        if isinstance(event, events.Prompted):
            if event.message_id in self._promoted:
                await self.write()
            self._promoted[event.message_id] = (event, seq)
            return
        projector = PROJECTORS.get(type(event))
        if projector is not None:
            await self.write()  # it may look at messages
            await projector(self._conn, event, seq)

    async def _change(self, event: events.StepEvent | events.StepInterrupted) -> None:
        """An event for an unknown or foreign assistant changes nothing."""
        message_id = event.assistant_message_id
        if message_id is None:
            return
        if message_id not in self._assistants:
            await self.write()  # a new message closes the one before it
            self._assistants[message_id] = await _read_assistant(self._conn, event.session_id, message_id)
        assistant = self._assistants[message_id]
        changed = update_assistant(assistant.data, event) if assistant is not None else None
        if assistant is not None and changed is not None:
            assistant.data, assistant.last = changed, event

    async def write(self) -> None:
        """Write what has changed."""
        ended, self._ended = self._ended, None
        for message_id, assistant in self._assistants.items():
            if assistant is None or assistant.last is None:
                continue
            if assistant.begun is not None:
                await _begin_message(self._conn, assistant, message_id)
            elif ended is not None and ended.assistant_message_id == message_id:
                await _END_MESSAGE.run(self._conn, named=message_id, data=assistant.data, **_sums(ended))
                ended = None
            else:
                await _write_message(self._conn, assistant.last, message_id, assistant.data)
        self._assistants.clear()
        if ended is not None:
            await _SUM_UP.run(self._conn, **_sums(ended))
        if self._promoted:
            await promotions.project(self._conn, list(self._promoted.values()))
            self._promoted.clear()


@dataclass(slots=True)
class _Assistant:
    """An assistant message in hand: its data, the last event that changed it, and the one that begins it with that
    one's sequence, if it is new."""

    data: dict[str, Any]
    last: Any = None
    begun: events.StepStarted | None = None
    seq: int = -1


_messages, _inbox, _sessions = tables.session_message, tables.session_input, tables.session
_ASSISTANT = Statement(
    select(_messages.c.data).where(
        _messages.c.id == bindparam("id"),
        _messages.c.session_id == bindparam("session_id"),
        _messages.c.type == "assistant",
    )
)
_newest = (
    select(_messages.c.id)
    .where(_messages.c.session_id == bindparam("session_id"), _messages.c.type == "assistant")
    .order_by(_messages.c.seq.desc())
    .limit(1)
)
_insert = (
    upsert(_messages)
    .values({column.name: bindparam(column.name) for column in _messages.c})
    .on_conflict_do_nothing(index_elements=["id"])
)
_INSERT_MESSAGE = Statement(_insert)
# An older step that never settled is closed with it, without finish and error, so that it is never current again.
_closed = bindparam("closed", type_=BigInteger)
_BEGIN_MESSAGE = Statement(
    _insert.add_cte(
        update(_messages)
        .where(_messages.c.id == _newest.scalar_subquery(), _messages.c.data["time"]["completed"].is_(None))
        .values(
            data=func.jsonb_set(_messages.c.data, literal(["time", "completed"], ARRAY(Text)), func.to_jsonb(_closed)),
            time_updated=_closed,
        )
        .cte("older")
    )
)
_update = (
    update(_messages)
    .where(_messages.c.id == bindparam("named"))
    .values(data=bindparam("data"), time_updated=bindparam("time_updated", type_=BigInteger))
)
_UPDATE_MESSAGE = Statement(_update)
_IS_MESSAGE = Statement(select(_messages.c.id).where(_messages.c.id == bindparam("id")))
_ADMIT = Statement(
    text(
        """
        INSERT INTO session_input (id, session_id, prompt, delivery, admitted_seq, time_created)
        SELECT e.* FROM (
            VALUES (
                CAST(:id AS text), CAST(:session_id AS text), CAST(:prompt AS jsonb), CAST(:delivery AS text),
                CAST(:admitted_seq AS bigint), CAST(:time_created AS bigint)
            )
        ) AS e(id, session_id, prompt, delivery, admitted_seq, time_created)
        WHERE NOT EXISTS (SELECT FROM session_message AS m WHERE m.id = e.id)
        ON CONFLICT (id) DO NOTHING
        """
    )
)
_SUMS = ("cost", "tokens_input", "tokens_output", "tokens_reasoning", "tokens_cache_read", "tokens_cache_write")
_root, _now = tables.project, bindparam("now", type_=BigInteger)
_CREATE = Statement(
    upsert(_sessions)
    .values({name: bindparam(name) for name in _SESSION_COLUMNS.values()})
    .on_conflict_do_nothing(index_elements=["id"])
    .add_cte(
        upsert(_root)
        .values(id=bindparam("project_id"), worktree=bindparam("worktree"), time_created=_now, time_updated=_now)
        .on_conflict_do_nothing(index_elements=["id"])
        .cte("root")
    )
)
_sum_up = (
    update(_sessions)
    .where(_sessions.c.id == bindparam("summed"))
    .values(
        {name: _sessions.c[name] + bindparam(f"more_{name}", type_=_sessions.c[name].type) for name in _SUMS}
        | {"time_updated": bindparam("time_updated", type_=BigInteger)}
    )
)
_SUM_UP = Statement(_sum_up)
_END_MESSAGE = Statement(_update.add_cte(_sum_up.cte("summed")))


async def _read_assistant(conn: AsyncConnection, session_id: str, message_id: str) -> _Assistant | None:
    # Without a lock of its own: whoever appends holds the lock of the session's log.
    row = await _ASSISTANT.first(conn, id=message_id, session_id=session_id)
    return None if row is None else _Assistant(row.data)


async def _session_created(conn: AsyncConnection, event: events.SessionCreated, seq: int) -> None:
    info = event.info
    row = {column: info.get(name) for name, column in _SESSION_COLUMNS.items()}
    if not await _CREATE.run(conn, worktree=info["directory"], now=event.timestamp, **row):
        raise SessionAlreadyProjectedError(f"session {event.session_id} exists already")
    if info.get("workspaceID") is not None:
        used = update(tables.workspace).where(tables.workspace.c.id == info["workspaceID"])
        await conn.execute(used.values(time_used=event.timestamp))


async def _insert_message(
    conn: AsyncConnection, event: events.DurableEvent, seq: int, message_id: str, kind: str, data: dict[str, Any]
) -> None:
    """A duplicate id is refused, which rolls the event back and keeps the original."""
    inserted = await _INSERT_MESSAGE.run(
        conn,
        id=message_id,
        session_id=event.session_id,
        type=kind,
        seq=seq,
        time_created=event.timestamp,
        time_updated=event.timestamp,
        data=data,
    )
    _require(inserted, event, message_id)


async def _begin_message(conn: AsyncConnection, assistant: _Assistant, message_id: str) -> None:
    """Insert a new assistant message as it is by now; an older one that never settled is closed."""
    event = assistant.begun
    assert event is not None
    inserted = await _BEGIN_MESSAGE.run(
        conn,
        id=message_id,
        session_id=event.session_id,
        type="assistant",
        seq=assistant.seq,
        time_created=event.timestamp,
        time_updated=assistant.last.timestamp,
        data=assistant.data,
        closed=event.timestamp,
    )
    _require(inserted, event, message_id)


def _require(inserted: int, event: events.DurableEvent, message_id: str) -> None:
    if not inserted:
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
    inserted = await _ADMIT.run(
        conn,
        id=event.message_id,
        session_id=event.session_id,
        prompt=to_json(event.prompt.to_wire()).decode(),
        delivery=event.delivery,
        admitted_seq=seq,
        time_created=event.timestamp,
    )
    if not inserted:
        if await _IS_MESSAGE.first(conn, id=event.message_id) is not None:
            raise LifecycleConflictError(f"{event.message_id} is a message already and cannot be admitted again")
        raise LifecycleConflictError(f"input {event.message_id} is in the inbox already")


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
    await _UPDATE_MESSAGE.run(conn, named=message_id, data=data, time_updated=event.timestamp)


def _sums(event: events.StepEnded) -> dict[str, Any]:
    """Give what adds a step's cost and tokens to its session's."""
    tokens = event.tokens
    return {
        "summed": event.session_id,
        "time_updated": event.timestamp,
        "more_cost": event.cost,
        "more_tokens_input": tokens.input,
        "more_tokens_output": tokens.output,
        "more_tokens_reasoning": tokens.reasoning,
        "more_tokens_cache_read": tokens.cache.read,
        "more_tokens_cache_write": tokens.cache.write,
    }


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
            events.ContextUpdated: _context_updated,
            events.Synthetic: _synthetic,
            events.ShellStarted: _shell_started,
            events.ShellEnded: _shell_ended,
            events.CompactionEnded: _compaction_ended,
            events.RevertStaged: _revert_staged,
            events.RevertCleared: _revert_cleared,
            events.RevertCommitted: _revert_committed,
        },
    )
)
