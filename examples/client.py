"""A session from a program: create, follow, prompt, read. Beside `fencepost dev`, with what it prints exported:

python examples/client.py                  # with the default model, whose key `dev` has
python examples/client.py scripted/demo    # without a key
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from fencepost.client import Client, open_client
from fencepost.config import Settings, load_settings
from fencepost.domain.inbox import Location
from fencepost.domain.models import ModelRef
from fencepost.store.readers import Delta
from fencepost.store.sessions import NewSession


class Answer:
    """Prints a session's answers as they stream. A web server would send each piece on instead."""

    def __init__(self) -> None:
        self.seen = -1

    async def show(self, client: Client, session_id: str) -> None:
        """Print for ever: a turn may have many steps, and after it comes the next one."""
        async with aclosing(client.events(session_id)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    if event.kind == "text":
                        print(event.text, end="", flush=True)
                    continue
                if event.type.startswith("session.next.tool.called"):
                    print(f"[{event.data['tool']}]")
                elif event.type.startswith("session.next.text.ended"):
                    print()
                self.seen = event.seq


async def main(settings: Settings, directory: str, environ: Mapping[str, str], model: str | None = None) -> None:
    """Ask one question in a new session, and say how it went. One client is enough for a whole process."""
    async with open_client(settings, environ) as client:
        chosen = ModelRef.parse(model) if model else None
        session = await client.create(NewSession(Location(directory=directory), model=chosen, title="An example"))
        answer = Answer()
        showing = asyncio.create_task(answer.show(client, session.id))
        receipt = await client.prompt(session.id, "Read README.md. What is it about? Answer in one sentence.")
        result = await client.result(session.id)
        while answer.seen < await client.head(session.id) and not showing.done():
            await asyncio.wait({showing}, timeout=0.05)
        showing.cancel()

        messages = await client.message_page(session.id, limit=10)
        print(f"{session.id}: {result.outcome}, {result.tokens.output} tokens, {len(messages.items)} messages")
        print(f"the prompt {receipt.id} is event {receipt.admitted_seq} of {await client.head(session.id) + 1}")


if __name__ == "__main__":
    asyncio.run(main(load_settings(), str(Path.cwd()), os.environ, *sys.argv[1:2]))
