"""Where the command writes: data on standard output, everything else on standard error."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

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

    def progress(self, line: str) -> None:
        """Write a line that only somebody who waits wants to read: nothing where standard error is no terminal."""
        if sys.stderr.isatty():
            self(line)


def silence_output() -> None:
    """Send what is still to be written to standard output nowhere: its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
