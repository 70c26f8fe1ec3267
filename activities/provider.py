"""One provider request: fence and intent, then the stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from temporalio import activity
from temporalio.service import RPCError

from activities.guard import Keeper, guarded, kept, own_run
from activities.publisher import StepPublisher
from fencepost.domain import contracts
from fencepost.domain import stream as s
from fencepost.domain.contracts import Announcement, CallRef, StreamInput, StreamResult
from fencepost.domain.errors import ModelUnavailableError, ProviderError
from fencepost.domain.models import ModelRequest
from fencepost.domain.transcript import read_model_messages
from fencepost.providers import catalog
from fencepost.services import Services
from fencepost.store import readers, steps
from fencepost.telemetry import get_logger

# A call that comes with the stream's end needs no announcement: the result lists it. Waiting this long tells.
_ANNOUNCE_AFTER = 0.02

_log = get_logger("fencepost.provider")


class ProviderActivities:
    """The activity that streams. It has one attempt: what may be repeated is decided by the workflow."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @activity.defn(name=contracts.STREAM_PROVIDER)
    @guarded
    async def stream_provider(self, given: StreamInput) -> StreamResult:
        """Make one request of the model and publish its answer. A failed request is a result, not an error."""
        token = own_run(given.token)
        async with kept(self._services, token) as keeper:
            if given.delay:
                await asyncio.sleep(given.delay)
            return await _Attempt(self._services, given, keeper).run()


class _Attempt:
    def __init__(self, services: Services, given: StreamInput, keeper: Keeper) -> None:
        self._services = services
        self._given = given
        self._keeper = keeper
        self._finished = False
        self._announcing: set[asyncio.Task[None]] = set()
        self._publisher = StepPublisher(
            services,
            given,
            announce=self._announce,
            trusted=lambda: keeper.trusted,
            proved=keeper.renewed,
            failed=keeper.stop,
        )

    async def run(self) -> StreamResult:
        preparing = asyncio.create_task(self._request())
        try:
            await self._intend()
            request, key = await preparing
        except (ProviderError, ModelUnavailableError) as error:
            return await self._failed(error)
        finally:
            preparing.cancel()
        try:
            failure = await self._stream(request, key)
        except ProviderError as error:
            return await self._failed(error)
        except asyncio.CancelledError:
            if self._publisher.error is not None:
                raise self._publisher.error from None  # what could not be appended stopped the stream
            raise
        finally:
            self._finished = True
        if failure is not None:
            return await self._failed(failure)
        return self._done(request)

    async def _intend(self) -> None:
        given, lease = self._given, self._services.lease
        await self._services.database.transact(
            lambda conn: steps.request(conn, given.token, given.step, given.attempt, lease), alone=True
        )
        self._keeper.renewed()

    async def _request(self) -> tuple[ModelRequest, str | None]:
        services, plan = self._services, self._given.plan
        provider, config = services.catalog.resolve(plan.model)
        key = catalog.api_key(plan.model.provider_id, provider, services.environ)
        async with services.database.read() as conn:
            sent = await readers.sent(conn, self._given.token.session_id)
        agent = services.settings.agents.get(plan.agent)
        own = agent.system.strip() if agent is not None else ""
        request = ModelRequest(
            model=plan.model,
            provider=provider,
            config=config,
            messages=read_model_messages(sent.messages, plan.model),
            system=tuple(text for text in (own, sent.baseline) if text),
            tools=services.registry.definitions(services.rules(agent), plan.tools),
            cache_key=self._given.token.session_id,
        )
        return request, key

    async def _stream(self, request: ModelRequest, key: str | None) -> s.ProviderErrorEvent | None:
        """Give the error that the provider reported inside its stream, None when the stream ended well."""
        publisher, failure = self._publisher, None
        keeping = asyncio.create_task(publisher.keep())
        try:
            adapter = catalog.adapter(request.provider.protocol)
            async with aclosing(adapter(self._services.http, request, key)) as stream:
                async for event in stream:
                    if isinstance(event, s.ProviderErrorEvent):
                        failure = event
                        break
                    publisher.take(event)
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            # Also when cancelled: what was shown stays, and the transcript stays valid.
            if not self._keeper.stale:
                await publisher.close_parts()
        return failure

    async def _failed(self, error: ProviderError | ModelUnavailableError | s.ProviderErrorEvent) -> StreamResult:
        if isinstance(error, s.ProviderErrorEvent):
            transient, retry_after = error.retryable, None
        elif isinstance(error, ProviderError):
            transient, retry_after = error.transient, error.retry_after
        else:
            transient, retry_after = False, None
        publisher, given = self._publisher, self._given
        if not publisher.started:
            await self._services.database.transact(
                lambda conn: steps.attempt_failed(conn, given.token, given.step, given.attempt)
            )
        _log.warning(
            "provider request failed",
            kind=error.reason if isinstance(error, ProviderError) else type(error).__name__,
            status=getattr(error, "status", None),
            attempt=given.attempt,
            transient=transient,
            retry_after=retry_after,
        )
        return StreamResult(
            ok=False,
            error=error.message,
            output=publisher.started,
            transient=transient,
            retry_after=retry_after,
            calls=tuple(publisher.calls),
            local_calls=publisher.local_calls,
        )

    def _done(self, request: ModelRequest) -> StreamResult:
        publisher = self._publisher
        finish = publisher.finish
        usage = finish.usage if finish is not None else None
        return StreamResult(
            ok=True,
            finish=finish.reason if finish is not None else "unknown",
            tokens=catalog.tokens(usage),
            cost=catalog.cost(request.config, usage),
            calls=tuple(publisher.calls),
            local_calls=publisher.local_calls,
        )

    def _announce(self, call: CallRef) -> None:
        task = asyncio.create_task(self._signal(call))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _signal(self, call: CallRef) -> None:
        """Tell the own run of a call while the stream goes on. May be lost: the result lists every call."""
        await asyncio.sleep(_ANNOUNCE_AFTER)
        if self._finished or not self._keeper.trusted:
            return
        info, token = activity.info(), self._given.token
        assert info.workflow_id is not None
        handle = self._services.temporal.get_workflow_handle(info.workflow_id, run_id=info.workflow_run_id)
        said = Announcement(execution_id=token.execution_id, step=self._given.step, call=call)
        try:
            await handle.signal(contracts.SIGNAL_ANNOUNCE, said)
        except RPCError as error:
            _log.debug("tool call not announced", error=str(error))
