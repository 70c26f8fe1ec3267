"""Publishing a provider's stream: durable events as they happen, text on the live channel, calls announced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

from activities.appender import StreamAppender
from fencepost.domain import events as e
from fencepost.domain import stream as s
from fencepost.domain.clean import clean_text
from fencepost.domain.contracts import CallRef, StreamInput
from fencepost.domain.errors import ProviderError
from fencepost.domain.messages import MessageError
from fencepost.services import Services
from fencepost.store.live import Notice
from fencepost.store.steps import LivePart

KEEP_SECONDS = 1.0
_SUMMARY_CHARACTERS = 80


def as_object(value: Any) -> dict[str, Any]:
    """Give the value as a JSON object, as the log stores tool inputs: anything else becomes its `value`."""
    return value if isinstance(value, dict) else {"value": value}


def summary_of(name: str, given: Any) -> str:
    """Give one short line for people: the tool and its first argument."""
    first = next((v for v in given.values() if isinstance(v, str | int | float)), "") if isinstance(given, dict) else ""
    line = " ".join(clean_text(f"{name}: {first}" if first != "" else name).split())
    return line if len(line) <= _SUMMARY_CHARACTERS else line[: _SUMMARY_CHARACTERS - 1] + "…"


def out_of_order(what: str) -> ProviderError:
    """Say that a provider's stream broke its own order."""
    return ProviderError(
        f"the provider's stream is out of order ({what}): try again, or report it to the provider",
        reason="InvalidProviderOutput",
        transient=False,
    )


