"""The log: its two formats, what never reaches it, and the clock."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from fencepost.clock import Clock, FixedClock
from fencepost.domain.errors import NotFoundError
from fencepost.telemetry import configure_logging, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A place for log lines. Logging is put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = handlers, level


def test_lines_are_json_where_there_is_no_terminal(stream: io.StringIO) -> None:
    """A program reads the log of a service."""
    configure_logging(stream=stream)
    get_logger("fencepost.test").info("turn.started", session="ses_1")

    line = json.loads(stream.getvalue())

    assert {key: line[key] for key in ("event", "level", "logger", "session")} == {
        "event": "turn.started",
        "level": "info",
        "logger": "fencepost.test",
        "session": "ses_1",
    }


def test_other_libraries_lines_come_out_alike(stream: io.StringIO) -> None:
    """Temporal and SQLAlchemy log through the standard library, into the same stream and format."""
    configure_logging(stream=stream)
    logging.getLogger("temporalio.worker").warning("poll failed: %s", "reason")

    assert json.loads(stream.getvalue())["event"] == "poll failed: reason"


def test_text_and_keys_are_withheld(stream: io.StringIO) -> None:
    """Nothing that a person, a model or a tool said reaches the log, and no key."""
    configure_logging(stream=stream)
    get_logger("fencepost.test").info("request", prompt="private", api_key="private", text="private", size=7)

    assert "private" not in stream.getvalue()
    assert json.loads(stream.getvalue())["size"] == 7


def test_an_expected_error_is_its_message(stream: io.StringIO) -> None:
    """Temporal logs what an activity raises with a traceback; one of our own errors says what to do by itself."""
    configure_logging(stream=stream)
    for error in (NotFoundError("no session ses_1"), KeyError("unforeseen")):
        try:
            raise RuntimeError("wrapped") from error
        except RuntimeError:
            logging.getLogger("temporalio.activity").warning("failed", exc_info=True)
    expected, unforeseen = map(json.loads, stream.getvalue().splitlines())

    assert expected["error"] == "no session ses_1"
    assert "exception" not in expected
    assert unforeseen["exception"]


def test_the_level_holds(stream: io.StringIO) -> None:
    """Lines below the level are not written, and a later call changes it."""
    configure_logging("warning", "console", stream)
    log = get_logger("fencepost.test")
    log.info("quiet")
    configure_logging("debug", "console", stream)
    log.debug("loud")

    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_a_fixed_clock_moves_only_when_told() -> None:
    """Both times stand still, and move together."""
    clock = FixedClock(1_000)
    before = (clock.now_ms(), clock.monotonic())
    clock.advance(250)

    assert before == (1_000, 1.0)
    assert (clock.now_ms(), clock.monotonic()) == (1_250, 1.25)
    assert Clock().now_ms() > 1_700_000_000_000
