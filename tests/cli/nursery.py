"""A process that has imported the command line and forks for each command: a whole process, without its slow start.

Read from standard input, one JSON object a line: what to run, and the files to use as standard streams. The answer is
the exit code, one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import fencepost.cli.doctor
import fencepost.cli.following
import fencepost.cli.records
import fencepost.cli.run
import fencepost.cli.sending  # noqa: F401 - all five are here to be there when a child needs them
from fencepost.cli.app import run_command_line
from tests.cli.command import Command, Ended

_SECONDS = 50


def _become(order: dict[str, Any]) -> None:
    for number, (name, flags) in enumerate(
        [("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT)]
    ):
        handle = os.open(order[name], flags, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = ["fencepost", *order["arguments"]]
    run_command_line()


def serve() -> None:
    """Run one command after another, until standard input ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class Nursery:
    """The process, as tests use it."""

    def __init__(self) -> None:
        line = [sys.executable, "-m", "tests.cli.nursery"]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True
        )

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=_SECONDS)

    def __call__(self, command: Command, *arguments: str, stdin: str = "") -> Ended:
        """Run the command to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: str(Path(folder, name)) for name in ("stdin", "stdout", "stderr")}
            Path(files["stdin"]).write_text(stdin, encoding="utf-8")
            # Lines are as long as they are, whatever the terminal of the tests is like.
            given = command.environ()
            environ = {name: given[name] for name in given if name != "COLUMNS" or name in command.variables}
            order = {"arguments": arguments, "environ": environ, "directory": str(command.directory)}
            self._process.stdin.write(f"{json.dumps(order | files)}\n")
            self._process.stdin.flush()
            overdue = threading.Timer(_SECONDS, os.killpg, (self._process.pid, signal.SIGKILL))  # the child too
            overdue.start()
            code = self._process.stdout.readline()
            overdue.cancel()
            assert code, f"{arguments} took more than {_SECONDS} s"
            out, err = (Path(files[name]).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return Ended(int(code), out, err)


if __name__ == "__main__":
    serve()
