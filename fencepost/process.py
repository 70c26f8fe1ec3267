"""How a process of fencepost ends: with its own exit code, and one line about what was wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import NoReturn

from fencepost.domain.errors import FencepostError


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
    """Run the work; leave with 0, or with 1 and one line on standard error when it failed for a known reason."""
    code = 0
    try:
        asyncio.run(work)
    except FencepostError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        code = 1
    leave(code)
