"""The glob and grep tools: what they find, what they leave out, and that they always end."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from fencepost.domain.permissions import Rule
from fencepost.domain.tools import ToolFailure
from fencepost.tools.registry import Registry
from fencepost.tools.search import search_tools
from fencepost.tools.search_process import glob_expression
from tests.tools.conftest import ALLOW_OUTSIDE, Workspace, text_of, wait_until


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "x.py", True),
        ("*.py", "a/b/x.py", True),
        ("/*.py", "a/x.py", False),
        ("**/*.py", "x.py", True),
        ("a/**", "a/b/c", True),
        ("a/*.py", "a/b/x.py", False),
        ("a/**/x", "a/x", True),
        ("*.{ts,tsx}", "m.tsx", True),
        ("*.{ts,tsx}", "m.js", False),
        ("[!a]?", "bc", True),
        ("[!a]?", "ac", False),
        ("[]a]", "]", True),
        ("a[", "a[", True),
        ("a.c", "abc", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert (re.compile(glob_expression(pattern)).match(path) is not None) is expected


async def test_vendor_directories_are_left_out(workspace: Workspace) -> None:
    for package in range(60):
        folder = workspace.root / f"node_modules/p{package}"
        folder.mkdir(parents=True)
        for number in range(20):
            (folder / f"{number}.py").write_text("needle")
    (workspace.root / "x.py").write_text("needle")
    assert text_of(await workspace.call("glob", pattern="**/*.py")) == "x.py"
    assert text_of(await workspace.call("grep", pattern="needle")) == "x.py:1: needle"
    inside = await workspace.call("glob", pattern="node_modules/p1/1.*")
    assert text_of(inside) == "node_modules/p1/1.py"
    assert inside.structured == {"count": 1, "complete": True}


async def test_results_are_in_the_order_of_paths_and_limited_with_a_notice(workspace: Workspace) -> None:
    for name in ("b/2.txt", "a/1.txt", "0.txt", "b/1.txt"):
        path = workspace.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("one\ntwo needle\n")
    assert text_of(await workspace.call("glob", pattern="*.txt")) == "0.txt\na/1.txt\nb/1.txt\nb/2.txt"
    limited = await workspace.call("grep", pattern="need.e", limit=2, include="*/*.txt")
    assert text_of(limited).startswith("a/1.txt:2: two needle\nb/1.txt:2: two needle\n[stopped at 2 results")
    assert limited.structured["complete"] is False
    exact = await workspace.call("grep", pattern="needle", limit=4)
    assert exact.structured == {"count": 4, "complete": True}
    assert text_of(await workspace.call("grep", pattern="need", path="b/2.txt")) == "b/2.txt:2: two needle"
    assert text_of(await workspace.call("grep", pattern="nothing")) == "No matches found"
    with pytest.raises(ToolFailure, match="File not found: nosuch"):
        await workspace.call("grep", pattern="a", path="nosuch")


async def test_binaries_links_and_huge_files_are_left_out_and_long_lines_cut(workspace: Workspace) -> None:
    (workspace.root / "a.bin").write_bytes(b"needle\0")
    (workspace.root / "b.txt").write_bytes(b"\xff" + b"x" * 5000 + b"needle" + b"y" * 5000)
    (workspace.root / "link").symlink_to("b.txt")
    with (workspace.root / "huge.txt").open("wb") as handle:
        handle.write(b"needle")
        handle.truncate(30 * 1024 * 1024)
    text = text_of(await workspace.call("grep", pattern="needle"))
    assert text.startswith("b.txt:1: xxx")
    assert "needle" in text
    assert "[1 files over 20 MiB were not searched]" in text
    assert len(text) < 600


async def test_lines_of_files_that_may_not_be_read_are_not_shown(workspace: Workspace) -> None:
    (workspace.root / ".env").write_text("KEY=secret")
    (workspace.root / "a.txt").write_text("KEY=none")
    text = text_of(await workspace.call("grep", pattern="KEY"))
    assert "secret" not in text
    assert "[matches in 1 files are not shown" in text
    assert "secret" in text_of(await workspace.call("grep", Rule(action="read", effect="allow"), pattern="KEY"))


async def test_an_invalid_expression_is_a_failure_of_one_line(workspace: Workspace) -> None:
    with pytest.raises(ToolFailure, match=r"^Invalid pattern: .*unterminated.*$"):
        await workspace.call("grep", pattern="(a")


async def test_a_root_or_pattern_outside_needs_a_rule(workspace: Workspace, tmp_path: Path) -> None:
    calls = ({"pattern": "/tmp/none/*.png", "path": "/"}, {"pattern": "../*"}, {"pattern": "*", "path": str(tmp_path)})
    for arguments in calls:
        with pytest.raises(ToolFailure, match="external_directory"):
            await workspace.call("glob", **arguments)
    assert text_of(await workspace.call("glob", ALLOW_OUTSIDE, **calls[0])) == "No files found"
    (tmp_path / "f.txt").write_text("needle")
    found = await workspace.call("grep", ALLOW_OUTSIDE, pattern="needle", path="..")
    assert text_of(found) == f"{tmp_path}/f.txt:1: needle"


def _searchers(needle: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"search_process" in line and needle.encode() in line:
            found.append(folder.name)
    return found


async def test_an_endless_expression_ends_with_its_time_and_keeps_what_was_found(
    workspace: Workspace,
) -> None:
    workspace.registry = Registry(search_tools(seconds=0.5))
    (workspace.root / "a.txt").write_text("aaX\n" + "a" * 60 + "!\n")
    output = await workspace.call("grep", pattern="(a+)+[X]$")
    assert text_of(output).startswith("a.txt:1: aaX\n[stopped after")
    assert output.structured == {"count": 1, "complete": False}


async def test_cancellation_ends_the_search_process(workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("a" * 60 + "!\n")
    task = asyncio.create_task(workspace.call("grep", pattern="(a+)+[Y]$"))
    await asyncio.to_thread(wait_until, lambda: _searchers("[Y]"))
    begin = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begin < 1.5
    assert _searchers("[Y]") == []
