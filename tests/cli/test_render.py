"""What is shown of a session's events."""

from __future__ import annotations

import io
import json

import pytest

from fencepost.cli.render import JsonLines, Screen
from fencepost.cli.terminal import one_line, plain
from fencepost.domain import events
from fencepost.domain.contracts import TurnResult
from fencepost.domain.messages import CacheTokens, MessageError, Tokens
from fencepost.domain.tools import TextItem
from fencepost.store.event_log import StoredEvent
from fencepost.store.readers import Delta

_LOCAL = events.ToolProviderInfo(executed=False)
_LONG = {"command": "x" * 400}
_STEP = {"session_id": "ses_1", "assistant_message_id": "msg_a"}


def _stored(event: events.DurableEvent) -> StoredEvent:
    return StoredEvent("evt_1", event.session_id, 1, event.stored_type(), event.to_wire())


def _text(text: str, kind: str = "text", part: str = "t") -> Delta:
    return Delta("msg_a", kind, part, 1, text)


def test_text_flows_and_never_rewrites_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A model cannot send escape sequences; parts begin on lines of their own; reasoning is for terminals."""
    screen = Screen()
    for item in (_text("\n\nHello \x1b[2J"), _text("there"), _text("hm", "reasoning", "r"), _text("New", part="u")):
        screen.show(item)
    screen.finish(TurnResult(session_id="ses_1", outcome="done", steps=1))

    assert capsys.readouterr().out == "Hello [2Jthere\nNew\n"


def test_every_event_that_matters_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls, outcomes, settlements, retries; a line that is too long is cut."""
    screen = Screen(echo_prompts=True)
    tokens = Tokens(input=10, output=5, reasoning=2, cache=CacheTokens(read=7))
    for event in (
        events.Synthetic(timestamp=0, session_id="ses_1", message_id="msg_s", text="go\non"),
        events.StepStarted(timestamp=1000, agent="build", model={"id": "m", "provider_id": "p"}, **_STEP),
        events.ToolCalled(
            timestamp=0, call_id="c", tool="bash", input={"command": "x" * 400}, provider=_LOCAL, **_STEP
        ),
        events.ToolSuccess(
            timestamp=0, call_id="c", structured={}, content=(TextItem(text="a\nb\n"),), provider=_LOCAL, **_STEP
        ),
        events.ToolFailed(timestamp=0, call_id="d", error=MessageError(message="no"), provider=_LOCAL, **_STEP),
        events.StepEnded(timestamp=2500, finish="stop", cost=0.25, tokens=tokens, **_STEP),
        events.StepFailed(timestamp=0, error=MessageError(message="no"), **_STEP),
        events.StepInterrupted(timestamp=0, session_id="ses_1", execution_id="exe_1", reason="lost"),
    ):
        screen.show(_stored(event))
    lines = capsys.readouterr().out.splitlines()

    assert [line for line in lines if not line.startswith("● bash xxx")] == [
        "~ go on",
        "  └ a (+1 lines)",
        "  └ failed: no",
        "✓ step 1 settled, stop, 10 tokens in (+7 cached), 5 out (+2 reasoning), $0.2500, 1.5 s",
        "✗ step 1 failed",
        "✗ interrupted (lost)",
    ]
    assert max(len(line) for line in lines) == 200


def test_an_unknown_event_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    """A newer fencepost may have written it."""
    Screen().show(StoredEvent("evt_1", "ses_1", 1, "session.next.of.the.future.1", {}))

    assert capsys.readouterr().out == ""


def test_json_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the text holds."""
    lines = JsonLines()
    lines.show(_text('"\n\u2028'))
    lines.finish(TurnResult(session_id="ses_1", outcome="failed", error="no"))
    objects = [json.loads(line) for line in io.StringIO(capsys.readouterr().out)]

    assert objects[0]["text"] == '"\n\u2028'
    assert objects[1] | {"type": "result", "outcome": "failed", "error": "no"} == objects[1]


def test_control_characters_go() -> None:
    """Line breaks and tabs stay where there may be several lines."""
    assert plain("a\r\nb\tc\x07\x9b") == "a\nb\tc"
    assert one_line(" a\n\tb\x1b ") == "a b"


class _ClosedPipe(io.StringIO):
    """Standard output whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the turn can be interrupted; the process is not left in the middle of it."""
    monkeypatch.setattr("sys.stdout", _ClosedPipe())
    screen = Screen()

    with pytest.raises(BrokenPipeError):
        screen.show(_text("a line\n"))
