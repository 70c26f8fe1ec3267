"""How workflow code is run: with a converter that leaves undeclared payloads undecoded, and without a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client
from temporalio.common import RawValue
from temporalio.contrib.pydantic import PydanticPayloadConverter, ToJsonOptions, pydantic_data_converter
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner

from workflows.recovery import Recovery
from workflows.session_turn import SessionTurn


class RawWhenUndeclared(PydanticPayloadConverter):
    """Gives a payload without a declared type as it came, and writes only fields that were set.

    Handlers of a public workflow declare no types, since decoding before the handler runs would drop a malformed
    signal silently, and fail the workflow task, for ever, on a malformed start.
    """

    _one: RawWhenUndeclared | None = None

    def __new__(cls) -> RawWhenUndeclared:
        """Give the one there is: it has no state, is asked for with every activation, and takes long to make."""
        if cls._one is None:
            cls._one = super().__new__(cls)
            PydanticPayloadConverter.__init__(cls._one, ToJsonOptions(exclude_unset=True))
        return cls._one

    def __init__(self) -> None:
        """Leave it as `__new__` made it."""

    def from_payloads(self, payloads: Sequence[Payload], type_hints: list[type] | None = None) -> list[Any]:
        """Decode by the declared types, or not at all."""
        if type_hints is None:
            return [RawValue(payload) for payload in payloads]
        return super().from_payloads(payloads, type_hints)


class OneLine(DefaultFailureConverter):
    """Tells an expected failure in its one line, without the stack and the chain that led to it."""

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure) -> None:
        """Write the failure."""
        super().to_failure(exception, payload_converter, failure)
        if isinstance(exception, ApplicationError) and exception.type:
            failure.stack_trace = ""
            failure.ClearField("cause")


def served_workflows(client: Client) -> dict[str, Any]:
    """Give the options with which a worker serves the workflows: client, workflows, runner, and the sticky time.

    The client is the same connection with the converter of this module. Temporal's sandbox is left out since it enters
    and leaves its import guard for every payload, a third of a turn's CPU; the code here keeps no state of its own
    outside a run, and tests replay every kind of history inside the sandbox, so that what it would catch is caught
    there. The sticky time is how long a dead worker's sessions wait before another worker gets them.
    """
    config: dict[str, Any] = dict(client.config())
    config["data_converter"] = replace(
        pydantic_data_converter, payload_converter_class=RawWhenUndeclared, failure_converter_class=OneLine
    )
    return {
        "client": Client(**config),
        "workflows": [SessionTurn, Recovery],
        "workflow_runner": UnsandboxedWorkflowRunner(),
        "sticky_queue_schedule_to_start_timeout": timedelta(seconds=1),
    }