@dataclass(slots=True)
class _Part:
    """A part that streams: its text, and how much of it was sent live and kept."""

    kind: str
    id: str
    pieces: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    sent: int = 0
    dirty: bool = False
    durable: bool = False
    metadata: s.ProviderMetadata | None = None
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class StepPublisher:
    """Takes one attempt's stream events in order. `announce` is called for every local call once it is durable."""

    def __init__(
        self,
        services: Services,
        given: StreamInput,
        *,
        announce: Callable[[CallRef], None],
        trusted: Callable[[], bool],
        proved: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._services = services
        self._given = given
        self._announce = announce
        self._trusted = trusted
        self._appender = StreamAppender(services, given, proved=proved, failed=failed)
        self._parts: dict[tuple[str, str], _Part] = {}
        self._ended: set[tuple[str, str]] = set()
        self._called: dict[str, bool] = {}
        self._settled: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until = 0.0
        self.started = False
        self.local_calls = 0
        self.calls: list[CallRef] = []
        self.finish: s.StepFinish | None = None

    def take(self, event: s.StreamEvent) -> None:
        """Publish what the event means. Raises ProviderError for a broken order, and what the fence raises."""
        match event:
            case s.TextDelta() | s.ReasoningDelta() | s.ToolInputDelta():
                self._delta(event)
            case s.StepStart() | s.Finish() | s.ProviderErrorEvent():
                pass
            case s.TextStart() | s.ReasoningStart() | s.ToolInputStart():
                self._begin(event)
            case s.TextEnd() | s.ReasoningEnd() | s.ToolInputEnd():
                self._end(event)
            case s.ToolCall():
                self._call(event)
            case s.ToolResult() | s.ToolError():
                self._hosted(event)
            case s.StepFinish():
                if self.finish is not None:
                    raise out_of_order("the step finished twice")
                self.finish = event
            case _:
                assert_never(event)

    async def close_parts(self) -> None:
        """End every part that is still open with the text it has: the stream is over, for whatever reason. Then
        all of it is durable. Raises what the fence raises."""
        self._stop_timer()
        open_parts = list(self._parts.values())
        self._parts.clear()
        for part in open_parts:
            self._publish(self._ended_event(part))
        await self.durable()

    async def durable(self) -> None:
        """Wait until everything that was taken is durable. Raises what the fence raises."""
        await self._appender.drain()

    @property
    def error(self) -> Exception | None:
        """What made appending fail, None while it works."""
        return self._appender.error

    async def keep(self) -> None:
        """Keep the text so far of open parts about every second, until cancelled, for readers and for recovery."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            if self._trusted() and any(part.dirty for part in self._parts.values()):
                self._appender.keep(self._dirty_parts)

    def _dirty_parts(self) -> list[LivePart]:
        dirty = [part for part in self._parts.values() if part.dirty and part.durable]
        for part in dirty:
            part.dirty = False
        return [LivePart(self._message_id, part.kind, part.id, self._given.attempt, part.text) for part in dirty]

    @property
    def _message_id(self) -> str:
        return self._given.assistant_message_id

    @property
    def _about(self) -> dict[str, Any]:
        return {"timestamp": 0, "session_id": self._given.token.session_id, "assistant_message_id": self._message_id}

    def _publish(self, event: e.DurableEvent, durable: Callable[[], None] | None = None) -> None:
        """Append the event, after the step's start if nothing has begun it yet."""
        if not self.started:
            self.started = True
            plan = self._given.plan
            self._appender.put(e.StepStarted(**self._about, agent=plan.agent, model=plan.model))
        self._appender.put(event, durable)

    # Parts

    def _begin(self, event: s.TextStart | s.ReasoningStart | s.ToolInputStart) -> None:
        made: e.DurableEvent
        match event:
            case s.TextStart():
                part = _Part("text", event.id)
                made = e.TextStarted(**self._about, text_id=event.id)
            case s.ReasoningStart():
                part = _Part("reasoning", event.id, metadata=event.provider_metadata)
                made = e.ReasoningStarted(
                    **self._about, reasoning_id=event.id, provider_metadata=event.provider_metadata
                )
            case s.ToolInputStart():
                part = _Part("tool", event.id, name=event.name)
                made = e.ToolInputStarted(**self._about, call_id=event.id, name=event.name)
            case _:
                assert_never(event)
        key = (part.kind, part.id)
        if key in self._parts or key in self._ended:
            raise out_of_order(f"{part.kind} {part.id} started twice")
        self._parts[key] = part
        self._publish(made, lambda: self._shown(part))

    def _shown(self, part: _Part) -> None:
        """The part's beginning is durable, so readers know what its text belongs to."""
        part.durable = True
        self._flush_live()

    def _open(self, kind: str, part_id: str, name: str = "") -> _Part:
        part = self._parts.get((kind, part_id))
        if part is None:
            raise out_of_order(f"{kind} {part_id} goes on without a start")
        if name and part.name != name:
            raise out_of_order(f"call {part_id} is {part.name} and {name}")
        return part

    def _delta(self, event: s.TextDelta | s.ReasoningDelta | s.ToolInputDelta) -> None:
        if isinstance(event, s.TextDelta):
            part = self._open("text", event.id)
        elif isinstance(event, s.ReasoningDelta):
            part = self._open("reasoning", event.id)
        else:
            part = self._open("tool", event.id, event.name)
        text = clean_text(event.text)
        if not text:
            return
        part.pieces.append(text)
        part.fresh.append(text)
        part.dirty = True
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._quiet_until:
            self._flush_live()
        else:
            self._timer = loop.call_at(self._quiet_until, self._flush_live)

    def _flush_live(self) -> None:
        """Send what has gathered of each part; a worker that cannot trust its ownership shows nothing more."""
        self._stop_timer()
        self._quiet_until = asyncio.get_running_loop().time() + self._services.settings.limits.live_seconds
        for part in self._parts.values():
            if part.fresh and part.durable:
                text = "".join(part.fresh)
                part.fresh.clear()
                notice = Notice(
                    self._appender.seq, self._message_id, part.kind, part.id, self._given.attempt, part.sent, text
                )
                part.sent += len(text)
                if self._trusted():
                    self._services.announcer.send(self._given.token.session_id, notice)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, event: s.TextEnd | s.ReasoningEnd | s.ToolInputEnd) -> None:
        if isinstance(event, s.ToolInputEnd):
            self._open("tool", event.id, event.name)
            return  # its durable end goes with the call itself, or with the stream's end
        part = self._open("text" if isinstance(event, s.TextEnd) else "reasoning", event.id)
        if event.provider_metadata is not None:
            part.metadata = event.provider_metadata
        self._publish(self._take_out(part))

    def _take_out(self, part: _Part) -> e.DurableEvent:
        """End a part. Its last live text goes out first, so that no reader has to wait for the durable end."""
        self._flush_live()
        key = (part.kind, part.id)
        del self._parts[key]
        self._ended.add(key)
        return self._ended_event(part)

    def _ended_event(self, part: _Part) -> e.DurableEvent:
        if part.kind == "text":
            return e.TextEnded(**self._about, text_id=part.id, text=part.text)
        if part.kind == "reasoning":
            return e.ReasoningEnded(
                **self._about, reasoning_id=part.id, text=part.text, provider_metadata=part.metadata
            )
        return e.ToolInputEnded(**self._about, call_id=part.id, text=part.text)

    # Calls

    def _call(self, event: s.ToolCall) -> None:
        if event.id in self._called:
            raise out_of_order(f"call {event.id} was made twice")
        made: list[e.DurableEvent] = []
        part = self._parts.get(("tool", event.id))
        if part is not None:
            self._open("tool", event.id, event.name)
            made.append(self._take_out(part))
        else:
            made.append(e.ToolInputStarted(**self._about, call_id=event.id, name=event.name))
            made.append(e.ToolInputEnded(**self._about, call_id=event.id, text=""))
            self._ended.add(("tool", event.id))
        provider = e.ToolProviderInfo(executed=event.provider_executed, metadata=event.provider_metadata)
        made.append(
            e.ToolCalled(
                **self._about, call_id=event.id, tool=event.name, input=as_object(event.input), provider=provider
            )
        )
        if event.input_error is not None:
            made.append(self._failed(event.id, f"Invalid tool input: {event.input_error}", executed=False))
        self._called[event.id] = event.provider_executed
        announce = None
        if not event.provider_executed:
            self.local_calls += 1
            if event.input_error is None:
                call = CallRef(id=event.id, summary=summary_of(event.name, event.input))
                self.calls.append(call)
                announce = lambda: self._announce(call)  # noqa: E731
        for one in made[:-1]:
            self._publish(one)
        self._publish(made[-1], announce)

    def _failed(self, call_id: str, message: str, *, executed: bool, result: Any = None) -> e.ToolFailed:
        return e.ToolFailed(
            **self._about,
            call_id=call_id,
            error=MessageError(message=message),
            result=result,
            provider=e.ToolProviderInfo(executed=executed),
        )

    def _hosted(self, event: s.ToolResult | s.ToolError) -> None:
        """The outcome of a call that the provider itself executed; it keeps its result."""
        if self._called.get(event.id) is not True:
            raise out_of_order(f"a result for call {event.id}, which the provider did not make")
        provider = e.ToolProviderInfo(executed=True, metadata=event.provider_metadata)
        if isinstance(event, s.ToolError):
            made: e.DurableEvent = self._failed(event.id, event.message, executed=True)
        elif event.result.get("type") == "error":
            if event.id in self._settled:
                return  # an error, then the same error as a result
            made = self._failed(event.id, str(event.result.get("value")), executed=True, result=event.result)
        else:
            made = e.ToolSuccess(
                **self._about, call_id=event.id, structured={}, content=(), result=event.result, provider=provider
            )
        if event.id in self._settled:
            raise out_of_order(f"call {event.id} has two results")
        self._publish(made)
        self._settled.add(event.id)
