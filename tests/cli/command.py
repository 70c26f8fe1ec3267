"""The fencepost command as a process of its own, the way people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fencepost.local.postgres import PostgresServer
from fencepost.local.temporal import TemporalServer

_SECONDS = 50


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def objects(self) -> list[dict[str, Any]]:
        """Give standard output as one JSON object a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    def complaint(self) -> str:
        """Give the one line on standard error. Fails when there is another, or a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@dataclass(frozen=True, slots=True)
class Command:
    """Runs fencepost with its state in `home`, in `directory`."""

    home: Path
    directory: Path
    variables: Mapping[str, str]

    def environ(self) -> dict[str, str]:
        """Give the environment of the process."""
        return {**os.environ, "FENCEPOST_HOME": str(self.home), **self.variables}

    def given(self, **variables: str) -> Command:
        """Give the same command with more variables."""
        return Command(self.home, self.directory, {**self.variables, **variables})

    def __call__(self, *arguments: str, stdin: str | None = None) -> Ended:
        """Run the command to its end."""
        done = subprocess.run(
            self._line(arguments),
            check=False,
            cwd=self.directory,
            env=self.environ(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start the command for the time of the block; one that is still there afterwards is told to stop."""
        process = subprocess.Popen(
            self._line(arguments),
            cwd=self.directory,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_SECONDS)

    @staticmethod
    def _line(arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "fencepost.cli", *arguments]


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a started command."""
    out, err = process.communicate(timeout=_SECONDS)
    return Ended(process.returncode, out, err)


def read_until(stream: IO[str] | None, text: str) -> str:
    """Read lines until one holds the text. Fails when the stream ends before."""
    assert stream is not None
    read = ""
    for line in stream:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never came: {read}")


def left_behind(home: Path) -> list[str]:
    """Give what still runs of a home: its servers, and on Linux every process that was started with it."""
    left = [
        name
        for name, running in (
            ("PostgreSQL", PostgresServer(home).running()),
            ("Temporal", TemporalServer(home).running() is not None),
        )
        if running
    ]
    mark = f"FENCEPOST_HOME={home}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return left
