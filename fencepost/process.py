"""How a process of fencepost ends: with its own exit code, and one line about what was wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Final, NoReturn

from fencepost.domain import errors
from fencepost.domain.errors import FencepostError

FAILED: Final = 1
BAD_INPUT: Final = 2
UNREACHABLE: Final = 3

_BAD_INPUT = (
    errors.AgentNotFoundError,
    errors.ConfigurationError,
    errors.DirectoryError,
    errors.InvalidInputError,
    errors.ModelNotSelectedError,
    errors.ModelUnavailableError,
    errors.MessageNotFoundError,
    errors.NotFoundError,
    errors.PromptConflictError,
    errors.SchemaVersionError,
)


def code_of(error: FencepostError) -> int:
    """Give the exit code for an error, of the command as of a worker."""
    if isinstance(error, errors.UnavailableError):
        return UNREACHABLE
    return BAD_INPUT if isinstance(error, _BAD_INPUT) else FAILED


def leave(code: int) -> NoReturn:
    """End the process now, its output flushed.

    Temporal's native runtime can abort an interpreter that is being torn down (PyGILState_Release), and would replace
    the exit code; whatever has to be closed was closed before.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the reader at the other end
            stream.flush()
    os._exit(code)


def run_and_exit(name: str, work: Coroutine[object, object, None]) -> NoReturn:
    """Run the work; leave with 0, or with the error's code and one line when it failed for a known reason."""
    code = 0
    try:
        asyncio.run(work)
    except FencepostError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        code = code_of(error)
    leave(code)
