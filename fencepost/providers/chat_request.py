"""From a model request to the body of an OpenAI Chat Completions request."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from pydantic import BaseModel
from pydantic_core import to_json

from fencepost.domain.clean import clean
from fencepost.domain.models import (
    Content,
    MediaContent,
    ModelMessage,
    ModelRequest,
    ReasoningContent,
    TextContent,
    ToolCallContent,
    ToolResultContent,
)
from fencepost.domain.projection import INTERRUPTED
from fencepost.domain.tools import ToolDefinition
from fencepost.providers.chat_decoder import REASONING_FIELDS

_KEY_OPTIONS = ("apiKey", "api_key")

_CACHE_KEY_CHARACTERS = 64

_Message = dict[str, Any]


def build_body(request: ModelRequest) -> dict[str, Any]:
    """Give the request body as JSON values.

    The options of the model and then of the request are laid over it; an option of null takes a field out. A key never
    gets in: keys travel in headers only.
    """
    body: dict[str, Any] = {"model": request.model.id, "messages": _messages(request)}
    if request.tools:
        body["tools"] = [_function(tool) for tool in request.tools]
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
    if request.config.output is not None:
        # OpenAI's newer models refuse the old name, most other endpoints do not know the new one.
        own = urlsplit(request.provider.base_url).hostname == "api.openai.com"
        body["max_completion_tokens" if own else "max_tokens"] = request.config.output
    if request.config.temperature is not None:
        body["temperature"] = request.config.temperature
    if request.cache_key is not None:
        body["prompt_cache_key"] = _bounded(request.cache_key)
    body["stream_options"] = {"include_usage": True}
    options = {**request.config.options, **request.options}
    if {"max_completion_tokens", "max_tokens"} & options.keys():
        # Two names of one limit: whoever sets one means it in place of ours, and no endpoint takes both.
        body.pop("max_completion_tokens", None)
        body.pop("max_tokens", None)
    body.update(options)
    body = {key: value for key, value in body.items() if value is not None and key not in _KEY_OPTIONS}
    body["stream"] = True
    return body


def _bounded(cache_key: str) -> str:
    """OpenAI takes 64 characters at most. A session id may be as long without its prefix, which tells nothing apart."""
    return cache_key if len(cache_key) <= _CACHE_KEY_CHARACTERS else cache_key.removeprefix("ses_")


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Give the body as UTF-8 JSON; a lone surrogate becomes U+FFFD, NaN and infinity become null."""
    try:
        return to_json(body, inf_nan_mode="null")
    except ValueError:
        return to_json(clean(body), inf_nan_mode="null")


def _function(tool: ToolDefinition) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _messages(request: ModelRequest) -> list[_Message]:
    """Translate the conversation. Each call has exactly one result, right after the message that made the call.

    Endpoints refuse every later request otherwise. A call without a result gets `INTERRUPTED`, a late result moves up
    to its call, a second one and one of no call are left out.
    """
    system = "\n\n".join(text for text in request.system if text)
    out: list[_Message] = [{"role": "system", "content": system}] if system else []
    after: dict[int, list[_Message]] = {}  # media of results, by id() of the message they must follow
    waiting: dict[str, tuple[_Message, _Message]] = {}  # call id -> its result message, the last one beside it
    for message in request.messages:
        if message.role == "assistant":
            translated, calls = _assistant(message)
            if translated is None:
                continue
            results = [{"role": "tool", "tool_call_id": call, "content": INTERRUPTED} for call in calls]
            out.append(translated)
            out.extend(results)
            waiting.update({call: (result, results[-1]) for call, result in zip(calls, results, strict=True)})
        elif message.role == "tool":
            for part in message.content:
                slot = waiting.pop(part.id, None) if isinstance(part, ToolResultContent) else None
                if isinstance(part, ToolResultContent) and slot is not None:
                    text, media = _result(part)
                    slot[0]["content"] = text
                    after.setdefault(id(slot[1]), []).extend(media)
        elif message.role == "system":
            text = "\n\n".join(part.text for part in message.content if isinstance(part, TextContent))
            if text:
                out.append({"role": "system", "content": text})
        else:
            content = _user(message.content)
            if content:
                out.append({"role": "user", "content": content})
    return _with_media(out, after)


def _with_media(messages: list[_Message], after: Mapping[int, list[_Message]]) -> list[_Message]:
    out: list[_Message] = []
    for message in messages:
        out.append(message)
        media = after.get(id(message))
        if media:
            out.append({"role": "user", "content": media})
    return out


