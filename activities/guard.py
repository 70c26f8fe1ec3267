"""The frame of every activity: domain errors become failures with stable types, and long work beats and renews.

A long activity holds its session only while it can prove it: it beats towards Temporal while its last
renewal in the database is fresh, and stops at once, writing nothing, when the database says that it lost ownership.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity
from temporalio.exceptions import ApplicationError

from fencepost.domain.contracts import WORKER_SHUTDOWN
from fencepost.domain.errors import FencepostError, OwnershipLostError, UnavailableError
from fencepost.domain.ownership import Token
from fencepost.services import Services
from fencepost.store import ownership
from fencepost.telemetry import concern, get_logger, mark_told

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

TRUSTED_SECONDS = 20.0
_FIRST_BEAT = 0.1
# Of one process. Each is a request to Temporal: with hundreds of streams they would crowd everything else out.
_BEATS_A_SECOND = 200
_KEEPERS: WeakSet[Keeper] = WeakSet()

_log = get_logger("fencepost.activities")

activity.logger.activity_info_on_message = False  # what it would add to each line is in the fields that `_concern` adds


def guarded(
    function: Callable[Parameters, Awaitable[Result]],
) -> Callable[Parameters, Awaitable[Result]]:
    """Turn domain errors into ApplicationError, with the error's code as its type. Put it under `activity.defn`.

    Each of them is one line of the log, and every line of the activity says what it is about.
    """

    @wraps(function)
    async def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        _concern(args[-1])
        try:
            return await function(*args, **kwargs)
        except FencepostError as error:
            event = "ownership lost" if isinstance(error, OwnershipLostError) else "activity refused"
            _log.warning(event, kind=error.code, error=error.message)
            failure = ApplicationError(error.message, type=error.code, non_retryable=not error.retryable)
            mark_told(failure)
            raise failure from error
        except ApplicationError as error:
            if error.type == WORKER_SHUTDOWN:
                _log.info("work handed over", reason=error.message)
                mark_told(error)
            raise

    return call


def _concern(given: object) -> None:
    """Say in every line of this activity, whoever writes it, which session, turn, execution and step it is about."""
    if not activity.in_activity():
        return
    info = activity.info()
    about = {"session": info.workflow_id, "turn": info.workflow_run_id, "activity": info.activity_type}
    if (token := getattr(given, "token", None)) is not None:
        about["execution"] = token.execution_id
    if (step := getattr(given, "step", None)) is not None:
        about["step"] = step
    concern(**about)


def own_run(token: Token) -> Token:
    """Give the token, if this activity's run is its owner.

    After a reset the history of the old run is replayed under the new run's id, and hands out the old run's token.
    Raises OwnershipLostError then.
    """
    run_id = activity.info().workflow_run_id
    if token.owner_id != run_id:
        raise OwnershipLostError(f"run {run_id} holds a token of run {token.owner_id}: it has to claim again")
    return token


class Keeper:
    """Beats and renews beside a long activity, and knows why it is being stopped."""

    def __init__(self, services: Services, token: Token) -> None:
        self._services = services
        self._token = token
        self._body = asyncio.current_task()
        self._renewed = asyncio.get_running_loop().time()
        self.lost = False
        _KEEPERS.add(self)

    @property
    def trusted(self) -> bool:
        """Say whether ownership can be believed in without asking: it was renewed lately, by this process's clock."""
        return not self.lost and asyncio.get_running_loop().time() - self._renewed < TRUSTED_SECONDS

    @property
    def stale(self) -> bool:
        """Say whether somebody else may own the session: the database said so, or Temporal knows this activity no more.
        Whoever is stale writes nothing, not even what the fence would still let in."""
        return self.lost or _gone()

    def stop(self) -> None:
        """Stop the activity's body; it knows why."""
        assert self._body is not None
        self._body.cancel()

    def renewed(self) -> None:
        """Note that the lease was just renewed or proved in a transaction."""
        self._renewed = asyncio.get_running_loop().time()

    async def beat(self) -> None:
        """Beat until cancelled. Silence is the signal: a worker that cannot renew is taken for lost, as it should.

        A beat is a request to Temporal, so what is over at once does without.
        """
        await asyncio.sleep(_FIRST_BEAT)
        while True:
            if self.trusted:
                activity.heartbeat()
            limits = self._services.settings.limits
            crowded = min(len(_KEEPERS) / _BEATS_A_SECOND, limits.heartbeat_timeout_seconds / 4)
            await asyncio.sleep(max(limits.heartbeat_seconds, crowded))

    async def renew(self) -> None:
        """Renew until cancelled, or until ownership is lost, which stops the activity's body."""
        while True:
            await asyncio.sleep(self._services.settings.limits.renew_seconds)
            try:
                await self._services.database.transact(self._renew_once)
                self.renewed()
            except UnavailableError as error:
                _log.warning("lease not renewed", session=self._token.session_id, error=error.message)
            except OwnershipLostError:
                self.lost = True
                self.stop()
                return

    async def _renew_once(self, conn: AsyncConnection) -> None:
        held = await ownership.hold(conn, self._token)
        await ownership.renew(conn, held, self._services.lease)


@asynccontextmanager
async def kept(services: Services, token: Token) -> AsyncIterator[Keeper]:
    """Keep a long activity's claim for as long as its body runs, from the first line on.

    A worker's shutdown cancels the body, as does a lost claim and a cancellation by the workflow; which it was comes
    out as the failure: WorkerShutdown, OwnershipLostError, or the cancellation itself.
    """
    keeper = Keeper(services, token)
    body = asyncio.current_task()
    assert body is not None
    draining = False

    async def drain() -> None:
        nonlocal draining
        await activity.wait_for_worker_shutdown()
        draining = True
        body.cancel()

    tasks = [asyncio.create_task(work) for work in (keeper.beat(), keeper.renew(), drain())]
    try:
        yield keeper
    except asyncio.CancelledError:
        if keeper.stale:
            raise OwnershipLostError(f"execution {token.execution_id} lost session {token.session_id}") from None
        if draining and not _cancel_requested():
            raise ApplicationError("the worker shuts down", type=WORKER_SHUTDOWN) from None
        raise
    finally:
        _KEEPERS.discard(keeper)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def _details() -> Any:
    return activity.cancellation_details()


def _gone() -> bool:
    """Temporal knows this activity no more: it timed out, or its run was reset, terminated or closed."""
    details = _details()
    return details is not None and bool(details.not_found or details.timed_out or details.reset)


def _cancel_requested() -> bool:
    details = _details()
    return details is not None and bool(details.cancel_requested)
