"""Logging: structlog for our own lines, the standard library's for everybody else's, one format and one place for both.

Lines go to standard error, so that standard output stays the program's own. What people and models wrote to each
other is never logged, nor are keys: fields with such names are replaced before a line is written, and an unknown error
is written with its traceback, but without values that it quotes.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal, TextIO, TypeAlias

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from fencepost.domain.errors import FencepostError

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "console", "json"]

WITHHELD = frozenset(
    {
        "api_key",
        "arguments",
        "authorization",
        "content",
        "headers",
        "input",
        "key",
        "messages",
        "output",
        "password",
        "prompt",
        "secret",
        "system",
        "text",
        "token",
    }
)
"""Names of fields whose values never reach the log. Sizes and ids of the same things are logged under other names."""

_WARNINGS_ONLY = ("alembic", "asyncio", "httpcore2", "sqlalchemy.engine", "temporalio")
"""Loggers of libraries whose finer lines show payloads, or say again what a line of ours says."""
_FOR_DEBUGGING = ("httpx2",)
"""Loggers of libraries that say at level info what is of interest at level debug."""

_concerned: ContextVar[Mapping[str, object]] = ContextVar("fencepost_concerned", default={})  # noqa: B039 - never changed


def concern(**fields: object) -> None:
    """Put these fields into every line that this task, and each that it starts from now on, writes: whoever's it is."""
    _concerned.set({**_concerned.get(), **fields})


def add_concerned(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add what the task that writes the line is concerned with, and leave out what is not known (a processor)."""
    event = {name: value for name, value in event.items() if value is not None}
    for name, value in _concerned.get().items():
        event.setdefault(name, value)
    return event


_recent: dict[tuple[object, ...], object] = {}
_RECENT_AT_MOST = 2000


def remember(*key: object, value: object) -> None:
    """Keep a value for a later line of this process; the oldest ones are forgotten, as is all when it ends."""
    if len(_recent) >= _RECENT_AT_MOST:
        del _recent[next(iter(_recent))]
    _recent[key] = value


def recall(*key: object) -> object:
    """Take a value that was remembered, None when there is none."""
    return _recent.pop(key, None)


def since(began: object, now: float) -> float | None:
    """Give the seconds since a remembered time, to the millisecond, None when there is none."""
    return round(now - began, 3) if isinstance(began, float) else None


def mark_told(error: BaseException) -> None:
    """Leave an error out of the log when it is handed on: a line of ours has said it."""
    error.__dict__["fencepost_told"] = True


class _Untold(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out what others say of an error that was marked as told."""
        error = record.exc_info[1] if record.exc_info else None
        return "fencepost_told" not in getattr(error, "__dict__", ())


def withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the values of fields that may hold text of a conversation or a key (a structlog processor)."""
    for name in event.keys() & WITHHELD:
        event[name] = "[withheld]"
    return event


def shorten_expected(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Give an error of ours that somebody else logs as its message, without a traceback (a structlog processor)."""
    raised = event.get("exc_info")
    error = raised[1] if isinstance(raised, tuple) else raised
    cause = error.__cause__ if isinstance(error, Exception) else None
    expected = next((one for one in (error, cause) if isinstance(one, FencepostError)), None)
    if expected is not None:
        del event["exc_info"]
        event["error"] = expected.message
    return event


def _words(error: BaseException) -> str:
    """Give an error's own words without the values that SQLAlchemy, PostgreSQL and pydantic quote in theirs."""
    if hasattr(error, "hide_parameters"):
        error.hide_parameters = True
    if callable(details := getattr(error, "errors", None)) and hasattr(error, "error_count"):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['type']}" for one in details(include_input=False))
    return str(error).partition("\nDETAIL:")[0]


def _chain(error: BaseException) -> list[BaseException]:
    """Give the errors that led to this one, oldest first, and it; one that is its own cause comes once."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and all(one is not other for other in chain):
        chain.insert(0, one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return chain


def traceback_of(error: BaseException) -> str:
    """Give the traceback of an error and of those that it came from, oldest first, with code and without values."""
    parts = []
    for one in _chain(error):
        parts.append("".join(traceback.format_tb(one.__traceback__)) + f"{type(one).__qualname__}: {_words(one)}")
        if isinstance(one, BaseExceptionGroup):
            parts += map(traceback_of, one.exceptions)
    return "\n\n".join(parts)


def show_traceback(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Give an error that nobody expected with its traceback (a structlog processor)."""
    raised = event.pop("exc_info", None)
    if raised is True:
        raised = sys.exc_info()
    error = raised[1] if isinstance(raised, tuple) else raised
    if isinstance(error, BaseException):
        event["exception"] = traceback_of(error)
    return event


def configure_logging(level: LogLevel = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Set up logging for this process, again if it is called again. `auto` is `console` on a terminal, else `json`.

    `stream` is where lines go, standard error when it is None.
    """
    out = sys.stderr if stream is None else stream
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    processors: list[Processor] = [
        add_concerned,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(allow=()),
        withhold,
        shorten_expected,
        show_traceback,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.dev.ConsoleRenderer(colors=out.isatty()) if console else structlog.processors.JSONRenderer(),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=processors))
    handler.addFilter(_Untold())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = _WARNINGS_ONLY if root.level <= logging.DEBUG else (*_WARNINGS_ONLY, *_FOR_DEBUGGING)
    for name in (*_WARNINGS_ONLY, *_FOR_DEBUGGING):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level) if name in quiet else root.level)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Give the logger of a module. Its lines carry an event name and fields: `log.info("turn.started", session=id)`."""
    # The rest is done by the handler, for everybody's lines alike: what a line costs that is not written is one look at
    # the level, a logger made at import time follows a later `configure_logging`, and a program that has logging of its
    # own finds our lines there.
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger
