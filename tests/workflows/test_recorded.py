"""One exchange with OpenAI Chat, replayed from a cassette.

The cassette was written by hand from the documented wire shape, since no key was at hand: RECORD=true with a real
OPENAI_API_KEY records it anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import vcr  # type: ignore[import-untyped]
from temporalio.client import Client

from fencepost.domain.messages import AssistantMessage, UserMessage
from tests.workflows.conftest import MakeHouse
from tests.workflows.test_turn import said

CASSETTES = Path(__file__).parent / "cassettes"
PROMPT = "Say hello in one short sentence."


@pytest.mark.conformance("RCD-01")
async def test_a_recorded_prompt_gives_two_messages_and_six_events_in_order(
    house: MakeHouse, temporal_client: Client
) -> None:
    recording = os.environ.get("RECORD") == "true"
    recorder = vcr.VCR(
        cassette_library_dir=str(CASSETTES),
        record_mode="all" if recording else "none",
        match_on=["method", "scheme", "host", "path", "json_body"],
        filter_headers=["authorization", "cookie", "user-agent"],
        ignore_localhost=True,
    )
    recorder.register_matcher("json_body", _same_body)
    openai = {
        "base_url": "https://api.openai.com/v1",
        "api_key_env": "OPENAI_API_KEY",
        "models": {"gpt-4o-mini": {"temperature": 0, "options": {"max_tokens": 20}}},
    }
    h = await house(
        environ={"OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "fixture")},
        providers={"openai": openai},
        default_model="openai/gpt-4o-mini",
        agents={"build": {"system": "", "tools": ()}},
    )
    session_id = "ses_runner_recorded"
    await h.prompt(session_id, PROMPT, resume=False)
    await h.ended(session_id)
    with recorder.use_cassette("openai-chat-streams-text.yaml") as cassette:
        handle = await h.start(session_id)
        await handle.result()
        assert recording or cassette.all_played
    messages = await h.messages(session_id)

    user, assistant = messages
    assert isinstance(user, UserMessage)
    assert user.text == PROMPT
    assert isinstance(assistant, AssistantMessage)
    assert (assistant.agent, assistant.finish, said(assistant)) == ("build", "stop", "Hello!")
    assert assistant.tokens is not None
    assert (assistant.tokens.input, assistant.tokens.output) == (22, 2)
    assert await h.types(session_id) == [
        "session.next.prompt.admitted.1",
        "session.next.prompted.1",
        "session.next.step.started.1",
        "session.next.text.started.1",
        "session.next.text.ended.1",
        "session.next.step.ended.2",
    ]


def _same_body(made: Any, recorded: Any) -> None:
    """All of it but the session's context, which names the day and a directory of this test, and was not recorded."""
    body = json.loads(made.body)
    [context] = [message for message in body["messages"] if message["role"] == "system"]
    body["messages"].remove(context)
    assert body == json.loads(recorded.body)
