"""How a command runs and ends: signals, exit codes, and one line for whatever goes wrong."""

from __future__ import annotations

import asyncio
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from fencepost.cli import terminal
from fencepost.domain.errors import FencepostError, NotFoundError
from fencepost.process import BAD_INPUT, FAILED, UNREACHABLE, code_of, leave

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "UNREACHABLE",
    "Signals",
    "Work",
    "code_of",
    "enter",
    "quiet_libraries",
]

OK: Final = 0
INTERRUPTED: Final = 130

_FOR_PROGRAMS: Final = ": create it first"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """What Ctrl-C does. Usually it cancels the command, which closes everything; a second one leaves at once.

    While `softened`, the first one is given to the command instead. A command that has still to send what it was given
    sets `unsent` until it does, so that whoever interrupts it is told. `unread` is the exit code when the reader of the
    output leaves: of a list nothing is lost then.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._soft: Callable[[], None] | None = None
        self.received: signal.Signals | None = None
        self.unsent = False
        self.unread = OK
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)

    @contextmanager
    def softened(self, act: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `act`, for the time of the block."""
        self._soft = act
        try:
            yield
        finally:
            self._soft = None

    def _take(self, number: signal.Signals) -> None:
        soft, self._soft = self._soft, None
        if number == signal.SIGINT and soft is not None:
            soft()
        elif self.received is not None:
            leave(128 + number)
        else:
            self.received = number
            if self.unsent:
                terminal.Notices()("fencepost: interrupted before anything was sent; stopping what was started ...")
            assert self._task is not None
            self._task.cancel()


Work = Callable[[Signals], Coroutine[Any, Any, int]]


async def _supervised(work: Work) -> int:
    signals = Signals()
    try:
        return await work(signals)
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        return 128 + signals.received
    except BrokenPipeError:
        terminal.silence_output()
        return signals.unread


def enter(work: Work, *, debug: bool) -> NoReturn:
    """Run the work and leave with the exit code that it gives, or with the one for its error.

    A traceback is shown only with `debug`.
    """
    notice = terminal.Notices()
    try:
        code = asyncio.run(_supervised(work))
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.silence_output()
        code = OK
    except FencepostError as error:
        _trace(debug)
        notice(f"fencepost: {_advice(error)}")
        code = code_of(error)
    except Exception as error:
        _trace(debug)
        hint = "" if debug else " (--debug shows where)"
        notice(f"fencepost: unexpected {type(error).__name__}: {error}{hint}")
        code = FAILED
    leave(code)


def _advice(error: FencepostError) -> str:
    """Give the error's line. What a program is advised to do about an unknown session is not what a person needs."""
    if not isinstance(error, NotFoundError):
        return error.message
    return f"{error.message.partition(_FOR_PROGRAMS)[0]}; `fencepost session list` shows those that are there"


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()


def quiet_libraries(*, debug: bool) -> None:
    """Keep what libraries log off the terminal, except with `debug`; Temporal's native part has a logger of its own."""
    from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter  # noqa: PLC0415

    from fencepost.telemetry import configure_logging  # noqa: PLC0415 - most commands end before these are needed

    configure_logging("debug" if debug else "error", "console")
    level = "WARN" if debug else "ERROR"
    logging = LoggingConfig(TelemetryFilter(core_level=level, other_level="ERROR"))
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=logging)), error_if_already_set=False)
