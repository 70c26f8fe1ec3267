"""Admission of what reaches the workflow: its start input, signals and updates."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.guard import guarded
from activities.ownership import OwnershipActivities
from fencepost.domain import contracts
from fencepost.domain.contracts import (
    AdmitInput,
    AdmitStart,
    AdmitStartResult,
    PlacedInterrupt,
    PlaceInterrupt,
    PromptInput,
    SessionInput,
)
from fencepost.domain.errors import ClaimRefusedError, DirectoryError, InvalidInputError, OwnershipLostError
from fencepost.domain.inbox import Location, Receipt
from fencepost.services import Services
from fencepost.store import event_log, inbox, interrupts, sessions
from fencepost.store.live import Notice
from fencepost.store.sessions import NewSession


class InboxActivities:
    """Local activities of the inbox."""

    def __init__(self, services: Services, ownership: OwnershipActivities) -> None:
        self._services = services
        self._ownership = ownership

    @activity.defn(name=contracts.ADMIT_START)
    @guarded
    async def admit_start(self, given: AdmitStart) -> AdmitStartResult:
        """Create the session unless it exists, admit the prompt of the start input, and claim the session if asked.

        The claim is a transaction of its own, so that an admission outlives a claim that is refused.
        """
        prompt = given.start.prompt
        if prompt is not None:
            self._check_size(prompt)

        async def work(conn: AsyncConnection) -> None:
            await self._create(conn, given.session_id, given.start.session or SessionInput())
            if prompt is not None:
                await self._admit(conn, given.session_id, given.input_id, prompt)

        await self._services.database.transact(work)
        self._services.announcer.send(given.session_id, Notice.look())
        if given.claim is None:
            return AdmitStartResult()
        try:
            return AdmitStartResult(claim=await self._ownership.claim(given.claim))
        except (ClaimRefusedError, OwnershipLostError):
            return AdmitStartResult()  # the workflow knows what to do about it

    async def _create(self, conn: AsyncConnection, session_id: str, wanted: SessionInput) -> None:
        if await event_log.latest(conn, session_id) >= 0:
            return
        new = NewSession(
            location=self._location(wanted.location), agent=wanted.agent, model=wanted.model, title=wanted.title
        )
        await sessions.create(conn, session_id, new)

    def _location(self, wanted: Location | None) -> Location:
        workspace = self._services.settings.workspace
        if wanted is None:
            if workspace.directory is None:
                raise InvalidInputError(
                    "the session has no directory: give session.location.directory in the start input, "
                    "or set workspace.directory for the worker"
                )
            wanted = Location(directory=str(workspace.directory), workspace_id=workspace.id)
        if not wanted.directory.startswith("/"):
            raise DirectoryError(f"the session's directory must be an absolute path, not {wanted.directory!r}")
        # A directory of another workspace is there for its own workers only.
        if wanted.workspace_id == workspace.id and not Path(wanted.directory).is_dir():
            raise DirectoryError(f"the session's directory {wanted.directory!r} does not exist: create it first")
        return wanted

    @activity.defn(name=contracts.ADMIT_INPUT)
    @guarded
    async def admit_input(self, given: AdmitInput) -> Receipt:
        """Admit one input that came by signal or update."""
        self._check_size(given.prompt)
        receipt = await self._services.database.transact(
            lambda conn: self._admit(conn, given.session_id, given.input_id, given.prompt)
        )
        self._services.announcer.send(given.session_id, Notice.look())
        return receipt

    @activity.defn(name=contracts.PLACE_INTERRUPT)
    @guarded
    async def place_interrupt(self, given: PlaceInterrupt) -> PlacedInterrupt:
        """Find the place in the log at which a user's interrupt is handled."""
        run_id = activity.info().workflow_run_id or ""
        async with self._services.database.read() as conn:
            place = await interrupts.place(conn, given.session_id, given.interrupt_id, run_id)
        return PlacedInterrupt(head=place.head, recorded=place.recorded)

    async def _admit(self, conn: AsyncConnection, session_id: str, input_id: str, prompt: PromptInput) -> Receipt:
        admission = await inbox.admit(
            conn, session_id, input_id, prompt.prompt(), prompt.delivery, resume=prompt.resume
        )
        return admission.receipt

    def _check_size(self, prompt: PromptInput) -> None:
        limit, size = self._services.settings.limits.prompt_bytes, len(prompt.model_dump_json(by_alias=True).encode())
        if size > limit:
            raise InvalidInputError(f"the prompt is {size} bytes, more than {limit}: attach a file instead")
