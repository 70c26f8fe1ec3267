"""How the scripted provider behaves by itself: like a small model that reads a file, writes a summary, and says so.

For a prompt that names a file (or asks to read or sum up) and is offered `read`: it says what it will do and reads the
file; with the result it writes a summary, if `write` is offered; then it closes. Any other prompt is echoed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fencepost.providers.script import Action, CallTool, Say, text_of

_FILE = re.compile(r"[\w.\-/~]*\w\.[A-Za-z]\w{0,7}\b")
_WISH = re.compile(r"\b(?:read|summar\w+|file|readme)\b", re.I)
_ECHO_CHARACTERS = 2000


def answer(body: Mapping[str, Any], delay: float = 0) -> list[Action]:
    """Give the actions that answer a request body; `delay` is the seconds before each chunk."""
    messages: Sequence[Mapping[str, Any]] = body.get("messages") or []
    prompt, results = _last_prompt(messages)
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or [] if "function" in tool}
    files = _FILE.findall(prompt)
    if "read" in tools and (files or _WISH.search(prompt)):
        source = files[0] if files else "README.md"
        target = files[1] if len(files) > 1 else "SUMMARY.md"
        if not results:
            return [Say(f"I will read {source} first.", delay=delay), _read(tools["read"], source, delay)]
        if len(results) == 1 and "write" in tools:
            summary = _summary(source, results[0])
            call = _write(tools["write"], target, summary, delay)
            return [Say(f"Now I write what I found to {target}.", delay=delay), call]
        return [
            Say(
                f"Done: {source} is read" + (f" and {target} holds its summary." if len(results) > 1 else "."),
                delay=delay,
            )
        ]
    said = prompt[:_ECHO_CHARACTERS]
    return [Say(f"You said: {said}" if said else "Hello.", delay=delay)]


def _last_prompt(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    results: list[str] = []
    for message in reversed(messages):
        if message.get("role") == "tool":
            results.insert(0, text_of(message))
        elif message.get("role") == "user":
            return text_of(message), results
    return "", results


def _summary(source: str, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Summary of {source}: {len(lines)} lines that are not blank.\n" + "\n".join(lines[:3]) + "\n"


def _read(tool: Mapping[str, Any], path: str, delay: float) -> CallTool:
    return CallTool("read", {_parameter(tool, "path"): path}, delay=delay)


def _write(tool: Mapping[str, Any], path: str, content: str, delay: float) -> CallTool:
    arguments = {_parameter(tool, "path"): path, _parameter(tool, "content"): content}
    return CallTool("write", arguments, split=4, delay=delay)


def _parameter(tool: Mapping[str, Any], like: str) -> str:
    """Find the parameter of a tool that is called something like this, such as `filePath` for `path`."""
    names = list((tool.get("parameters") or {}).get("properties") or ())
    return next((name for name in names if like in name.lower()), like)
