"""Where a path of a tool call really leads: symbolic links and `..` resolved, inside the session's directory or not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fencepost.domain.tools import ToolFailure


@dataclass(frozen=True, slots=True)
class Place:
    """A resolved path. `resource` is what permission rules see: relative to the session's directory, or, when
    `outside`, absolute."""

    path: Path
    resource: str
    outside: bool

    def external(self, *, is_directory: bool = False) -> tuple[str, ...]:
        """Give the resources of `external_directory` that must be allowed first: none for a place inside."""
        if not self.outside:
            return ()
        return (str(self.path if is_directory else self.path.parent).rstrip("/") + "/*",)


def locate(directory: str, path: str) -> Place:
    """Resolve a path that is relative to the session's directory, or absolute.

    It need not exist: what exists of it is resolved, links included, and the rest is appended. Blocks on the file
    system. Raises ToolFailure for a path that no file can have.
    """
    try:
        root = Path(os.path.realpath(directory))
        real = Path(os.path.realpath(root / path))
    except ValueError as error:
        raise ToolFailure(f"Invalid tool input: path: {error}") from None
    except OSError as error:
        raise ToolFailure(f"Cannot resolve {path}: {error.strerror}") from None
    inside = real.is_relative_to(root)
    return Place(real, str(real.relative_to(root) if inside else real), not inside)
