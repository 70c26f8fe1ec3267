"""The recovery workflow: one scan for sessions that nobody works on. A schedule starts it every few seconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from workflows.calls import ONCE, failure_message

with workflow.unsafe.imports_passed_through():
    from fencepost.domain import scanning
    from fencepost.domain.scanning import RecoveryInput, RecoveryResult

# A scan makes some hundred short calls at most. One that takes longer is cut off, and the next one goes on.
_LONGEST = timedelta(seconds=60)


@workflow.defn(name=scanning.RECOVERY)
class Recovery:
    """Scans once. What could not be reached is left to the next run, so that a failure is a result like any other."""

    @workflow.run
    async def run(self, *args: Any) -> RecoveryResult:
        """Give what the scan did, in numbers."""
        del args  # none yet; whatever a later schedule passes is no reason to fail
        try:
            result: RecoveryResult = await workflow.execute_activity(
                scanning.RECOVER_SESSIONS,
                RecoveryInput(),
                result_type=RecoveryResult,
                summary="recovery scan",
                start_to_close_timeout=_LONGEST,
                retry_policy=ONCE,
            )
        except FailureError as error:
            return RecoveryResult(cut_off=failure_message(error))
        return result
