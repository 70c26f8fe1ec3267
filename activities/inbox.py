"""Admission of what reaches the workflow: its start input, signals and updates."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.guard import guarded
from activities.model import Begun, ModelActivities
from activities.ownership import OwnershipActivities
from fencepost.domain import contracts
from fencepost.domain.contracts import (
    AdmitInput,
    AdmitStart,
    AdmitStartResult,
    PlacedInterrupt,
    PlaceInterrupt,
    PromptInput,
    Resolved,
    ResolveInput,
    SessionInput,
)
from fencepost.domain.errors import (
    ClaimRefusedError,
    DirectoryError,
    InvalidInputError,
    NotFoundError,
    OwnershipLostError,
    UnavailableError,
)
from fencepost.domain.inbox import Location, Receipt
from fencepost.services import Services
from fencepost.store import claims, event_log, inbox, interrupts, ownership, sessions
from fencepost.store.claims import AskAgainError, Claimed, Wanted
from fencepost.store.event_log import Head
from fencepost.store.live import Notice
from fencepost.store.ownership import Locked
from fencepost.store.sessions import NewSession

# Of the ten seconds that the activity has.
_BEGIN_SECONDS = 4.0


class SlowBeginningError(Exception):
    """Much has gathered in the inbox: the step is begun by itself."""


class InboxActivities:
    """Local activities of the inbox."""

    def __init__(self, services: Services, ownership_: OwnershipActivities, models: ModelActivities) -> None:
        self._services = services
        self._ownership = ownership_
        self._models = models

    @activity.defn(name=contracts.ADMIT_START)
    @guarded
    async def admit_start(self, given: AdmitStart) -> AdmitStartResult:
        """Create the session unless it exists, admit the prompt of the start input, and, if asked, claim the session
        and begin its first step.

        An admission outlives a claim that is refused, and both outlive a step that cannot be begun.
        """
        prompt = given.start.prompt
        if prompt is not None:
            self._check_size(prompt)
        wanted = self._ownership.wanted(given.claim) if given.claim is not None else None
        first = ResolveInput(token=wanted.token, step=1) if wanted is not None and given.begin else None

        async def work(
            conn: AsyncConnection, beginning: ResolveInput | None = first
        ) -> tuple[Claimed | None, Begun | None]:
            locked = await self._locked(conn, given, wanted)
            if prompt is not None:
                await self._admit(conn, given.session_id, given.input_id, prompt, locked.head if locked else None)
            if wanted is None or locked is None:
                return None, None
            claimed = None
            with suppress(AskAgainError, ClaimRefusedError, OwnershipLostError):
                claimed = await claims.claim(conn, wanted, None, self._services.lease, locked)
            # Whatever took the session over, or made this claim before, leaves the first step to be asked for.
            fresh = claimed is not None and claimed.held and locked.held is None and locked.ledger is None
            return claimed, await self._begin(conn, beginning) if beginning and fresh else None

        transact = self._services.database.transact
        try:
            claimed, begun = await transact(work)
        except UnavailableError:
            raise
        except Exception:
            if first is None:
                raise
            # Whatever it was, it comes again when the step is asked for by itself; a fault of the admission comes here.
            claimed, begun = await transact(lambda conn: work(conn, None))
        self._services.announcer.send(given.session_id, Notice.look())
        if given.claim is None or wanted is None:
            return AdmitStartResult()
        if claimed is not None:
            claim = self._ownership.answer(wanted, claimed)
            return AdmitStartResult(claim=claim, begun=self._resolved(first, begun))
        try:
            return AdmitStartResult(claim=await self._ownership.claim(given.claim))
        except (ClaimRefusedError, OwnershipLostError):
            return AdmitStartResult()  # the workflow knows what to do about it

    async def _begin(self, conn: AsyncConnection, first: ResolveInput) -> Begun:
        """Begin the first step, if that does not take so long that nothing would be admitted in the activity's time."""
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                return await self._models.prepare(conn, first)
        except TimeoutError as error:
            raise SlowBeginningError from error

    def _resolved(self, first: ResolveInput | None, begun: Begun | None) -> Resolved | None:
        if first is None or begun is None:
            return None
        try:
            return self._models.resolved(first, begun)
        except Exception:
            # A fault of ours must not end the run here, where what came along is not admitted yet. It comes again when
            # the step is asked for.
            return None

    async def _locked(self, conn: AsyncConnection, given: AdmitStart, wanted: Wanted | None) -> Locked | None:
        """Create the session unless it exists; for a claim, lock what it needs, before the admission locks the log."""
        if wanted is None:
            if await event_log.latest(conn, given.session_id) < 0:
                await self._create(conn, given)
            return None
        try:
            return await ownership.lock(conn, wanted.token)
        except NotFoundError:
            await self._create(conn, given)
            return await ownership.lock(conn, wanted.token)

    async def _create(self, conn: AsyncConnection, given: AdmitStart) -> None:
        asked = given.start.session or SessionInput()
        new = NewSession(
            location=self._location(asked.location), agent=asked.agent, model=asked.model, title=asked.title
        )
        await sessions.create(conn, given.session_id, new)

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

    async def _admit(
        self, conn: AsyncConnection, session_id: str, input_id: str, prompt: PromptInput, head: Head | None = None
    ) -> Receipt:
        admission = await inbox.admit(
            conn, session_id, input_id, prompt.prompt(), prompt.delivery, resume=prompt.resume, head=head
        )
        return admission.receipt

    def _check_size(self, prompt: PromptInput) -> None:
        limit, size = self._services.settings.limits.prompt_bytes, len(prompt.model_dump_json(by_alias=True).encode())
        if size > limit:
            raise InvalidInputError(f"the prompt is {size} bytes, more than {limit}: attach a file instead")
