"""The floor of streaming: plain httpx2 and JSON decoding, in a process of its own.

Reads request bodies from standard input, one a line, and says for each how much CPU and how many chunks its stream
took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx2
from pydantic_core import from_json

from bench.children import report


async def read(client: httpx2.AsyncClient, url: str, body: dict[str, object]) -> int:
    """Read one stream and decode its chunks. Gives their number."""
    chunks, rest = 0, b""
    async with client.stream("POST", url, json=body, headers={"Accept-Encoding": "identity"}) as response:
        response.raise_for_status()
        async for data in response.aiter_raw():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    from_json(line[6:])
                    chunks += 1
    return chunks


async def main(base_url: str) -> None:
    """Read a stream for each line of standard input."""
    async with httpx2.AsyncClient(timeout=60) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            body = json.loads(line)
            before = time.process_time()
            chunks = await read(client, f"{base_url}/chat/completions", body)
            report({"cpu": time.process_time() - before, "chunks": chunks})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
