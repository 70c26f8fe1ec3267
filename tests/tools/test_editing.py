"""The write and edit tools: exact spans, kept bytes, refusals that leave the file alone."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest

from fencepost.domain.tools import ToolFailure
from fencepost.tools.editing import splice
from tests.tools.conftest import ALLOW_OUTSIDE, Workspace, text_of


def _splice(raw: bytes, old: str, new: str, *, replace_all: bool = False) -> bytes:
    return splice(raw, old, new, "f", replace_all=replace_all)[0]


async def test_an_edit_keeps_mixed_line_ends(workspace: Workspace) -> None:
    path = workspace.root / "f.txt"
    path.write_bytes(b"alpha\r\nbeta\r\ngamma\n")
    await workspace.call("edit", path="f.txt", oldString="alpha\nbeta", newString="ALPHA\nBETA")
    assert path.read_bytes() == b"ALPHA\r\nBETA\r\ngamma\n"
    await workspace.call("edit", path="f.txt", oldString="ALPHA\nBETA", newString="a\nb", replaceAll=True)
    assert path.read_bytes() == b"a\r\nb\r\ngamma\n"


@pytest.mark.parametrize(
    ("raw", "old", "new", "after"),
    [
        (b"a\r\nb\r\n", "a\r\nb", "a\nx\nb", b"a\r\nx\r\nb\r\n"),
        (b"a\nb\n", "a\r\nb", "c\r\nd", b"c\nd\n"),
        (b"a\nb\r\nc\n", "a\nb\nc", "a\nB\nc", b"a\nB\r\nc\n"),
        (b"a\nb\r\nc", "\nb\n", "", b"ac"),
        (b"one two\r\n", "two", "2\n3", b"one 2\r\n3\r\n"),
        (b"\xff\xfe\r\nkey=1\r\n\xe9", "key=1", "key=2", b"\xff\xfe\r\nkey=2\r\n\xe9"),
        ("ä\r\nö".encode(), "ö", "õ", "ä\r\nõ".encode()),
        (b"x\r\r\ny", "\ny", "\nz", b"x\r\r\nz"),
    ],
)
def test_a_splice_changes_only_what_differs(raw: bytes, old: str, new: str, after: bytes) -> None:
    assert _splice(raw, old, new) == after


def test_replace_all_takes_each_place_with_its_own_line_ends() -> None:
    assert _splice(b"a\nb a\r\nb", "a\nb", "x\ny", replace_all=True) == b"x\ny x\r\ny"


@pytest.mark.parametrize(
    ("content", "old", "words"),
    [
        ("x = 1\nx = 1\nx = 1\n", "x = 1\nx = 1", "ambiguous in f: 2 matches, at lines 1, 2"),
        ("aaa", "aa", "ambiguous"),
        ("alpha   beta\nalpha\tbeta\n", "alpha beta", "not found exactly in f.*white space, begins at line 1, 2"),
        ("one", "two", "not found exactly"),
        ("one", "one", "nothing to change"),
    ],
)
async def test_an_unclear_edit_leaves_the_file_alone(workspace: Workspace, content: str, old: str, words: str) -> None:
    path = workspace.root / "f"
    path.write_text(content)
    before = path.stat()
    with pytest.raises(ToolFailure, match=words):
        await workspace.call("edit", path="f", oldString=old, newString="one")
    assert path.read_text() == content
    assert path.stat().st_ino == before.st_ino


async def test_edits_of_one_file_at_the_same_time_are_all_kept(workspace: Workspace) -> None:
    (workspace.root / "f").write_text("".join(f"<{number}>\n" for number in range(20)))
    await asyncio.gather(
        *(workspace.call("edit", path="f", oldString=f"<{number}>", newString=f"[{number}]") for number in range(20))
    )
    assert (workspace.root / "f").read_text() == "".join(f"[{number}]\n" for number in range(20))


async def test_write_makes_parents_and_replaces_at_once_with_the_mode_kept(workspace: Workspace) -> None:
    output = await workspace.call("write", path="a/b/run.sh", content="one\r\n")
    path = workspace.root / "a/b/run.sh"
    assert path.read_bytes() == b"one\r\n"
    assert output.structured == {"path": "a/b/run.sh", "existed": False, "bytes": 5}
    path.chmod(0o755)
    with path.open() as reader:
        await workspace.call("write", path="a/b/run.sh", content="two")
        assert reader.read() == "one\n"
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(path.parent) == ["run.sh"]  # noqa: PTH208 - nothing else is left there


async def test_write_refuses_what_is_no_file(workspace: Workspace) -> None:
    (workspace.root / "d").mkdir()
    with pytest.raises(ToolFailure, match="Cannot change d"):
        await workspace.call("write", path="d", content="x")
    (workspace.root / "f").touch()
    with pytest.raises(ToolFailure, match="Cannot change f/x"):
        await workspace.call("write", path="f/x", content="x")
    with pytest.raises(ToolFailure, match="File not found: nosuch"):
        await workspace.call("edit", path="nosuch", oldString="a", newString="b")


async def test_a_lone_surrogate_in_content_is_written_as_a_replacement(workspace: Workspace) -> None:
    await workspace.call("write", path="f", content="\ud83d\ude00 \ud83d")
    assert (workspace.root / "f").read_text() == "\U0001f600 \ufffd"


@pytest.mark.parametrize("path", ["esc/new.txt", "link", "dangling", "in/../../out/v", "in/../esc/deep/new.txt"])
async def test_nothing_is_written_outside_without_a_rule(workspace: Workspace, path: str) -> None:
    out = workspace.root.parent / "out"
    out.mkdir()
    (out / "v").write_text("orig")
    (workspace.root / "in").mkdir()
    (workspace.root / "esc").symlink_to("../out")
    (workspace.root / "link").symlink_to("../out/v")
    (workspace.root / "dangling").symlink_to("../out/absent")
    for tool, rest in (("write", {"content": "x"}), ("edit", {"oldString": "orig", "newString": "x"})):
        with pytest.raises(ToolFailure, match="external_directory"):
            await workspace.call(tool, path=path, **rest)
    assert [one.name for one in out.iterdir()] == ["v"]
    assert (out / "v").read_text() == "orig"
    await workspace.call("write", ALLOW_OUTSIDE, path="esc/new.txt", content="x")
    assert (out / "new.txt").read_text() == "x"


async def test_a_link_that_stays_inside_is_followed(workspace: Workspace) -> None:
    (workspace.root / "in").mkdir()
    (workspace.root / "ok").symlink_to("in")
    assert "in/new.txt" in text_of(await workspace.call("write", path="ok/new.txt", content="x"))
    assert (workspace.root / "in/new.txt").read_text() == "x"
    assert (workspace.root / "ok").is_symlink()
