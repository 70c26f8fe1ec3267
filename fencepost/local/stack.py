"""The local stack as a whole: taken by its users one after another or side by side, ended by the last one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local import temporal
from fencepost.local.postgres import PostgresServer
from fencepost.local.processes import start_mark
from fencepost.local.state import Holder, StackState, StateFile


def _silent(line: str) -> None:
    del line


class LocalStack:
    """PostgreSQL and Temporal in one home directory, for the time of a `with` or `async with` block.

    The first user starts what does not run, further users share it, and the last one to leave stops it. A user that
    was killed is noticed by the next one, which takes over the servers that still run. State in `home` survives.

    `postgresql` and `temporal` say which of the two are wanted. `fast` gives up safety against a crash of the machine
    (for tests). A port of None is the one of last time, else the usual one or any that is free; 0 is any; another
    number is that one or a ConfigurationError. `progress` is given a line before and after whatever takes time.
    """

    def __init__(
        self,
        home: Path,
        *,
        postgresql: bool = True,
        temporal: bool = True,
        fast: bool = False,
        temporal_port: int | None = None,
        ui_port: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.home = home.expanduser().absolute()
        self._wants_postgresql, self._wants_temporal = postgresql, temporal
        self._fast = fast
        self._ports = (temporal_port, ui_port)
        self._progress = progress or _silent
        self._token: str | None = None
        self._database_url: str | None = None
        self._addresses: tuple[int, int] | None = None
        self.others: tuple[Holder, ...] = ()
        """Who used the stack already when this user came."""

    @property
    def database_url(self) -> str:
        """SQLAlchemy's URL of the database, for asyncpg. Raises UnavailableError while it is not started."""
        if self._database_url is None:
            raise UnavailableError("PostgreSQL of the local stack is not started")
        return self._database_url

    @property
    def temporal_address(self) -> str:
        """Host and port of Temporal's gRPC service. Raises UnavailableError while it is not started."""
        return f"{temporal.HOST}:{self._port(0)}"

    @property
    def ui_url(self) -> str:
        """URL of the Temporal UI. Raises UnavailableError while it is not started."""
        return f"http://{temporal.HOST}:{self._port(1)}"

    def _port(self, which: int) -> int:
        if self._addresses is None:
            raise UnavailableError("Temporal of the local stack is not started")
        return self._addresses[which]

    def start(self) -> None:
        """Become a user of the stack, starting what does not run. A second call does nothing.

        Raises ConfigurationError when this machine or home cannot run it, and UnavailableError when a server does
        not come up. Then nothing stays running that was not running before.
        """
        if self._token is not None:
            return
        _make_home(self.home)
        file = StateFile(self.home)
        with file.locked(lambda: self._progress("waiting for another fencepost that starts or stops the local stack")):
            state = file.read()
            self.others = state.holders
            try:
                state = self._start_servers(state)
                holder = Holder(token=secrets.token_hex(8), pid=os.getpid(), started=start_mark(os.getpid()) or "")
                file.write(state.model_copy(update={"holders": (*state.holders, holder)}))
                self._token = holder.token
            except BaseException:
                self._forget()
                if not state.holders:
                    _stop_servers(self.home)
                raise

    def stop(self) -> None:
        """Stop being a user of the stack; the last one ends the servers, Temporal first. A second call does nothing."""
        if self._token is None:
            return
        file = StateFile(self.home)
        with file.locked(lambda: None):
            state = file.read()
            left = tuple(one for one in state.holders if one.token != self._token)
            if not left:
                _stop_servers(self.home)
            file.write(state.model_copy(update={"holders": left}))
        self._token = None
        self._forget()

    def _start_servers(self, state: StackState) -> StackState:
        if self._wants_postgresql:
            server = PostgresServer(self.home)
            if not server.running():
                with self._phase("PostgreSQL"):
                    server.start(fast=self._fast)
            self._database_url = server.url
        if self._wants_temporal:
            self._addresses = self._start_temporal(state)
            state = state.model_copy(update={"temporal_port": self._addresses[0], "ui_port": self._addresses[1]})
        return state

    def _start_temporal(self, state: StackState) -> tuple[int, int]:
        server = temporal.TemporalServer(self.home)
        running = server.running()
        if running is not None:
            for wanted, port in zip(self._ports, running, strict=True):
                if wanted and wanted != port:
                    self._progress(
                        f"port {wanted} is not taken: Temporal runs already, at {running[0]} and {running[1]}"
                    )
            return running
        port = temporal.choose_port(self._ports[0], state.temporal_port, temporal.PORT, self._progress, "Temporal")
        ui_port = temporal.choose_port(
            self._ports[1], state.ui_port, temporal.UI_PORT, self._progress, "the Temporal UI"
        )
        with self._phase("Temporal"):
            server.start(port, ui_port)
        return port, ui_port

    @contextlib.contextmanager
    def _phase(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        self._progress(f"starting {what} ...")
        yield
        self._progress(f"{what} is ready ({time.monotonic() - begun:.1f} s)")

    def _forget(self) -> None:
        self._database_url = self._addresses = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread goes on whatever happens here: wait for it, then leave what it took.
            with contextlib.suppress(Exception):
                await starting
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.stop))


def sweep(home: Path) -> bool:
    """End servers in a home whose users are all gone; say whether the home is unused now."""
    if not home.is_dir():
        return True
    file = StateFile(home)
    with file.locked(lambda: None):
        state = file.read()
        if not state.holders:
            _stop_servers(home)
            file.write(state)
        return not state.holders


def _stop_servers(home: Path) -> None:
    """End both servers, whoever started them: first Temporal, whose work may still reach for the database."""
    temporal.TemporalServer(home).stop()
    PostgresServer(home).stop()


def _make_home(home: Path) -> None:
    missing = [folder for folder in (home, *home.parents) if not folder.exists()]
    try:
        home.mkdir(parents=True, exist_ok=True)
        # As root others may pass through what we made, for PostgreSQL's sake, but not look around.
        for folder in missing:
            folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise ConfigurationError(
            f"{home}: cannot be made ({error.strerror}): set FENCEPOST_HOME to a directory of yours"
        ) from None
