"""The project as files: what the house tests look at."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SHIPPED = ("fencepost", "workflows", "activities", "worker.py")


@cache
def pyproject() -> dict[str, Any]:
    """Give pyproject.toml as it is."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def shipped_modules() -> list[Path]:
    """Give every module that is installed, sorted."""
    found: list[Path] = []
    for name in _SHIPPED:
        path = ROOT / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return found


def test_modules() -> list[Path]:
    """Give every module under tests, sorted."""
    return sorted((ROOT / "tests").rglob("*.py"))


test_modules.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


@cache
def tree(path: Path) -> ast.Module:
    """Give the parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    """Give a module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Give line and full name of everything the module imports, inside functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def files() -> list[Path]:
    """Give every file that git has or would take, so that nothing installed or generated is looked at."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name and (ROOT / name).is_file()]
