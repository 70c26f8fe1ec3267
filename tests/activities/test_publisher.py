"""From a provider's stream to the log: what is published of it, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from activities.publisher import StepPublisher, as_object
from fencepost.domain import messages as m
from fencepost.domain import stream as s
from fencepost.domain.contracts import CallRef, Plan, StreamInput
from fencepost.domain.errors import OwnershipLostError, ProviderError
from fencepost.services import Services
from fencepost.store.live import Announcer
from tests.house_kit import house_settings
from tests.store.kit import MODEL, StoreKit, Work


@dataclass
class Publication:
    """A publisher over a real database, and what came of it."""

    store: StoreKit
    work: Work
    publisher: StepPublisher
    announced: list[CallRef] = field(default_factory=list)

    async def take(self, *stream: s.StreamEvent) -> None:
        """Hand over the events of a stream."""
        for event in stream:
            self.publisher.take(event)
        await self.publisher.durable()

    async def types(self) -> list[str]:
        """Give the names of the step's events."""
        types = await self.store.types(self.work.token.session_id)
        return types[types.index("prompted") + 1 :]

    async def parts(self) -> tuple[m.Part, ...]:
        """Give the content of the answer."""
        return (await self.store.assistant(self.work.token.session_id)).content

    async def data(self, name: str) -> dict[str, Any]:
        """Give the data of the only event of this name."""
        log = await self.store.events(self.work.token.session_id)
        [found] = [event.data for event in log if event.type.startswith(f"session.next.{name}.")]
        return found


@pytest.fixture
async def publication(store: StoreKit, tmp_path: Path) -> AsyncIterator[Publication]:
    """A publisher of a step that was just requested."""
    work = await store.begin(await store.new_session())
    announcer = Announcer(store.database)
    nothing: Any = None  # a publisher reaches neither Temporal nor a provider nor a tool
    services = Services(
        settings=house_settings("postgresql://nowhere/none", "none", tmp_path, "http://nowhere"),
        database=store.database,
        temporal=nothing,
        http=nothing,
        catalog=nothing,
        registry=nothing,
        runner=nothing,
        announcer=announcer,
        environ={},
    )
    given = StreamInput(
        token=work.token,
        step=1,
        attempt=1,
        assistant_message_id=work.message_id,
        plan=Plan(agent="build", model=MODEL, tools=("bash",)),
    )
    announced: list[CallRef] = []
    publisher = StepPublisher(services, given, announce=announced.append, trusted=lambda: True)
    yield Publication(store, work, publisher, announced)
    publisher._stop_timer()
    await announcer.close()


CALL = s.ToolCall("call_1", "bash", {"command": "true"})
HOSTED = s.ToolCall("call_1", "search", {"q": "heron"}, provider_executed=True)
RESULT = s.ToolResult("call_1", "search", {"type": "json", "value": [1]}, provider_metadata={"p": {"id": 1}})


@pytest.mark.conformance("RUN-71")
@pytest.mark.parametrize(
    "stream",
    [
        [s.TextStart("t1"), s.TextStart("t1")],
        [s.TextStart("t1"), s.TextEnd("t1"), s.TextStart("t1")],
        [s.ReasoningStart("r1"), s.ReasoningStart("r1")],
        [s.ToolInputStart("call_1", "bash"), s.ToolInputStart("call_1", "bash")],
    ],
)
async def test_a_part_that_starts_twice_is_refused(publication: Publication, stream: list[s.StreamEvent]) -> None:
    """The one that was started stays as it is."""
    await publication.take(*stream[:-1])
    before = await publication.types(), await publication.parts()

    with pytest.raises(ProviderError, match=r"out of order .*started twice") as caught:
        await publication.take(stream[-1])
    assert (caught.value.reason, caught.value.transient) == ("InvalidProviderOutput", False)
    assert (await publication.types(), await publication.parts()) == before


@pytest.mark.conformance("RUN-71")
async def test_raw_tool_input_becomes_the_input_of_a_call(publication: Publication) -> None:
    """Pending and without a parsed input while it streams, then running with it; the raw text stays in the log."""
    await publication.take(s.ToolInputStart("call_1", "bash"), s.ToolInputDelta("call_1", "bash", '{"command": '))
    [part] = await publication.parts()
    assert isinstance(part, m.ToolPart)
    assert part.state == m.PendingTool(input="")
    await publication.take(s.ToolInputDelta("call_1", "bash", '"true"}'), s.ToolInputEnd("call_1", "bash"), CALL)

    [part] = await publication.parts()
    assert isinstance(part, m.ToolPart)
    assert part.state == m.RunningTool(input={"command": "true"}, structured={})
    assert await publication.types() == ["step.started", "tool.input.started", "tool.input.ended", "tool.called"]
    assert (await publication.data("tool.input.ended"))["text"] == '{"command": "true"}'
    assert (await publication.data("tool.called"))["input"] == {"command": "true"}
    assert [call.id for call in publication.announced] == ["call_1"]
    assert publication.announced[0].summary == "bash: true"


