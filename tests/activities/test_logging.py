"""What an activity's lines say, whoever writes them, and what becomes of its errors in the log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter
from sqlalchemy.exc import IntegrityError
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.guard import guarded
from fencepost.domain.contracts import WORKER_SHUTDOWN, StepInput
from fencepost.domain.errors import (
    ClaimRefusedError,
    LeaseExpiredError,
    OwnershipLostError,
    ProviderError,
    UnavailableError,
)
from fencepost.domain.ids import fresh_id
from fencepost.domain.ownership import Token
from fencepost.telemetry import configure_logging, get_logger, traceback_of

CLOSED = "what-a-user-wrote"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the lines of this test go, at the default level. Logging is put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    yield stream
    root.handlers[:], root.level = handlers, level


@workflow.defn(name="OneCall", sandboxed=False)
class OneCall:
    """Calls the one activity, once."""

    @workflow.run
    async def run(self, given: StepInput) -> None:
        """Call it as a turn calls its local ones."""
        await workflow.execute_local_activity(
            "one_call",
            given,
            start_to_close_timeout=timedelta(seconds=10),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


class Calls:
    """An activity that writes lines as several libraries would, and then raises."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    @activity.defn(name="one_call")
    @guarded
    async def one_call(self, given: StepInput) -> None:
        """Do it."""
        get_logger("fencepost.test").info("ours")
        logging.getLogger("another.library").warning("theirs")
        logging.getLogger("httpx2").info("HTTP Request: POST https://example.org/")
        if self._error is not None:
            raise self._error


async def lines_of(client: Client, queue: str, error: Exception | None, stream: io.StringIO) -> list[dict[str, Any]]:
    """Run the activity in a real worker and give the lines; each has to be of this activity."""
    session = fresh_id("ses")
    given = StepInput(token=Token(session_id=session, execution_id="exe_1", owner_id="run"), step=7)
    async with Worker(
        client,
        task_queue=queue,
        workflows=[OneCall],
        activities=[Calls(error).one_call],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        handle = await client.start_workflow("OneCall", given, id=session, task_queue=queue)
        if error is None:
            await handle.result()
        else:
            with pytest.raises(WorkflowFailureError):
                await handle.result()
    lines: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    about = {"session": session, "turn": handle.result_run_id, "execution": "exe_1", "step": 7, "activity": "one_call"}
    assert [{key: line.get(key) for key in about} for line in lines] == [about] * len(lines)
    return lines


async def test_every_line_says_what_it_is_about(temporal_client: Client, task_queue: str, stream: io.StringIO) -> None:
    """Also one of a library that knows nothing of sessions; a line for each request would be too many."""
    lines = await lines_of(temporal_client, task_queue, None, stream)

    assert [line["event"] for line in lines] == ["ours", "theirs"]


@pytest.mark.parametrize(
    ("error", "event", "level"),
    [
        (OwnershipLostError("superseded"), "ownership lost", "warning"),
        (LeaseExpiredError("too old"), "ownership lost", "warning"),
        (ClaimRefusedError("another run"), "activity refused", "warning"),
        (UnavailableError("away"), "activity refused", "warning"),
        (ProviderError("no", reason="Authentication", transient=False), "activity refused", "warning"),
        (ApplicationError("the worker shuts down", type=WORKER_SHUTDOWN), "work handed over", "info"),
    ],
    ids=lambda value: getattr(value, "type", None) or type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_expected_error_is_one_line(
    error: Exception, event: str, level: str, temporal_client: Client, task_queue: str, stream: io.StringIO
) -> None:
    """It says what happened, without a traceback, and nobody says it again."""
    lines = (await lines_of(temporal_client, task_queue, error, stream))[2:]

    assert [(line["event"], line["level"]) for line in lines] == [(event, level)]
    assert "Traceback" not in stream.getvalue()
    assert "exception" not in lines[0]


async def test_an_unknown_error_keeps_its_traceback(
    temporal_client: Client, task_queue: str, stream: io.StringIO
) -> None:
    """It is a fault of ours, and has to be found."""
    lines = (await lines_of(temporal_client, task_queue, KeyError("unforeseen"), stream))[2:]

    assert [line["event"] for line in lines] == ["Completing activity as failed"]
    assert "in one_call" in lines[0]["exception"]
    assert lines[0]["exception"].endswith("KeyError: 'unforeseen'")


def test_a_traceback_quotes_no_values() -> None:
    """Libraries put what they were given into their messages: rows, parameters, input. Locals are not shown either."""
    driver = ValueError(f"null value violates a constraint\nDETAIL:  Failing row contains ({CLOSED}\n{CLOSED}).")
    statement = IntegrityError("INSERT INTO t VALUES (:a)", {"a": CLOSED}, ValueError("a constraint"))
    before, told = [str(driver), str(statement)], []
    for error in (driver, statement):
        with pytest.raises(ValueError) as raised:
            raise ValueError("outer") from error
        told.append(traceback_of(raised.value))
    with pytest.raises(ValueError) as refused:
        TypeAdapter(dict[str, int]).validate_python({"a": CLOSED})
    before.append(str(refused.value))
    told.append(traceback_of(refused.value))

    assert all(CLOSED in words for words in before)
    assert CLOSED not in "".join(told)
    assert "ValueError: outer" in told[0]
    assert "INSERT INTO t" in told[1]
    assert "a: int_parsing" in told[2]


def test_a_traceback_ends() -> None:
    """Errors may be their own cause, in a circle, and may come as groups."""
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first

    assert traceback_of(first) == "KeyError: 'second'\n\nKeyError: 'first'"
    assert traceback_of(ExceptionGroup("both", [KeyError("one")])).endswith("KeyError: 'one'")
