"""The recovery scan, as an activity of its workflow."""

from __future__ import annotations

from temporalio import activity

from activities.guard import guarded
from fencepost.domain import scanning
from fencepost.domain.scanning import RecoveryInput, RecoveryResult
from fencepost.recoveries import Scan
from fencepost.runs import Runs
from fencepost.services import Services
from fencepost.store.live import Notice


class RecoveryActivities:
    """The activity of recovery: regular, with one attempt. One that is cut off is followed by the next scan's."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=scanning.RECOVER_SESSIONS)
    @guarded
    async def recover_sessions(self, given: RecoveryInput) -> RecoveryResult:
        """Scan once, within the given bound."""
        services, settings = self._services, self._services.settings
        scan = Scan(
            services.database,
            Runs(services.temporal),
            settings.task_queue,
            services.lease,
            settings.limits.max_recovery_attempts,
            given.batch,
        )
        report = await scan.run()
        for finding in report.findings:
            services.announcer.send(finding.session_id, Notice.look())
        return report.result()
