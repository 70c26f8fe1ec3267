"""Claiming a session for this run, and releasing it."""

from __future__ import annotations

from temporalio import activity

from activities.guard import guarded, own_run
from fencepost.domain import contracts
from fencepost.domain.contracts import ClaimInput, ClaimResult, ReleaseInput, ReleaseResult, ReleaseState
from fencepost.domain.errors import ClaimRefusedError
from fencepost.domain.ids import derived_id
from fencepost.domain.ownership import Token
from fencepost.run_states import state_of_run
from fencepost.services import Services
from fencepost.store import claims, ownership
from fencepost.store.claims import AskAgainError, Claimed, Seen, Wanted
from fencepost.telemetry import concern, get_logger, recall

_LOOKS = 5

_log = get_logger("fencepost.ownership")


def _tell(wanted: Wanted, seen: Seen | None, claimed: Claimed) -> None:
    """Log what a claim came to; one that only renews is of no interest."""
    if claimed.exhausted:
        _log.warning("turn given up", reason="cut off too often")
    elif not claimed.held or claimed.renewed:
        _log.debug("claim renewed" if claimed.held else "nothing to run")
    elif claimed.taken_from is None:
        _log.info("turn claimed")
    else:
        reason = seen.run if seen is not None else wanted.reason
        _log.info("turn taken over", reason=reason, from_turn=claimed.taken_from)


def tell_release(outcome: str, state: ReleaseState) -> None:
    """Log how a turn ended, and whether its session goes on with what came since."""
    _log.info("turn ended" if state == "more" else "turn released", outcome=outcome, state=state)


class OwnershipActivities:
    """Local activities of ownership."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.CLAIM_SESSION)
    @guarded
    async def claim_session(self, given: ClaimInput) -> ClaimResult:
        """Claim the session for this run, taking over where the protocol allows it."""
        return await self.claim(given)

    async def claim(self, given: ClaimInput) -> ClaimResult:
        """Claim the session. Raises ClaimRefusedError, OwnershipLostError and UnavailableError."""
        wanted = self.wanted(given)
        return self.answer(wanted, *await self._claim(wanted))

    def wanted(self, given: ClaimInput) -> Wanted:
        """Give what a claim by the run of this activity asks for."""
        run_id = activity.info().workflow_run_id or ""
        token = Token(
            session_id=given.session_id,
            execution_id=derived_id("exe", given.session_id, run_id, given.ordinal),
            owner_id=run_id,
        )
        concern(execution=token.execution_id)
        limits = self._services.settings.limits
        return Wanted(
            token,
            force=given.force,
            reason=given.reason,
            max_continuations=limits.max_continuations,
            carried=given.carried,
        )

    def answer(self, wanted: Wanted, claimed: Claimed, seen: Seen | None = None) -> ClaimResult:
        """Log what the committed claim came to, and give it to the workflow."""
        _tell(wanted, seen, claimed)
        services, limits = self._services, self._services.settings.limits
        settings = contracts.Settings(
            heartbeat_timeout=limits.heartbeat_timeout_seconds,
            provider_timeout=limits.provider_timeout_seconds,
            tool_timeout=limits.tool_timeout_seconds,
            max_provider_attempts=limits.max_provider_attempts,
            max_run_events=limits.max_run_events,
            search_attributes=services.search_attributes,
            workspace_wait=limits.workspace_wait_seconds,
            workspace_absent=limits.workspace_absent,
        )
        return ClaimResult(
            token=wanted.token if claimed.held else None,
            exhausted=claimed.exhausted,
            repeated=claimed.repeated,
            carried=claimed.carried,
            settings=settings,
        )

    async def _claim(self, wanted: Wanted) -> tuple[Claimed, Seen | None]:
        """Claim; of another owner ask Temporal first, outside any transaction, and claim if it is still that one."""
        services, session_id = self._services, wanted.token.session_id
        seen = None
        for _ in range(_LOOKS):
            try:
                claimed: Claimed = await services.database.transact(
                    lambda conn, seen=seen: claims.claim(conn, wanted, seen, services.lease)  # type: ignore[misc]
                )
            except AskAgainError:
                async with services.database.read() as conn:
                    owner = await ownership.owner_of(conn, session_id)
                seen = None
                if owner is not None and owner.owner_id != wanted.token.owner_id:
                    seen = Seen(
                        owner, await state_of_run(services.temporal, session_id, owner.owner_id, wanted.token.owner_id)
                    )
                continue
            return claimed, seen
        raise ClaimRefusedError(f"session {session_id} changes hands too fast to be claimed")

    @activity.defn(name=contracts.RELEASE_SESSION)
    @guarded
    async def release_session(self, given: ReleaseInput) -> ReleaseResult:
        """Give the session back if there is nothing to run."""
        token = own_run(given.token)
        state = await self._services.database.transact(
            lambda conn: claims.release(conn, token, given.step, interrupted=given.interrupted)
        )
        outcome = "interrupted" if given.interrupted else recall("ended", token.execution_id)
        tell_release(str(outcome or "done"), state)
        return ReleaseResult(state=state)
