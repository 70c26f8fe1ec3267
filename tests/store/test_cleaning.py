"""Text that PostgreSQL cannot hold comes from models, tools and people; it is stored with U+FFFD in its place."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.domain import events
from fencepost.domain import messages as m
from fencepost.domain.ids import fresh_id
from fencepost.domain.inbox import FileAttachment, Location, Prompt
from fencepost.domain.tools import TextItem
from fencepost.store import inbox, sessions, steps, tables, tool_calls
from fencepost.store.sessions import NewSession
from fencepost.store.steps import LivePart
from tests.store.kit import LEASE, StoreKit, Work

BAD = "a\x00b\ud800c\udfffd"
GOOD = "a\ufffdb\ufffdc\ufffdd"


async def test_a_prompt_is_stored_clean_and_is_the_same_prompt_again(store: StoreKit, session_id: str) -> None:
    """A repeat with the unclean text is recognised."""
    message_id = fresh_id("msg")
    prompt = Prompt(text=BAD, files=(FileAttachment(uri="file:///a", name=BAD),))
    first = await store.do(inbox.admit, session_id, message_id, prompt, "steer")
    again = await store.do(inbox.admit, session_id, message_id, prompt, "steer")

    assert again.receipt == first.receipt
    assert first.receipt.prompt.text == GOOD
    await store.claim_and_prepare(session_id)
    [message] = await store.messages(session_id)
    assert isinstance(message, m.UserMessage)
    assert message.files is not None
    assert (message.text, message.files[0].name) == (GOOD, GOOD)


async def test_what_a_model_says_is_stored_clean(store: StoreKit, session_id: str) -> None:
    """Text, names, ids, values and keys."""
    work = await store.begin(session_id)
    metadata = {BAD: {BAD: [BAD, {BAD: None}]}}
    await work.publish(
        work.started(),
        events.TextStarted(**work.about, text_id=BAD),
        events.TextEnded(**work.about, text_id=BAD, text=BAD),
        events.ReasoningStarted(**work.about, reasoning_id=BAD, provider_metadata=metadata),
        events.ReasoningEnded(**work.about, reasoning_id=BAD, text=BAD),
        events.ToolInputStarted(**work.about, call_id=BAD, name=BAD),
        events.ToolInputEnded(**work.about, call_id=BAD, text=BAD),
        events.ToolCalled(
            **work.about,
            call_id=BAD,
            tool=BAD,
            input={BAD: BAD, "list": [BAD]},
            provider=events.ToolProviderInfo(executed=False, metadata=metadata),
        ),
    )

    spoken, thought, tool = (await store.assistant(session_id)).content
    clean_metadata = {GOOD: {GOOD: [GOOD, {GOOD: None}]}}
    assert spoken == m.TextPart(id=GOOD, text=GOOD)
    assert isinstance(thought, m.ReasoningPart)
    assert (thought.id, thought.text, thought.provider_metadata) == (GOOD, GOOD, clean_metadata)
    assert isinstance(tool, m.ToolPart)
    assert isinstance(tool.state, m.RunningTool)
    assert (tool.id, tool.name, tool.state.input) == (GOOD, GOOD, {GOOD: GOOD, "list": [GOOD]})
    assert tool.provider is not None
    assert tool.provider.metadata == clean_metadata
    assert (await store.row(tables.tool_call, session_id))["call_id"] == GOOD


@pytest.mark.parametrize("failing", [False, True])
async def test_a_call_with_such_an_id_is_executed_and_its_output_stored_clean(
    store: StoreKit, session_id: str, failing: bool
) -> None:
    """Whoever was told of the call by its unclean id finds it."""
    work = await store.begin(session_id)
    await work.publish(work.started(), *work.called(BAD))
    assert (await work.start_tool(BAD)).name == "bash"
    provider = events.ToolProviderInfo(executed=False)
    outcome: Any = (
        events.ToolFailed(**work.about, call_id=BAD, error=m.MessageError(message=BAD), provider=provider)
        if failing
        else events.ToolSuccess(
            **work.about,
            call_id=BAD,
            structured={BAD: {BAD: BAD}},
            content=(TextItem(text=BAD),),
            output_paths=(BAD,),
            provider=provider,
        )
    )
    await store.do(tool_calls.settle, work.token, work.message_id, BAD, outcome, LEASE)

    [part] = (await store.assistant(session_id)).content
    assert isinstance(part, m.ToolPart)
    if failing:
        assert isinstance(part.state, m.FailedTool)
        assert part.state.error.message == GOOD
    else:
        assert isinstance(part.state, m.CompletedTool)
        assert part.state.structured == {GOOD: {GOOD: GOOD}}
        assert part.state.content == (TextItem(text=GOOD),)
        assert part.state.output_paths == (GOOD,)


async def test_a_call_that_fails_at_once_with_such_an_id_never_starts(store: StoreKit, session_id: str) -> None:
    """Its failure is in the same publication."""
    work = await store.begin(session_id)
    failed = events.ToolFailed(
        **work.about,
        call_id=BAD,
        error=m.MessageError(message="Invalid tool input"),
        provider=events.ToolProviderInfo(executed=False),
    )
    await work.publish(work.started(), *work.called(BAD), failed)

    assert (await store.row(tables.tool_call, session_id))["status"] == "settled"


async def test_live_text_is_kept_clean_and_goes_with_its_part(store: StoreKit, session_id: str) -> None:
    """The copy is found by the durable end, and dropped."""
    work: Work = await store.begin(session_id)
    await work.publish(work.started(), events.TextStarted(**work.about, text_id=BAD))
    for text in (BAD, BAD + BAD):
        await store.do(steps.keep_live, work.token, LivePart(work.message_id, "text", BAD, 1, text))
    row = await store.row(tables.live_part, session_id)
    assert (row["part_id"], row["text"]) == (GOOD, GOOD + GOOD)
    await work.publish(events.TextEnded(**work.about, text_id=BAD, text=BAD + BAD))

    assert await store.rows(tables.live_part, session_id) == []


async def test_a_session_of_such_a_name_and_place_is_created(store: StoreKit) -> None:
    """Names of directories need not be valid text."""
    session_id = fresh_id("ses")
    made = await store.do(sessions.create, session_id, NewSession(Location(directory=f"/{BAD}"), title=BAD))

    assert (made.title, made.location.directory) == (GOOD, f"/{GOOD}")


async def test_an_error_of_such_words_is_stored_clean(store: StoreKit, session_id: str) -> None:
    """Providers' own words may hold anything."""
    work = await store.begin(session_id)
    await work.settle(work.failed(BAD))

    error = (await store.assistant(session_id)).error
    assert error is not None
    assert error.message == GOOD