@pytest.mark.conformance("RUN-71")
@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        ([s.TextDelta("t1", "a")], "without a start"),
        ([s.TextEnd("t1")], "without a start"),
        ([s.ReasoningDelta("r1", "a")], "without a start"),
        ([s.ToolInputDelta("call_1", "bash", "{")], "without a start"),
        ([s.ToolInputEnd("call_1", "bash")], "without a start"),
        ([s.TextStart("t1"), s.TextEnd("t1"), s.TextDelta("t1", "a")], "without a start"),
        ([s.TextStart("t1"), s.TextEnd("t1"), s.TextEnd("t1")], "without a start"),
        ([s.ToolInputStart("call_1", "bash"), s.ToolInputDelta("call_1", "read", "{")], "is bash and read"),
        ([s.ToolInputStart("call_1", "bash"), s.ToolInputEnd("call_1", "read")], "is bash and read"),
        ([s.ToolInputStart("call_1", "read"), CALL], "is read and bash"),
        ([CALL, CALL], "made twice"),
        ([RESULT], "a result for call"),
        ([CALL, RESULT], "a result for call"),
        ([HOSTED, RESULT, RESULT], "two results"),
        ([s.StepFinish(0, "stop"), s.StepFinish(0, "stop")], "finished twice"),
    ],
)
async def test_a_stream_out_of_order_is_refused(
    publication: Publication, stream: list[s.StreamEvent], complaint: str
) -> None:
    """With nothing published of what was out of order."""
    await publication.take(*stream[:-1])
    before = await publication.types()

    with pytest.raises(ProviderError, match=complaint):
        await publication.take(stream[-1])
    assert await publication.types() == before


@pytest.mark.conformance("TEV-05")
async def test_the_finish_of_a_stream_is_held_until_the_step_is_settled(publication: Publication) -> None:
    """It is remembered with its counts, and the log has no end of the step yet."""
    usage = s.Usage(input_tokens=3, output_tokens=5)
    finish = s.StepFinish(0, "tool-calls", usage)
    await publication.take(s.StepStart(), s.TextStart("t1"), s.TextDelta("t1", "hello"), s.TextEnd("t1"), CALL, finish)
    await publication.take(s.Finish("tool-calls", usage))
    await publication.publisher.close_parts()

    assert publication.publisher.finish == finish
    assert [name for name in await publication.types() if name.startswith("step.")] == ["step.started"]
    answer = await publication.store.assistant(publication.work.token.session_id)
    assert (answer.time.completed, answer.finish, answer.tokens) == (None, None, None)
    await publication.work.start_tool("call_1")
    await publication.work.settle_tool("call_1")
    await publication.work.settle()
    assert (await publication.types())[-2:] == ["tool.success", "step.ended"]


@pytest.mark.conformance("TEV-02")
async def test_the_result_of_a_hosted_call_is_kept(publication: Publication) -> None:
    """Neither executed nor announced here, and completed with what the provider gave."""
    await publication.take(HOSTED, RESULT)

    success = await publication.data("tool.success")
    assert success["result"] == {"type": "json", "value": [1]}
    assert success["provider"] == {"executed": True, "metadata": {"p": {"id": 1}}}
    [part] = await publication.parts()
    assert isinstance(part, m.ToolPart)
    assert isinstance(part.state, m.CompletedTool)
    assert part.state.result == {"type": "json", "value": [1]}
    assert part.provider == m.ToolProvider(executed=True, result_metadata={"p": {"id": 1}})
    assert (publication.announced, publication.publisher.calls, publication.publisher.local_calls) == ([], [], 0)
    with pytest.raises(OwnershipLostError):
        await publication.work.start_tool("call_1")


async def test_an_error_of_a_hosted_call_may_come_twice(publication: Publication) -> None:
    """As an error, and again as a result; it is one failure."""
    error = s.ToolResult("call_1", "search", {"type": "error", "value": "no luck"})
    await publication.take(HOSTED, s.ToolError("call_1", "search", "no luck"), error)

    assert (await publication.data("tool.failed"))["error"]["message"] == "no luck"
    assert (await publication.types())[-1] == "tool.failed"


async def test_an_empty_stream_begins_nothing(publication: Publication) -> None:
    """There is no answer without a word."""
    await publication.take(s.StepStart(), s.StepFinish(0, "stop"), s.Finish("stop"))
    await publication.publisher.close_parts()

    assert await publication.types() == []
    assert not publication.publisher.started


async def test_what_is_open_at_the_streams_end_is_closed_with_what_it_has(publication: Publication) -> None:
    """Text, reasoning and half of a tool's input."""
    await publication.take(
        s.TextStart("t1"),
        s.TextDelta("t1", "half "),
        s.TextDelta("t1", "a word"),
        s.ReasoningStart("r1"),
        s.ReasoningDelta("r1", "hm"),
        s.ToolInputStart("call_1", "bash"),
        s.ToolInputDelta("call_1", "bash", '{"comm'),
    )
    await publication.publisher.close_parts()

    text, reasoning, tool = await publication.parts()
    assert text == m.TextPart(id="t1", text="half a word")
    assert isinstance(reasoning, m.ReasoningPart)
    assert reasoning.text == "hm"
    assert isinstance(tool, m.ToolPart)
    assert tool.state == m.PendingTool(input='{"comm')


async def test_a_call_with_unreadable_input_fails_at_once(publication: Publication) -> None:
    """It is never executed, but the model is to see its failure."""
    await publication.take(s.ToolCall("call_1", "bash", '{"comm', input_error="cut off"))

    assert (await publication.data("tool.called"))["input"] == {"value": '{"comm'}
    assert (await publication.data("tool.failed"))["error"]["message"] == "Invalid tool input: cut off"
    assert (publication.announced, publication.publisher.calls, publication.publisher.local_calls) == ([], [], 1)
    with pytest.raises(OwnershipLostError):
        await publication.work.start_tool("call_1")


def test_a_tools_input_is_an_object() -> None:
    """Anything else becomes the value of one."""
    assert [as_object(value) for value in ({"a": 1}, [1], "x", None)] == [
        {"a": 1}, {"value": [1]}, {"value": "x"}, {"value": None}
    ]  # fmt: skip
