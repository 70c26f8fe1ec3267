"""Logging: structlog for our own lines, the standard library's for everybody else's, one format and one place for both.

Lines go to standard error, so that standard output stays the program's own. What people and models wrote to each
other is never logged, nor are keys: fields with such names are replaced before a line is written.
"""

from __future__ import annotations

import logging
import sys
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

_CHATTY = {"sqlalchemy.engine": "warning", "alembic": "warning", "asyncio": "warning", "httpcore2": "warning"}


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


def configure_logging(level: LogLevel = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Set up logging for this process, again if it is called again. `auto` is `console` on a terminal, else `json`.

    `stream` is where lines go, standard error when it is None.
    """
    out = sys.stderr if stream is None else stream
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(allow=()),
        withhold,
        shorten_expected,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    last: list[Processor]
    if console:
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # loggers made at import time must follow a later call
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _CHATTY.items():
        quietest = max(logging.getLevelNamesMapping()[least.upper()], root.level)
        logging.getLogger(name).setLevel(quietest)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Give the logger of a module. Its lines carry an event name and fields: `log.info("turn.started", session=id)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
