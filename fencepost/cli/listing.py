"""Sessions, messages and events as lines for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, assert_never

from fencepost.cli import terminal
from fencepost.cli.render import cost_text, telling, tokens_text
from fencepost.domain import messages as kinds
from fencepost.domain.contracts import Status
from fencepost.domain.inbox import Receipt
from fencepost.domain.messages import Message
from fencepost.domain.status import Activity, Claim
from fencepost.domain.tools import TextItem
from fencepost.store.event_log import StoredEvent
from fencepost.store.sessions import Session

_WIDE: Final = 90
_SUMMARY: Final = 200
_TELLING: Final = ("text", "tool", "finish", "reason", "agent", "command", "name")


def when(time: int) -> str:
    """Give a time, in milliseconds since the epoch, as people here write it."""
    return datetime.fromtimestamp(time / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def put_json(value: Any) -> None:
    """Write one JSON object in one line."""
    terminal.out(json.dumps(value, ensure_ascii=False))


# Sessions


def session_json(session: Session, activity: Activity | None = None) -> dict[str, Any]:
    """Give a session for programs; cost is in US dollars, times are milliseconds since the epoch."""
    found = {
        "id": session.id,
        "title": session.title,
        "location": session.location.to_wire(),
        "agent": session.agent,
        "model": str(session.model) if session.model else None,
        "cost": session.cost,
        "tokens": session.tokens.to_wire(),
        "timeCreated": session.time_created,
        "timeUpdated": session.time_updated,
        "timeArchived": session.time_archived,
        "activity": None if activity is None else activity.to_wire(),
    }
    return {name: value for name, value in found.items() if value is not None}


def session_lines(session: Session, activity: Activity) -> Iterator[str]:
    """Give a session for a list, with what it does unless it is idle: one line where there is room for it."""
    state = "" if activity.state == "idle" else f"  [{activity.state}]"
    title, directory = terminal.one_line(session.title), terminal.one_line(session.location.directory)
    width = terminal.width()
    if width is None or width >= _WIDE:
        yield terminal.cut(f"{session.id}  {when(session.time_created)}{state}  {title}  ({directory})")
    else:
        yield session.id
        yield terminal.cut(f"  {when(session.time_created)}{state}  {title}")
        yield terminal.cut(f"  {directory}")


def activity_text(activity: Activity) -> str:
    """Say what the database knows of a session's work."""
    return activity.state if activity.reason is None else f"{activity.state}: {activity.reason}"


def claim_text(claim: Claim) -> str:
    """Say who owns a session, and how the lease is: times in seconds."""
    left = claim.left / 1000
    lease = f"{left:.0f} s left" if claim.live else f"ran out {-left:.0f} s ago"
    return f"run {claim.run_id} for {claim.age / 1000:.0f} s, lease {lease}"


def detail_lines(session: Session, pending: list[Receipt], activity: Activity, doing: str) -> Iterator[str]:
    """Give everything about a session."""
    location = session.location
    facts = [
        ("session", session.id),
        ("title", session.title),
        ("directory", location.directory),
        ("workspace", location.workspace_id),
        ("agent", session.agent or "the default one"),
        ("model", str(session.model) if session.model else "the agent's, or the default one"),
        ("created", when(session.time_created)),
        ("updated", when(session.time_updated)),
        ("archived", when(session.time_archived) if session.time_archived is not None else None),
        ("tokens", tokens_text(session.tokens)),
        ("cost", cost_text(session.cost) or "$0"),
        ("status", activity_text(activity)),
        ("owner", claim_text(activity.claim) if activity.claim is not None else None),
        ("run", doing),
        ("inbox", f"{len(pending)} waiting" if pending else "empty"),
    ]
    yield from (f"{name:<10} {terminal.one_line(value)}" for name, value in facts if value is not None)
    for receipt in pending:
        yield terminal.cut(f"  {receipt.delivery:<5} {receipt.id}  {terminal.one_line(receipt.prompt.text)}")


def status_text(status: Status) -> str:
    """Say what an open run does."""
    parts: list[str] = [status.phase]
    if status.step:
        parts.append(f"step {status.step}")
    if status.attempt > 1:
        parts.append(f"attempt {status.attempt}")
    parts += [f"{status.agent} with {status.model}"] if status.agent and status.model else []
    parts += [f"runs {tool}" for tool in status.tools]
    parts += [f"waiting: {status.waiting_for}"] if status.waiting_for else []
    return ", ".join(parts)


def receipt_line(receipt: Receipt) -> str:
    """Give what became of an input."""
    seen = "" if receipt.promoted_seq is None else f", seen at {receipt.promoted_seq}"
    return f"{receipt.id}: recorded at {receipt.admitted_seq} ({receipt.delivery}){seen}"


# Messages


def message_lines(message: Message) -> Iterator[str]:
    """Give a message: what was said as it is, everything else in a line each."""
    match message:
        case kinds.UserMessage():
            yield from (f"> {line}".rstrip() for line in terminal.plain(message.text).split("\n"))
            for file in message.files or ():
                yield terminal.cut(f"  + {terminal.one_line(file.name or file.uri)} ({file.mime})")
        case kinds.AssistantMessage():
            for part in message.content:
                yield from _part_lines(part)
            yield _settled_line(message)
        case kinds.SyntheticMessage() | kinds.SystemMessage():
            yield terminal.cut(f"~ {terminal.one_line(message.text)}")
        case kinds.ShellMessage():
            yield terminal.cut(f"$ {terminal.one_line(message.command)}")
            yield from terminal.plain(message.output).splitlines()
        case kinds.AgentSwitched():
            yield f"~ from here on agent {terminal.one_line(message.agent)}"
        case kinds.ModelSwitched():
            yield f"~ from here on model {terminal.one_line(str(message.model))}"
        case kinds.CompactionMessage():
            yield f"~ what came before, in short ({message.reason}):"
            yield from terminal.plain(message.summary).splitlines()
        case _:
            assert_never(message)


def _part_lines(part: kinds.TextPart | kinds.ReasoningPart | kinds.ToolPart) -> Iterator[str]:
    match part:
        case kinds.TextPart():
            yield from terminal.plain(part.text).strip("\n").split("\n")
        case kinds.ReasoningPart():
            yield terminal.cut(f"~ {terminal.one_line(part.text)}")
        case kinds.ToolPart():
            given = part.state.input
            about = terminal.one_line(given) if isinstance(given, str) else telling(given)
            yield terminal.cut(f"● {part.name} {about}".rstrip())
            yield terminal.cut(f"  └ {_outcome(part.state)}")


def _outcome(state: kinds.ToolState) -> str:
    match state:
        case kinds.PendingTool() | kinds.RunningTool():
            return state.status
        case kinds.FailedTool():
            return f"failed: {terminal.one_line(state.error.message)}"
        case kinds.CompletedTool():
            texts = [terminal.one_line(item.text) for item in state.content if isinstance(item, TextItem)]
            return next((text for text in texts if text), "done")


def _settled_line(message: kinds.AssistantMessage) -> str:
    if message.error is not None:
        return f"✗ {terminal.one_line(message.error.message)}"
    if message.time.completed is None:
        return "… not settled yet"
    facts = [message.finish or "", tokens_text(message.tokens) if message.tokens else "", cost_text(message.cost or 0)]
    return "✓ " + ", ".join(fact for fact in facts if fact)


# Events


def event_json(event: StoredEvent) -> dict[str, Any]:
    """Give an event for programs, as `run --json` does."""
    return {"type": event.type, "id": event.id, "seq": event.seq, "data": event.data}


def event_line(event: StoredEvent) -> str:
    """Give an event in one line: its sequence, time, kind, and what tells most about it."""
    kind = event.type.removeprefix("session.next.").rpartition(".")[0]
    time = event.data.get("timestamp")
    clock = datetime.fromtimestamp(time / 1000, UTC).astimezone().strftime("%H:%M:%S") if time else ""
    return terminal.cut(f"{event.seq:>4} {clock} {kind}  {_summary(event.data)}".rstrip())


def _summary(data: dict[str, Any]) -> str:
    found = [data[name] for name in _TELLING if isinstance(data.get(name), str)]
    for outer, inner in (("prompt", "text"), ("error", "message")):
        nested = data.get(outer)
        if isinstance(nested, dict) and isinstance(nested.get(inner), str):
            found.append(nested[inner])
    given = data.get("input")
    if isinstance(given, dict):
        found.append(telling(given))
    return " ".join(terminal.one_line(text)[:_SUMMARY] for text in found)
