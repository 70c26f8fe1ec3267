"""The model of a chaos run: what it says follows from the seed and the transcript, and no word is said twice."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from fencepost.providers.script import Action, CallTool, CleanEof, Cut, Fail, Say, text_of

_INPUT = re.compile(r"input \d+ of (\d+)")


class Model:
    """Answers with words and tool calls. A call's effect is a line in the file of its session."""

    def __init__(self, seed: int, effects: Path) -> None:
        self._seed = seed
        self._effects = effects
        self._numbers = count(1)

    def effects_of(self, session: int) -> Path:
        """Give the file that the session's tools write to."""
        return self._effects / str(session)

    def __call__(self, body: dict[str, Any]) -> Sequence[Action]:
        """Answer a request."""
        messages = body["messages"]
        asked = [text_of(message) for message in messages if message["role"] == "user"]
        session = next(int(match[1]) for text in asked if (match := _INPUT.fullmatch(text)))
        chance = random.Random(f"{self._seed}:{session}:{len(messages)}:{asked[-1]}")
        number = next(self._numbers)
        fate = chance.random()
        if fate < 0.05:
            return [Fail(503)]
        rounds = 0
        for message in reversed(messages):
            if message["role"] == "user":
                break
            rounds += message["role"] == "assistant"
        actions: list[Action] = [self._words(number, chance)]
        if rounds < chance.choice((0, 1, 1, 2)):
            actions += [self._call(f"call_{number}_{n}", session, chance) for n in range(chance.choice((1, 1, 2)))]
            if chance.random() < 0.5:
                actions.append(Say(f" w{number}.900 w{number}.901", delay=0.2))
        if fate < 0.12:
            actions.append(chance.choice((Cut(), CleanEof())))
        return actions

    def _words(self, number: int, chance: random.Random) -> Say:
        words = (f"w{number}.{n} " for n in range(chance.randint(3, 30)))
        return Say("".join(words), delay=chance.choice((0, 0.01, 0.05)))

    def _call(self, call: str, session: int, chance: random.Random) -> CallTool:
        seconds = chance.choice((0, 0, 0.2, 1.5))
        command = f"echo {call} >> {self.effects_of(session)}; sleep {seconds}; echo done"
        return CallTool("bash", {"command": command}, id=call)
