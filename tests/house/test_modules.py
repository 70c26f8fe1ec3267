"""Rules about modules that no linter knows: their size, their names, who may import what."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.house.project import ROOT, imported, name_of, pyproject, shipped_modules, tree

MODULE_LINES = 400
FUNCTION_LINES = 60
WORKER_LINES = 60
NAMES_THAT_SAY_NOTHING = {"base", "common", "helpers", "manager", "utils", "util", "misc"}
OURS = {"activities", "fencepost", "worker", "workflows"}
LIBRARIES = {
    # The longest matching package decides. Libraries not named here may be imported by none of its modules.
    "fencepost.domain": {"pydantic"},
    "workflows": {"temporalio"},
    "activities": {"temporalio", "pydantic", "sqlalchemy", "structlog"},
    "fencepost.store": {"sqlalchemy", "asyncpg", "alembic", "pydantic", "pydantic_core"},
    "fencepost.providers": {"httpx2", "h11", "pydantic", "pydantic_core"},
    "fencepost.tools": {"pydantic", "pydantic_core"},
    "fencepost.local": {"pydantic"},
    "fencepost.cli": {"typer", "click", "rich", "pydantic", "temporalio"},
    "fencepost.config": {"pydantic", "pydantic_core", "pydantic_settings", "platformdirs", "temporalio"},
    "fencepost.config_errors": {"pydantic", "pydantic_core"},
    "fencepost.clock": set(),
    "fencepost.presets": set(),
    "fencepost.telemetry": {"structlog"},
    "fencepost": {"temporalio", "pydantic", "sqlalchemy", "asyncpg", "structlog", "httpx2"},
    "worker": {"temporalio"},
}


def test_no_module_is_longer_than_its_limit() -> None:
    """A module can be read in one sitting."""
    sizes = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in shipped_modules()}
    too_long = {name: lines for name, lines in sizes.items() if lines > MODULE_LINES}

    assert too_long == {}


def test_no_function_is_longer_than_its_limit() -> None:
    """A function fits on a screen, its decorators and docstring included."""
    too_long = []
    for path in shipped_modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                lines = (node.end_lineno or node.lineno) - first + 1
                if lines > FUNCTION_LINES:
                    too_long.append(f"{name_of(path)}.{node.name}: {lines}")

    assert too_long == []


def test_the_worker_entry_is_short() -> None:
    """The process's entry only puts parts together."""
    worker = ROOT / "worker.py"

    assert worker.exists()
    assert len(worker.read_text(encoding="utf-8").splitlines()) <= WORKER_LINES


def test_module_names_say_something() -> None:
    """A name such as `utils` says where things were put, not what they are."""
    parts = {name: set(name.split(".")) & NAMES_THAT_SAY_NOTHING for name in map(name_of, shipped_modules())}

    assert {name: bad for name, bad in parts.items() if bad} == {}


def _libraries_for(module: str) -> set[str]:
    fitting = [package for package in LIBRARIES if module == package or module.startswith(f"{package}.")]
    return LIBRARIES[max(fitting, key=len)]


def test_each_layer_uses_only_its_libraries() -> None:
    """Which third-party library a layer may import is decided once, here."""
    wrong = []
    for path in shipped_modules():
        module = name_of(path)
        for line, name in imported(path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names | OURS and top not in _libraries_for(module):
                wrong.append(f"{module}:{line} imports {top}")

    assert sorted(set(wrong)) == []


def test_nobody_imports_the_worker() -> None:
    """The entry is started, not imported: `python -m worker`."""
    assert [name_of(path) for path in shipped_modules() if "worker" in {name for _, name in imported(path)}] == []


def test_declared_packages_are_those_that_exist() -> None:
    """The distribution holds every package of ours, and no other."""
    declared = set(pyproject()["tool"]["setuptools"]["packages"])
    existing = {
        ".".join(folder.relative_to(ROOT).parts)
        for path in shipped_modules()
        if (folder := path.parent) != ROOT and path.name == "__init__.py"
    }
    # Folders of migrations are packages only by being listed: alembic reads them as files.
    folders = {".".join(Path(path).parent.relative_to(ROOT).parts) for path in shipped_modules()} - {""}

    assert existing <= declared
    assert declared == folders


def test_every_module_has_a_docstring() -> None:
    """The first line of a module says what it is for; an empty `__init__` needs none."""
    silent = [
        name_of(path)
        for path in shipped_modules()
        if path.read_text(encoding="utf-8").strip() and ast.get_docstring(tree(path)) is None
    ]

    assert silent == []
