"""Replaying what Temporal recorded of a session with the code as it is: it has to take every decision again."""

from __future__ import annotations

from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.worker import Replayer
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from tests.house_kit import House
from workflows.runtime import served_workflows

# A signal came while the task ended the run, so that Temporal has it done again; or the run begins with a reset.
_NO_FAULT_OF_OURS = (
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND,
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_RESET_WORKFLOW,
)


# Workers run without it. What it forbids (clocks, randomness, files, the network) is caught here.
_SANDBOX = SandboxedWorkflowRunner(
    restrictions=SandboxRestrictions.default.with_passthrough_modules(
        "fencepost.domain", "fencepost.__version__", "pydantic", "pydantic_core", "annotated_types"
    )
)


async def assert_replays(house: House, session_id: str) -> int:
    """Replay all runs of a session, none of which ever failed a workflow task by its code. Gives how many there are."""
    served = served_workflows(house.client)
    replayer = Replayer(
        workflows=served["workflows"],
        workflow_runner=_SANDBOX,
        data_converter=served["client"].data_converter,
    )
    runs = 0
    async for each in house.client.list_workflows(f"WorkflowId = '{session_id}'"):
        history = await house.client.get_workflow_handle(session_id, run_id=each.run_id).fetch_history()
        for event in history.events:
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
                assert event.workflow_task_failed_event_attributes.cause in _NO_FAULT_OF_OURS
        await replayer.replay_workflow(history)
        runs += 1
    assert runs
    return runs
