"""The scripted provider as a process, with what benchmarks need beside its directives.

A prompt that is a JSON object asks for a stream: `{"chunks": 1000, "delay": 0.01, "stamp": true, "gate": "name",
"of": 200}`. `stamp` puts the time of sending into the first chunk; with a `gate`, nothing is sent before so many
streams stand at the gate. A request body `{"bodies": 2}` is answered with the last request bodies before it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from bench.children import report
from fencepost.providers.script import Action, CleanEof, Finish, Pause, Raw, Say, directed, text_of
from fencepost.providers.scripted import ScriptedProvider

PIECE = "word "
_STAMP = re.compile(r"@([0-9.]+)@ ")


def stamp_of(text: str) -> float | None:
    """Give the time that the first chunk of a text was sent at, None for a text without it."""
    found = _STAMP.match(text)
    return float(found[1]) if found is not None else None


def text_after(text: str) -> str:
    """Give a text without its stamp."""
    return _STAMP.sub("", text, count=1)


class Stamp(Raw):
    """A chunk that carries the time at which it is sent."""

    def __init__(self) -> None:
        """Take nothing: the bytes are made when they are sent."""

    @property
    def data(self) -> bytes:
        """Give the chunk as of now."""
        choice = {"index": 0, "delta": {"content": f"@{time.time():.6f}@ "}, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Reply:
    """Answers requests."""

    def __init__(self) -> None:
        self._bodies: list[dict[str, Any]] = []
        self._gates: dict[str, tuple[list[int], asyncio.Event]] = {}

    def __call__(self, body: dict[str, Any]) -> Sequence[Action]:
        """Give the actions that answer a request."""
        if "bodies" in body:
            return [Raw(json.dumps(self._bodies[-body["bodies"] :]).encode()), CleanEof()]
        self._bodies = [*self._bodies[-9:], body]
        messages = body["messages"]
        if messages[-1]["role"] != "tool":
            # Also when the answer is asked for again, because a machine with too much to do has cut it off.
            prompts = [text_of(one) for one in messages if one["role"] == "user"]
            wanted = next((one for one in reversed(prompts) if one.startswith("{")), None)
            if wanted is not None:
                return self._stream(json.loads(wanted))
        found = directed(messages)
        return found[2] if found is not None else [Say("Nothing more."), Finish()]

    def _stream(self, wanted: dict[str, Any]) -> Sequence[Action]:
        actions: list[Action] = []
        if "gate" in wanted:
            standing, gate = self._gates.setdefault(wanted["gate"], ([], asyncio.Event()))
            standing.append(1)
            if len(standing) == wanted["of"]:
                gate.set()
            actions.append(Pause(gate))
        if wanted.get("stamp"):
            actions.append(Stamp())
        count = wanted["chunks"]
        return [*actions, Say(PIECE * count, count, wanted.get("delay", 0)), Finish()]


async def main() -> None:
    """Serve until the process is ended."""
    async with ScriptedProvider(Reply()) as provider:
        report(provider.base_url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
