"""A session from a program: create, follow, prompt, read. Beside `fencepost dev`, with what it prints exported:

python examples/client.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from fencepost.client import Client, open_client
from fencepost.config import Settings, load_settings
from fencepost.domain.inbox import Location
from fencepost.store.readers import Delta
from fencepost.store.sessions import NewSession


async def show(client: Client, session_id: str) -> None:
    """Print the answer as it streams, until its step has ended. A web server would send each piece on instead."""
    async with aclosing(client.events(session_id)) as events:
        async for event in events:
            if isinstance(event, Delta):
                if event.kind == "text":
                    print(event.text, end="", flush=True)
            elif event.type.startswith(("session.next.step.ended", "session.next.step.failed")):
                print()
                return


async def main(settings: Settings, directory: str, environ: Mapping[str, str]) -> None:
    """Ask one question in a new session, and say how it went. One client is enough for a whole process."""
    async with open_client(settings, environ) as client:
        session = await client.create(NewSession(Location(directory=directory), title="An example"))
        showing = asyncio.create_task(show(client, session.id))
        receipt = await client.prompt(session.id, "How many files are here? Answer in one sentence.")
        result = await client.result(session.id)
        await showing

        messages = await client.message_page(session.id, limit=10)
        print(f"{session.id}: {result.outcome}, {result.tokens.output} tokens, {len(messages.items)} messages")
        print(f"the prompt {receipt.id} is event {receipt.admitted_seq} of {await client.head(session.id) + 1}")


if __name__ == "__main__":
    asyncio.run(main(load_settings(), str(Path.cwd()), os.environ))
