"""Showing a session as it happens: for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from fencepost.cli import terminal
from fencepost.domain import events
from fencepost.domain.contracts import TurnResult
from fencepost.domain.errors import InvalidDurableEventError
from fencepost.domain.messages import Tokens
from fencepost.domain.tools import TextItem
from fencepost.store.event_log import StoredEvent
from fencepost.store.readers import Delta

_TELLING: Final = ("path", "filePath", "command", "pattern", "query", "url")
_LINE_CHARACTERS: Final = 200
"""The longest line where there is no terminal with a width of its own."""


def tokens_text(tokens: Tokens) -> str:
    """Give token counts in words."""
    cached = f" (+{tokens.cache.read} cached)" if tokens.cache.read else ""
    reasoning = f" (+{tokens.reasoning} reasoning)" if tokens.reasoning else ""
    return f"{tokens.input} tokens in{cached}, {tokens.output} out{reasoning}"


def cost_text(cost: float) -> str:
    """Give a cost in US dollars, empty when there is none."""
    return f"${cost:.4f}" if cost else ""


class JsonLines:
    """One JSON object a line: durable events as stored, pieces of text as `delta`, and at last the `result`."""

    def show(self, item: StoredEvent | Delta) -> None:
        """Write one event."""
        if isinstance(item, Delta):
            self._write(
                {
                    "type": "delta",
                    "messageID": item.message_id,
                    "kind": item.kind,
                    "partID": item.part_id,
                    "attempt": item.attempt,
                    "text": item.text,
                }
            )
        else:
            self._write({"type": item.type, "id": item.id, "seq": item.seq, "data": item.data})

    def finish(self, result: TurnResult) -> None:
        """Write the result."""
        self._write({"type": "result", **result.to_wire()})

    @staticmethod
    def _write(value: Mapping[str, Any]) -> None:
        terminal.out(json.dumps(value, ensure_ascii=False))


class _PipeConsole(Console):
    """Lets a closed pipe be known: rich would leave the process at once, with 1, and the turn running."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError."""
        raise BrokenPipeError


class Screen:
    """Text as it comes, a line for each tool call and its outcome, a line for each settled step.

    Plain, and with nothing that only looks good, where standard output is no terminal.
    """

    def __init__(self, *, echo_prompts: bool = False) -> None:
        self._console = _PipeConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._live = self._console.is_terminal
        self._echo_prompts = echo_prompts
        self._part: tuple[str, str] | None = None
        self._begun = False
        self._middle = False
        self._steps = 0
        self._started = 0

    def show(self, item: StoredEvent | Delta) -> None:
        """Show one event."""
        if isinstance(item, Delta):
            if item.kind == "text" or (item.kind == "reasoning" and self._live):
                self._flow(item)
            return
        try:
            self._durable(item.decode())
        except InvalidDurableEventError:
            return  # of a newer fencepost; it is in the log, and a newer one will show it

    def finish(self, result: TurnResult) -> None:
        """Show what the whole run came to, when that says more than its last step did."""
        self._end_line()
        if result.steps > 1:
            parts = [f"{result.outcome}: {result.steps} steps", tokens_text(result.tokens), cost_text(result.cost)]
            self._line(", ".join(part for part in parts if part), "dim")

    def _durable(self, event: events.DurableEvent) -> None:
        match event:
            case events.Prompted() if self._echo_prompts:
                self._line(f"> {terminal.one_line(event.prompt.text)}", "bold")
            case events.Synthetic():
                self._line(f"~ {terminal.one_line(event.text)}", "dim")
            case events.StepStarted():
                self._steps, self._started = self._steps + 1, event.timestamp
            case events.TextEnded() | events.ReasoningEnded():
                self._end_line()
            case events.ToolCalled():
                self._line(f"● {event.tool} {telling(event.input)}".rstrip(), "cyan", cut=True)
            case events.ToolSuccess():
                self._line(f"  └ {_outcome(event)}", "dim", cut=True)
            case events.ToolFailed():
                self._line(f"  └ failed: {terminal.one_line(event.error.message)}", "red")
            case events.Retried():
                self._line(f"~ attempt {event.attempt} failed: {terminal.one_line(event.error.message)}", "yellow")
            case events.StepEnded() | events.StepFailed() | events.StepInterrupted():
                self._settled(event)
            case _:
                pass

    def _settled(self, event: events.StepEnded | events.StepFailed | events.StepInterrupted) -> None:
        seconds = f"{(event.timestamp - self._started) / 1000:.1f} s" if self._started else ""
        step = f"step {self._steps}"
        match event:
            case events.StepEnded():
                facts = [f"{step} settled", event.finish, tokens_text(event.tokens), cost_text(event.cost), seconds]
                self._line("✓ " + ", ".join(fact for fact in facts if fact), "green")
            case events.StepFailed():
                self._line(f"✗ {step} failed{f', {seconds}' if seconds else ''}", "red")
            case events.StepInterrupted():
                self._line(f"✗ interrupted ({event.reason})", "yellow")
        self._started = 0

    def _flow(self, delta: Delta) -> None:
        part = (delta.message_id, delta.part_id)
        if part != self._part:
            self._end_line()
            self._part, self._begun = part, False
        text = terminal.plain(delta.text)
        if not self._begun:
            text = text.lstrip("\n")
        if not text:
            return
        self._begun = True
        style = "dim italic" if delta.kind == "reasoning" else ""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        sys.stdout.flush()
        self._middle = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._middle:
            self._console.print()
        self._middle, self._part = False, None

    def _line(self, text: str, style: str, *, cut: bool = False) -> None:
        self._end_line()
        line = Text(text, style=style)
        if cut:
            line.truncate(self._console.width if self._live else _LINE_CHARACTERS, overflow="ellipsis")
        self._console.print(line, soft_wrap=True)


def telling(given: Mapping[str, Any]) -> str:
    """Give what tells most about a tool's input: its file, command or pattern, else its first text."""
    named = [given[name] for name in _TELLING if isinstance(given.get(name), str)]
    texts = named or [value for value in given.values() if isinstance(value, str)]
    return terminal.one_line(texts[0]) if texts else ""


def _outcome(event: events.ToolSuccess) -> str:
    text = "\n".join(item.text for item in event.content if isinstance(item, TextItem))
    media = sum(not isinstance(item, TextItem) for item in event.content)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return f"{media} file(s)" if media else "done"
    more = f" (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
    return f"{terminal.one_line(lines[0])}{more}"
