"""A stand-in for a worker: runs one bash call in the given directory under a reaper of the given silence."""

from __future__ import annotations

import asyncio
import sys

from fencepost.tools.processes import Reaper, ShellRunner


async def main(directory: str, command: str, silence: float) -> None:
    reaper = Reaper(silence=silence, beat=0.1)
    runner = ShellRunner(reaper)
    await runner.start()
    sys.stdout.write(f"{reaper.pid}\n")
    sys.stdout.flush()
    await runner.run(["/bin/sh", "-c", command], directory=directory, timeout=300, effect_key="k")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
