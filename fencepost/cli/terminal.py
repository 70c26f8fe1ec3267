"""Where the command writes: data on standard output, everything else on standard error."""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import shutil
import sys
import threading
from pathlib import Path

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare() -> None:
    """Make the standard streams take every character, each line at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)


def plain(text: str) -> str:
    """Give the text without control characters, which could rewrite the terminal; line breaks and tabs stay."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Give the text in one line."""
    return " ".join(plain(text).split())


def width() -> int | None:
    """Give how many columns a line has, None where nothing limits it: COLUMNS says so, or else the terminal."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def cut(line: str) -> str:
    """Give the line as far as it fits, which a character of two columns may do badly."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - what only shows help needs none of it

    room = width()
    return line if room is None or cell_len(line) <= room else f"{set_cell_size(line, room - 1).rstrip()}…"


def is_interactive() -> bool:
    """Say whether somebody can be asked: the question goes to standard error."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Ask on standard error for yes or no; anything but yes is no. Standard output stays free of it."""
    sys.stderr.write(f"{one_line(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def is_read() -> bool:
    """Say whether somebody still reads standard output, as far as that can be seen without writing."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return True
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def command() -> str:
    """Give how this command is called from here, for advice: `fencepost` where the shell finds it."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{shlex.quote(_from_here(Path(sys.executable)))} -m fencepost.cli"
    found = shutil.which(started.name)
    if found is not None and Path(found).absolute() == started.absolute():
        return started.name
    return shlex.quote(_from_here(started))


def _from_here(path: Path) -> str:
    try:
        inside = path.absolute().relative_to(Path.cwd())
        return str(inside) if len(inside.parts) > 1 else f"./{inside}"
    except (ValueError, OSError):
        return str(path.absolute())


def out(line: str) -> None:
    """Write one line of data."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Notices:
    """Lines about what goes on, on standard error. Any thread may call it; a closed standard error ends nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(f"{one_line(line)}\n")
                sys.stderr.flush()
            except (OSError, ValueError):
                pass


def silence_output() -> None:
    """Send what is still to be written to standard output nowhere: its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
