"""From the chunks of an OpenAI Chat answer to the stream vocabulary.

Compatible endpoints disagree about how a tool call is cut into fragments (no index, one index for all, empty or missing
ids, names sent again, arguments as an object). What holds for all of them is written at `_call_of`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json

from fencepost.domain.errors import ProviderError
from fencepost.domain.stream import (
    FinishReason,
    ReasoningDelta,
    ReasoningEnd,
    ReasoningStart,
    StreamEvent,
    TextDelta,
    TextEnd,
    TextStart,
    ToolCall,
    ToolInputDelta,
    ToolInputEnd,
    ToolInputStart,
    Usage,
)

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")
"""Where endpoints put reasoning: some want it back in the very field it came in."""

_FINISH: Mapping[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
    "content_filter": "content-filter",
    "error": "error",
}


class _Call:
    """One tool call while its fragments arrive; `id` is ours for good once the call has been announced."""

    __slots__ = ("done", "given_id", "id", "index", "name", "pieces")

    def __init__(self, index: int | None, given_id: str | None, call_id: str) -> None:
        self.index = index
        self.given_id = given_id
        self.id = call_id
        self.name = ""
        self.pieces: list[str] = []  # a text that grows by each fragment would be copied each time
        self.done = False

    @property
    def arguments(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def whole(self) -> dict[str, Any] | None:
        """Give the arguments if their text is one complete JSON object."""
        try:
            value = from_json(self.arguments, allow_inf_nan=False)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class ChatDecoder:
    """Takes the chunks of one answer in order. `reason` is None until the provider has said how the answer ended."""

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.raw_reason: str | None = None
        self.usage: Usage | None = None  # the last that was reported: counts are totals so far, never increments
        self.usage_is_final = False
        self._block = ""  # id of the open text or reasoning block
        self._is_text = False
        self._blocks = {"text": 0, "reasoning": 0}
        self._reasoning_field = ""
        self._calls: list[_Call] = []
        self._settled = 0  # calls before this one have been completed, in order

    def feed(self, chunk: Mapping[str, Any]) -> list[StreamEvent]:
        """Give the events of one chunk. Raises ProviderError when a tool call cannot be understood."""
        usage = chunk.get("usage")
        if usage:
            self.usage = read_usage(usage)
            self.usage_is_final = self.reason is not None
        choices = chunk.get("choices")
        if not choices:
            return []
        choice = choices[0]
        events: list[StreamEvent] = []
        delta = choice.get("delta")
        if delta:
            self._delta(delta, events)
        reason = choice.get("finish_reason")
        if reason and self.reason is None:
            self.raw_reason = str(reason)
            self.finish(events, _FINISH.get(self.raw_reason, "unknown"))
            self.usage_is_final = bool(usage)
        return events

    def finish(self, events: list[StreamEvent], reason: FinishReason) -> None:
        """End every open block and call, and settle on the reason: what was streamed counts more than its label."""
        self._end_block(events)
        cut = reason in ("length", "content-filter", "error")
        for call in self._calls[self._settled :]:
            self._complete(call, events, cut)
        self._settled = len(self._calls)
        if self._calls and not cut:
            reason = "tool-calls"
        elif reason == "tool-calls" and not self._calls:
            reason = "unknown"
        self.reason = reason

    def _delta(self, delta: Mapping[str, Any], events: list[StreamEvent]) -> None:
        text = delta.get("content")
        if text:
            if type(text) is not str:
                text = _text_of_parts(text)
            if text:
                self._text(text, events)
            if len(delta) == 1:
                return
        for field in REASONING_FIELDS:
            reasoning = delta.get(field)
            if reasoning and isinstance(reasoning, str):
                self._reasoning(field, reasoning, events)
                break
        refusal = delta.get("refusal")
        if refusal and isinstance(refusal, str):
            self._text(refusal, events)
        calls = delta.get("tool_calls")
        if calls:
            for fragment in calls if isinstance(calls, list) else [calls]:
                self._fragment(fragment, events)

    def _text(self, text: str, events: list[StreamEvent]) -> None:
        if not (self._block and self._is_text):
            self._open_block("text", events)
            events.append(TextStart(self._block))
        events.append(TextDelta(self._block, text))

    def _reasoning(self, field: str, text: str, events: list[StreamEvent]) -> None:
        if not self._block or self._is_text or field != self._reasoning_field:
            self._open_block("reasoning", events)
            self._reasoning_field = field
            events.append(ReasoningStart(self._block, {"openai": {"reasoning_field": field}}))
        events.append(ReasoningDelta(self._block, text))

    def _open_block(self, kind: Literal["text", "reasoning"], events: list[StreamEvent]) -> None:
        self._end_block(events)
        self._settle(events)
        self._is_text = kind == "text"
        self._block = f"{kind}-{self._blocks[kind]}"
        self._blocks[kind] += 1

    def _end_block(self, events: list[StreamEvent]) -> None:
        if not self._block:
            return
        if self._is_text:
            events.append(TextEnd(self._block))
        else:
            events.append(ReasoningEnd(self._block, {"openai": {"reasoning_field": self._reasoning_field}}))
        self._block = ""

    def _fragment(self, fragment: Mapping[str, Any], events: list[StreamEvent]) -> None:
        function = fragment.get("function") or {}
        name = function.get("name") or ""
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = self._call_of(fragment, name, arguments, events)
        if call.done:
            if arguments.strip() and arguments.strip() != call.arguments.strip():
                raise _unreadable(f"sent more arguments for the tool call {call.id} after they were complete")
            return
        if name and not call.name:
            call.name = name
            events.append(ToolInputStart(call.id, name))
            arguments = call.arguments + arguments
            call.pieces.clear()
        if arguments:
            call.pieces.append(arguments)
        if arguments and call.name:
            events.append(ToolInputDelta(call.id, call.name, arguments))

    def _call_of(self, fragment: Mapping[str, Any], name: str, arguments: str, events: list[StreamEvent]) -> _Call:
        """Find the call that a fragment belongs to, or open one.

        A new id opens a call, at whatever index. Without an id an unused index does, and so does a name once the
        arguments before it are complete. All else goes on with the call of that index, or with the one opened last.
        """
        index = fragment.get("index")
        given_id = str(fragment.get("id") or "") or None
        call: _Call | None = None
        if isinstance(index, int):
            call = next((c for c in reversed(self._calls) if c.index == index), None)
            if call is None and (given_id or name):
                return self._open(index, given_id, events)
        elif given_id:
            call = next((c for c in reversed(self._calls) if c.given_id == given_id), None)
            if call is None:
                return self._open(None, given_id, events)
        if call is None:
            call = self._calls[-1] if self._calls else None
        if call is None:
            return self._open(index if isinstance(index, int) else None, given_id, events)
        if given_id and given_id != call.given_id:
            if call.given_id or call.whole() is not None:
                return self._open(call.index, given_id, events)
            call.given_id = given_id
        names_another = name and not given_id and call.name and (name != call.name or arguments.strip())
        if names_another and call.whole() is not None:
            return self._open(call.index, None, events)
        return call

    def _open(self, index: int | None, given_id: str | None, events: list[StreamEvent]) -> _Call:
        self._end_block(events)
        self._settle(events)
        taken = given_id is None or any(call.id == given_id for call in self._calls)
        call_id = f"call_{uuid.uuid4().hex}" if taken or given_id is None else given_id
        call = _Call(index, given_id, call_id)
        self._calls.append(call)
        return call

    def _settle(self, events: list[StreamEvent]) -> None:
        """Complete, in order, the calls whose arguments are whole: their tools may start while the answer goes on.

        Empty arguments wait for the end: an endpoint may announce all its calls first and send their arguments later.
        """
        while self._settled < len(self._calls) and self._calls[self._settled].whole() is not None:
            self._complete(self._calls[self._settled], events, cut=False)
            self._settled += 1

    def _complete(self, call: _Call, events: list[StreamEvent], cut: bool) -> None:
        if not call.name:
            raise _unreadable("sent a tool call without a name")
        call.done = True
        events.append(ToolInputEnd(call.id, call.name))
        value = {} if not call.arguments.strip() and not cut else call.whole()
        if value is not None:
            events.append(ToolCall(call.id, call.name, value))
            return
        # Never repaired: a smaller object made out of cut arguments would be another call than the model's.
        why = "the answer was cut off" if cut else "they are not one JSON object"
        error = f"The arguments of this call are not usable: {why}"
        events.append(ToolCall(call.id, call.name, call.arguments, input_error=error))


def _text_of_parts(parts: Any) -> str:
    if not isinstance(parts, list):
        return ""
    texts = (part for part in parts if isinstance(part, dict) and part.get("type") == "text")
    return "".join(str(part.get("text") or "") for part in texts)


def _unreadable(what: str) -> ProviderError:
    return ProviderError(f"The provider {what}", reason="InvalidProviderOutput", transient=False)


def read_usage(usage: Mapping[str, Any]) -> Usage:
    """Read the token counts of a chunk; whatever is no whole number counts as not reported."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    output_details = usage.get("completion_tokens_details") or {}
    prompt = _count(usage.get("prompt_tokens"))
    cached = _count(prompt_details.get("cached_tokens"))
    if cached is None:
        cached = _count(usage.get("prompt_cache_hit_tokens"))
    written = _count(prompt_details.get("cache_write_tokens"))
    return Usage(
        input_tokens=prompt,
        output_tokens=_count(usage.get("completion_tokens")),
        non_cached_input_tokens=None if prompt is None else max(0, prompt - (cached or 0) - (written or 0)),
        cache_read_input_tokens=cached,
        cache_write_input_tokens=written,
        reasoning_tokens=_count(output_details.get("reasoning_tokens")),
        total_tokens=_count(usage.get("total_tokens")),
    )


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)