def _assistant(message: ModelMessage) -> tuple[_Message | None, list[str]]:
    texts: list[str] = []
    reasoning: dict[str, list[str]] = {}
    calls: dict[str, dict[str, Any]] = {}
    for part in message.content:
        if isinstance(part, TextContent):
            texts.append(part.text)
        elif isinstance(part, ReasoningContent):
            field = _reasoning_field(part)
            if field is not None:
                reasoning.setdefault(field, []).append(part.text)
        elif isinstance(part, ToolCallContent):
            # A tool that the provider ran belongs to another protocol; its result, as text, says all.
            if not part.provider_executed and part.id not in calls:
                calls[part.id] = _call(part)
        elif isinstance(part, ToolResultContent) and part.provider_executed:
            texts.append(f"[{part.name}] {_result(part)[0]}")
    text = "\n\n".join(text for text in texts if text)
    if not text and not calls:
        return None, []
    out: _Message = {"role": "assistant", "content": text or None}
    for field, pieces in reasoning.items():
        out[field] = "".join(pieces)
    if calls:
        out["tool_calls"] = list(calls.values())
    return out, list(calls)


def _reasoning_field(part: ReasoningContent) -> str | None:
    known = (part.provider_metadata or {}).get("openai", {}).get("reasoning_field")
    return known if known in REASONING_FIELDS else None


def _call(part: ToolCallContent) -> dict[str, Any]:
    # Input that is text was no valid JSON; it goes back as a JSON object, because endpoints parse what they are sent.
    value = part.input if isinstance(part.input, dict) else {"invalid_arguments": part.input}
    arguments = json.dumps(value, ensure_ascii=False, default=str)
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


def _result(part: ToolResultContent) -> tuple[str, list[dict[str, Any]]]:
    """Give a result as text, and the media parts that only a user message can carry."""
    value, kind = part.result.get("value"), part.result.get("type")
    if kind == "error" and isinstance(value, Mapping) and isinstance(value.get("error"), Mapping):
        text, media = _content(part.id, value.get("content") or ())
        return "\n".join(filter(None, (str(value["error"].get("message", "")), text))), media
    if kind == "content" and isinstance(value, list | tuple):
        return _content(part.id, value)
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)), []


def _content(call_id: str, items: Iterable[Any]) -> tuple[str, list[dict[str, Any]]]:
    texts: list[str] = []
    media: list[dict[str, Any]] = []
    for item in items:
        fields: Mapping[str, Any] = item.model_dump(by_alias=True) if isinstance(item, BaseModel) else item
        if fields.get("type") != "file":
            texts.append(str(fields.get("text", "")))
            continue
        file = MediaContent(uri=str(fields["uri"]), mime=str(fields["mime"]), name=fields.get("name"))
        shown = _media(file)
        if shown["type"] == "text":
            texts.append(shown["text"])
        else:
            texts.append(f"[{file.name or file.mime}: in the message that follows]")
            media += [{"type": "text", "text": f"File of the tool call {call_id}:"}, shown]
    return "\n".join(texts), media


def _user(content: tuple[Content, ...]) -> str | list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, TextContent):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, MediaContent):
            parts.append(_media(part))
    if all(part["type"] == "text" for part in parts):
        # Plain text where it can be: not every compatible endpoint takes a list.
        return "\n\n".join(part["text"] for part in parts if part["text"])
    return parts


def _media(file: MediaContent) -> dict[str, Any]:
    mime = file.mime.lower()
    if mime.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": file.uri}}
    if mime == "application/pdf" and file.uri.startswith("data:"):
        return {"type": "file", "file": {"filename": file.name or "document.pdf", "file_data": file.uri}}
    text = _text_of(file) if mime.startswith("text/") or mime == "application/json" else None
    if text is not None:
        return {"type": "text", "text": f"{file.name}:\n{text}" if file.name else text}
    where = "" if file.uri.startswith("data:") else f" at {file.uri}"
    return {"type": "text", "text": f"[file {file.name or ''} ({file.mime}){where}: this model cannot be shown it]"}


def _text_of(file: MediaContent) -> str | None:
    head, comma, data = file.uri.partition(",")
    if not comma or not head.startswith("data:"):
        return None
    try:
        raw = base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
    except (binascii.Error, ValueError):
        return None
    return raw.decode("utf-8", "replace")
