"""The fencepost command."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process."""
    from fencepost.cli.app import run_command_line  # noqa: PLC0415 - importing this package alone stays cheap

    run_command_line()
