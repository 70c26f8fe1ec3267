"""What the scripted provider does: the actions of an answer, and the small language that prompts are written in.

A prompt whose every line is a directive steers the answers from another process, without code:

    say: text            stream this text (JSON string notation, in double quotes, allows line breaks)
    think: text          stream this as reasoning
    words: 200           stream that many words, one chunk each
    chunks: 20           cut each following `say` and `think` into so many chunks (else: one per word)
    delay_ms: 30         wait so long before each following chunk
    tool: NAME {json}    call a tool
    raw: text            send this as the data of one event
    usage: 100 20        report so many input and output tokens (else: a quarter of the characters)
    finish: length       end the answer with this finish reason
    fail: 429 2 {json}   answer the first 2 requests for this answer with the status (without a number: all of them),
                         with the headers of the JSON object
    error: message       report an error inside the stream
    cut | eof | hang     break the connection; end the body without a finish; send nothing more
    then:                begin the answer to the next request, after the results of the tools

The answer that is played is the one whose number is the count of assistant messages after the prompt. When all have
been played, and for every other prompt, the provider behaves like a plain small model: see `fencepost.providers.demo`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


class Gate:
    """Holds an answer where a test wants it: the answer waits at a `Pause` until it is released."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Wait until an answer stands at the gate."""
        await self._reached.wait()

    def release(self) -> None:
        """Let every answer through, now and later."""
        self._released.set()

    async def wait(self) -> None:
        """Stand at the gate; called by the provider."""
        self._reached.set()
        await self._released.wait()


@dataclass(frozen=True, slots=True)
class Say:
    """Stream text, in `chunks` pieces (None: one per word), waiting `delay` seconds before each."""

    text: str
    chunks: int | None = None
    delay: float = 0


@dataclass(frozen=True, slots=True)
class Think:
    """Stream reasoning in the delta's field `field`."""

    text: str
    chunks: int | None = None
    delay: float = 0
    field: str = "reasoning_content"


@dataclass(frozen=True, slots=True)
class CallTool:
    """Call a tool, its arguments (an object, or text as it is) cut into `split` pieces; None makes an id."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None
    split: int = 1
    delay: float = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """End the answer: None finds the reason by what was streamed; `usage` is (input, output) tokens, None counts."""

    reason: str | None = None
    usage: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for the gate."""

    gate: Gate | asyncio.Event


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer with this status in place of a stream; only as the first action. `times` None means always."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """Report an error inside the stream, then end it as providers do."""

    message: str
    code: Any = None
    type: str | None = "server_error"


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection in the middle of the body."""


@dataclass(frozen=True, slots=True)
class CleanEof:
    """End the body properly, but without a finish reason."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Send nothing more until the client goes away."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Send these body bytes as they are, as one network chunk."""

    data: bytes


Action: TypeAlias = Say | Think | CallTool | Finish | Pause | Fail | ErrorEvent | Cut | CleanEof | Hang | Raw
ENDS = (Finish, ErrorEvent, Cut, CleanEof, Hang)
"""Actions after which nothing of an answer follows; an answer without one gets a `Finish`."""


def pieces(text: str, count: int | None) -> list[str]:
    """Cut text into so many pieces of about one size, or into its words when the count is None."""
    if count is None:
        return re.findall(r"\s*\S+\s*$|\s*\S+", text) or ([text] if text else [])
    size = max(1, -(-len(text) // max(1, count)))
    return [text[start : start + size] for start in range(0, len(text), size)]


_LINE = re.compile(
    r"(say|think|words|chunks|delay_ms|tool|raw|usage|finish|fail|error|then)\s*:\s?(.*)|(cut|eof|hang)$"
)
_BARE: Mapping[str, Action] = {"cut": Cut(), "eof": CleanEof(), "hang": Hang()}


def parse(prompt: str) -> list[list[Action]] | None:
    """Read a prompt as directives: one list of actions per answer, None when it is an ordinary prompt."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    matches = [_LINE.fullmatch(line) for line in lines]
    if not lines or None in matches:
        return None
    script = _Script()
    try:
        for match in matches:
            assert match is not None
            script.take(match[1] or match[3], (match[2] or "").strip())
    except (ValueError, IndexError):
        return None
    return [script.ended(actions) for actions in script.answers]


class _Script:
    """The answers read so far, and the settings that hold for the actions that follow."""

    def __init__(self) -> None:
        self.answers: list[list[Action]] = [[]]
        self._chunks: int | None = None
        self._delay = 0.0
        self._usage: dict[int, tuple[int, int]] = {}

    def take(self, word: str, value: str) -> None:
        answer = self.answers[-1]
        match word:
            case "then":
                self.answers.append([])
            case "chunks":
                self._chunks = int(value)
            case "delay_ms":
                self._delay = float(value) / 1000
            case "usage":
                counts = value.split()
                self._usage[id(answer)] = (int(counts[0]), int(counts[1]))
            case "say":
                answer.append(Say(_text(value), self._chunks, self._delay))
            case "think":
                answer.append(Think(_text(value), self._chunks, self._delay))
            case "words":
                answer.append(Say(words(int(value)), None, self._delay))
            case "tool":
                name, _, arguments = value.partition(" ")
                answer.append(CallTool(name, json.loads(arguments or "{}"), delay=self._delay))
            case "raw":
                answer.append(Raw(f"data: {value}\n\n".encode()))
            case "finish":
                answer.append(Finish(value or None))
            case "fail":
                answer.append(_fail(value))
            case "error":
                answer.append(ErrorEvent(_text(value)))
            case _:
                answer.append(_BARE[word])

    def ended(self, actions: list[Action]) -> list[Action]:
        usage = self._usage.get(id(actions))
        if usage is None:
            return actions
        reason = actions[-1].reason if actions and isinstance(actions[-1], Finish) else None
        kept = [action for action in actions if not isinstance(action, Finish)]
        return [*kept, Finish(reason, usage)]


def _text(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value


def _fail(value: str) -> Fail:
    match = re.fullmatch(r"(\d{3})(?:\s+(\d+))?(?:\s+(\{.*\}))?", value)
    if match is None:
        raise ValueError(value)
    headers = {str(key): str(item) for key, item in json.loads(match[3] or "{}").items()}
    return Fail(int(match[1]), headers=headers, times=int(match[2]) if match[2] else None)


def words(count: int) -> str:
    """Give a text of so many words, always the same."""
    return " ".join(f"word{number}" for number in range(count))


def text_of(message: Mapping[str, Any]) -> str:
    """Give the text of a message in the wire format, whether it is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def directed(messages: Sequence[Mapping[str, Any]]) -> tuple[str, int, list[Action]] | None:
    """Give the last prompt of directives, the number of the answer that is due, and its actions; None without any."""
    played = 0
    for message in reversed(messages):
        if message.get("role") == "assistant":
            played += 1
        elif message.get("role") == "user":
            prompt = text_of(message)
            answers = parse(prompt)
            if answers is not None:
                return (prompt, played, answers[played]) if played < len(answers) else None
    return None
