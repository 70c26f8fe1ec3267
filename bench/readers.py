"""Readers of sessions, in a process of their own.

Standard input holds one line: `{"sessions": [...], "turns": 2}`. When all of them follow, `"ready"` is said, and then
one object for each turn of a session that has ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.children import report
from bench.provider import stamp_of, text_after
from fencepost.client import Client, open_client
from fencepost.config import load_settings
from fencepost.process import run_and_exit
from fencepost.store.readers import Delta


@dataclass
class Turn:
    """What a reader has seen of a turn."""

    text: str = ""
    first_ms: float | None = None
    began: float = 0.0

    def take(self, delta: Delta) -> None:
        """Take in text. The first tells how long it was on its way."""
        now = time.time()
        if not self.text:
            self.began = now
            sent = stamp_of(delta.text)
            self.first_ms = None if sent is None else (now - sent) * 1000
        self.text += delta.text


async def read(client: Client, session_id: str, turns: int, follows: Callable[[], None]) -> None:
    """Follow one session for so many turns of one step each."""
    turn, left, begun = Turn(), turns, False
    async for item in client.events(session_id):
        if not begun:
            begun = True
            follows()
        if isinstance(item, Delta):
            turn.take(item)
        elif item.type.startswith("session.next.step.ended"):
            text = text_after(turn.text)
            said = {"session": session_id, "first_ms": turn.first_ms, "text": text, "began": turn.began}
            report({**said, "ended": time.time()})
            turn, left = Turn(), left - 1
            if not left:
                return


async def main() -> None:
    """Follow the sessions that standard input names."""
    given = json.loads(await asyncio.to_thread(sys.stdin.readline))
    waiting = len(given["sessions"])

    def follows() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            report("ready")

    async with open_client(load_settings()) as client:
        await asyncio.gather(*(read(client, one, given["turns"], follows) for one in given["sessions"]))


if __name__ == "__main__":
    run_and_exit("readers", main())
