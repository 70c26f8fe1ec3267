"""The scripted provider as a process of its own, for commands that need a model and have no key."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from fencepost.domain.errors import UnavailableError

_START_SECONDS = 30
_DELAY_MS = 25


@asynccontextmanager
async def scripted_provider(environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Run it for the time of the block and give its base URL. It also ends when this process does, however it does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "fencepost.providers.scripted"),
        *("--port", "0", "--delay-ms", str(_DELAY_MS), "--until-stdin-ends"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,  # Ctrl-C is for the command: the turn that it interrupts still needs its provider
    )
    try:
        yield await _address(process)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.shield(process.wait())


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)).decode()
    except TimeoutError:
        line = ""
    if "http" not in line:
        raise UnavailableError("the scripted provider did not start")
    return line.split()[-1]
