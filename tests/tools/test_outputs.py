"""Managed output: what goes into a file, what a model gets instead, who may read it, and when it goes away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fencepost.clock import FixedClock
from fencepost.domain.tools import FileItem, StorageError, TextItem, ToolFailure, ToolOutput
from fencepost.domain.wire import WireModel
from fencepost.tools.builtin import builtin_tools
from fencepost.tools.outputs import OutputStore, keep_swept, sweep
from fencepost.tools.registry import Registry, Tool, ToolContext
from tests.house.project import ROOT
from tests.tools.conftest import Workspace, text_of

PICTURE = FileItem(uri="data:image/png;base64,iVBORw0KGgo=", mime="image/png", name="a.png")
MANY = "".join(f"line {number}\n" for number in range(3000))
DAY_MS = 86_400_000


class _Nothing(WireModel):
    pass


def _giving(workspace: Workspace, output: ToolOutput) -> None:
    """Register a tool `give` that has this output."""

    async def run(context: ToolContext, given: _Nothing) -> ToolOutput:
        return output

    tool = Tool("give", "gives", _Nothing, "give", run, lambda directory, given: ("*",))
    workspace.registry = Registry([*builtin_tools(), tool])


def _kept(workspace: Workspace) -> list[Path]:
    return sorted(workspace.outputs.directory.iterdir()) if workspace.outputs.directory.exists() else []


@pytest.mark.conformance("TOS-01", "REG-10")
@pytest.mark.parametrize(
    "texts",
    [[MANY], [MANY[:9000], MANY[9000:]], ["ä" * 30_000], ["x" * 40_000, "y" * 40_000]],
    ids=["lines", "together", "bytes", "bytes together"],
)
async def test_oversized_text_goes_whole_into_one_private_file(workspace: Workspace, texts: list[str]) -> None:
    whole = "\n".join(texts)
    _giving(workspace, ToolOutput(content=tuple(TextItem(text=text) for text in texts)))

    output = await workspace.call("give")

    [file] = _kept(workspace)
    assert re.fullmatch(r"tool_[0-9A-Za-z]{26}", file.name)
    assert file.read_text() == whole
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert output.output_paths == (str(file),)
    assert len(output.content) == 1
    shown = text_of(output)
    assert (shown[:20], shown[-20:]) == (whole[:20], whole[-20:])
    [notice] = re.findall(r"\n\[\.\.\. (.*) \.\.\.\]\n", shown)
    assert str(file) in notice
    assert f"{len(whole.encode())} bytes in total" in notice
    assert len(shown.encode()) <= 51_200
    assert shown.count("\n") < 2000


@pytest.mark.parametrize("text", ["a\n" * 2000, "a\n" * 1999 + "a", "ä" * 25_600, "", "a\r" * 20_000])
async def test_text_within_the_limits_is_unchanged_and_makes_no_file(workspace: Workspace, text: str) -> None:
    output = ToolOutput(structured={"a": 1}, content=(TextItem(text=text),))
    _giving(workspace, output)
    assert await workspace.call("give") == output
    assert not workspace.outputs.directory.exists()


@pytest.mark.parametrize("text", ["a\n" * 2000 + "a", "ä" * 25_600 + "a"])
async def test_one_line_or_byte_more_makes_a_file(workspace: Workspace, text: str) -> None:
    _giving(workspace, ToolOutput(content=(TextItem(text=text),)))
    await workspace.call("give")
    assert len(_kept(workspace)) == 1


@pytest.mark.conformance("TOS-02", "REG-10")
async def test_an_output_without_content_is_bounded_as_its_printed_object(workspace: Workspace) -> None:
    structured = {"names": [f"ä{number}" for number in range(5000)]}
    _giving(workspace, ToolOutput(structured=structured))

    output = await workspace.call("give")

    assert output.structured == structured
    [file] = _kept(workspace)
    assert file.read_text() == json.dumps(structured, indent=2, ensure_ascii=False)
    assert text_of(output).startswith('{\n  "names": [\n    "ä0",\n')
    assert text_of(output).endswith('    "ä4999"\n  ]\n}')
    assert str(file) in text_of(output)
    assert len(text_of(output).encode()) <= 51_200

    small = ToolOutput(structured={"a": 1})
    _giving(workspace, small)
    assert await workspace.call("give") == small


@pytest.mark.conformance("TOS-04")
async def test_media_and_structured_stay_as_they_are_beside_bounded_text(workspace: Workspace) -> None:
    big = FileItem(uri="data:image/png;base64," + "A" * 100_000, mime="image/png")
    structured = {"lines": 3000, "nested": {"a": [1, None, "ä"]}}
    _giving(workspace, ToolOutput(structured=structured, content=(PICTURE, TextItem(text=MANY), big)))

    output = await workspace.call("give")

    assert output.structured == structured
    assert [item for item in output.content if isinstance(item, FileItem)] == [PICTURE, big]
    assert "output truncated" in text_of(output)
    assert _kept(workspace)[0].read_text() == MANY

    alone = ToolOutput(content=(big,))  # media count for nothing
    _giving(workspace, alone)
    assert await workspace.call("give") == alone


@pytest.mark.conformance("TOS-05")
async def test_a_structured_object_does_not_count_beside_content(workspace: Workspace) -> None:
    output = ToolOutput(structured={"same": "x" * 51_000, "more": "y" * 90_000}, content=(TextItem(text="x" * 51_000),))
    _giving(workspace, output)
    assert await workspace.call("give") == output
    assert _kept(workspace) == []


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    return circle


@pytest.mark.conformance("TOS-07")
@pytest.mark.parametrize("structured", [{"a": object()}, _circle(), {"a": b"\xff"}], ids=["object", "circle", "bytes"])
async def test_an_object_that_json_cannot_hold_is_left_out_beside_content(
    workspace: Workspace, structured: dict[str, Any]
) -> None:
    _giving(workspace, ToolOutput.model_construct(structured=structured, content=(TextItem(text=MANY), PICTURE)))

    output = await workspace.call("give")

    json.dumps(output.to_wire())
    assert output.structured == {}
    assert "output truncated" in text_of(output)
    assert _kept(workspace)[0].read_text() == MANY

    _giving(workspace, ToolOutput.model_construct(structured=structured, content=()))
    with pytest.raises(ToolFailure, match=r"^Invalid tool output: structured: cannot be written as JSON: ."):
        await workspace.call("give")


@pytest.mark.conformance("TOS-06")
async def test_an_output_that_cannot_be_kept_fails_the_call(workspace: Workspace) -> None:
    """Here the directory is a file."""
    workspace.outputs.directory.write_text("mine")
    _giving(workspace, ToolOutput(content=(TextItem(text=MANY),)))

    with pytest.raises(StorageError) as caught:
        await workspace.call("give")

    assert caught.value.message.startswith("StorageError: the tool ran, but its output (3000 lines, 28890 bytes) is")
    assert f"{workspace.outputs.directory}: File exists" in caught.value.message
    assert workspace.outputs.directory.read_text() == "mine"
    small = ToolOutput(content=(TextItem(text="small"),))  # needs no room
    _giving(workspace, small)
    assert await workspace.call("give") == small


_FULL = """
import asyncio, resource, sys
from pathlib import Path
from fencepost.domain.tools import StorageError, TextItem, ToolOutput
from fencepost.tools.outputs import OutputStore

resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
try:
    asyncio.run(OutputStore(Path(sys.argv[1])).bound(ToolOutput(content=(TextItem(text="x" * 100_000),))))
except StorageError as error:
    print(error.message)
"""


@pytest.mark.conformance("TOS-06")
def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle of the data."""
    command = [sys.executable, "-c", _FULL, str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)

    message = done.stdout.splitlines()[-1]  # after the log's
    assert message.startswith("StorageError: the tool ran, but its output (1 line, 100000 bytes) is too large")
    assert f"{tmp_path / 'kept'}: File too large" in message
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.conformance("TOS-08")
async def test_a_cancellation_while_the_file_is_written_passes_and_leaves_no_file(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, slow = asyncio.Event(), os.fsync
    loop = asyncio.get_running_loop()

    def fsync(fd: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.2)
        slow(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    _giving(workspace, ToolOutput(content=(TextItem(text=MANY),)))
    call = asyncio.create_task(workspace.call("give"))
    await begun.wait()
    assert len(_kept(workspace)) == 1
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call

    assert call.cancelled()
    assert _kept(workspace) == []


@pytest.mark.conformance("TOS-08")
async def test_a_cancellation_of_the_tool_is_no_failure_and_keeps_nothing(workspace: Workspace) -> None:
    async def run(context: ToolContext, given: _Nothing) -> ToolOutput:
        raise asyncio.CancelledError

    workspace.registry = Registry([Tool("give", "gives", _Nothing, "give", run, lambda directory, given: ("*",))])
    with pytest.raises(asyncio.CancelledError):
        await workspace.call("give")
    assert _kept(workspace) == []


@pytest.mark.conformance("TOS-09")
async def test_the_limits_are_those_that_are_set(workspace: Workspace) -> None:
    workspace.outputs = OutputStore(workspace.root.parent / "elsewhere", max_lines=10, max_bytes=1024)
    for text, kept in (("a\n" * 10, 0), ("a\n" * 11, 1), ("x" * 1024, 1), ("x" * 1025, 2)):
        _giving(workspace, ToolOutput(content=(TextItem(text=text),)))
        shown = text_of(await workspace.call("give"))
        assert len(_kept(workspace)) == kept
        assert len(shown.encode()) <= 1024
        assert len(shown.splitlines()) <= 10

    (workspace.root / "a.txt").write_text("line\n" * 100)
    page = await workspace.call("read", path="a.txt")
    assert (page.structured["lines"], page.structured["next"]) == (10, 11)
    shown = text_of(await workspace.call("bash", command="seq 100; exit 3"))
    assert shown.startswith("1\n2\n")
    assert shown.endswith("100\n[exit code 3]")
    assert len(_kept(workspace)) == 3


@pytest.mark.conformance("TOS-10")
async def test_only_expired_managed_files_are_removed(tmp_path: Path) -> None:
    clock = FixedClock()
    folder, outside = tmp_path / "kept", tmp_path / "tool_outside"
    folder.mkdir()
    ages = {"tool_old": 7.01, "tool_young": 6.99, "tool_new": 0, ".tool_old.part": 8, ".tool_new.part": 0.1,
            "notes.txt": 90, "tool_old.txt": 90, "other_old": 90}  # fmt: skip
    for name in ages:
        (folder / name).touch()
    (folder / "tool_folder").mkdir()
    outside.touch()
    (folder / "tool_link").symlink_to(outside)
    for path, days in [(folder / name, days) for name, days in ages.items()] + [(folder / "tool_folder", 90)]:
        at = clock.now_ms() / 1000 - days * 86_400
        os.utime(path, (at, at))
    os.utime(folder / "tool_link", (0, 0), follow_symlinks=False)
    os.utime(outside, (0, 0))

    assert await sweep(folder, 7, clock) == 2

    left = {path.name for path in folder.iterdir()}
    assert left == {*ages, "tool_folder", "tool_link"} - {"tool_old", ".tool_old.part"}
    assert outside.exists()
    clock.advance(DAY_MS)
    assert await sweep(folder, 7, clock) == 1
    assert not (folder / "tool_young").exists()


@pytest.mark.conformance("TOS-10")
async def test_sweeping_begins_at_once_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert await sweep(folder, 7, FixedClock()) == 0  # nothing was ever kept
    folder.touch()  # cannot be listed
    task = asyncio.create_task(keep_swept(folder, 7, FixedClock(), seconds=0.02))
    try:
        await asyncio.sleep(0.1)
        folder.unlink()
        folder.mkdir()
        for name in ("tool_a", "tool_b"):
            (folder / name).touch()
            os.utime(folder / name, (0, 0))
            async with asyncio.timeout(5):
                while (folder / name).exists():  # noqa: ASYNC110 - a file tells nobody that it is gone
                    await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()


async def test_a_managed_file_may_be_read_and_searched_without_a_rule(workspace: Workspace) -> None:
    _giving(workspace, ToolOutput(content=(TextItem(text="%PDF-\n" + MANY),)))  # text, however it begins
    [path] = (await workspace.call("give")).output_paths

    page = await workspace.call("read", path=path, offset=1500, limit=2)
    assert text_of(page).startswith("line 1498\nline 1499\n")
    found = await workspace.call("grep", pattern="line 2[0-9]50$", path=path)
    assert text_of(found).splitlines()[0] == f"{path}:2052: line 2050"
    assert text_of(await workspace.call("read", path=path)).startswith("%PDF-\nline 0\n")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read", {"path": "{kept}"}),
        ("read", {"path": "{kept}/notes"}),
        ("read", {"path": "{kept}/tool_link"}),
        ("read", {"path": "{kept}/tool_folder/a"}),
        ("read", {"path": "{kept}/tool_folder"}),
        ("grep", {"pattern": "x", "path": "{kept}"}),
        ("grep", {"pattern": "x", "path": "{kept}/tool_folder"}),
        ("glob", {"pattern": "*", "path": "{kept}"}),
        ("write", {"path": "{kept}/tool_a", "content": "x"}),
        ("edit", {"path": "{kept}/tool_a", "oldString": "x", "newString": "y"}),
        ("bash", {"command": "ls", "workdir": "{kept}"}),
    ],
)
async def test_nothing_else_about_the_directory_is_open(
    workspace: Workspace, tool: str, arguments: dict[str, str]
) -> None:
    kept = workspace.outputs.directory
    (kept / "tool_folder").mkdir(parents=True)
    for name in ("tool_a", "notes", "tool_folder/a"):
        (kept / name).write_text("x")
    (workspace.root.parent / "secret").write_text("x")
    (kept / "tool_link").symlink_to("../secret")
    with pytest.raises(ToolFailure, match="external_directory"):
        await workspace.call(tool, **{name: text.replace("{kept}", str(kept)) for name, text in arguments.items()})
    assert (kept / "tool_a").read_text() == "x"


async def test_a_managed_file_that_is_gone_says_so_and_names_no_other(workspace: Workspace) -> None:
    workspace.outputs.directory.mkdir()
    (workspace.outputs.directory / "tool_abcdefgh").touch()
    with pytest.raises(ToolFailure, match="Kept output is removed after some days") as caught:
        await workspace.call("read", path=str(workspace.outputs.directory / "tool_abcdefgi"))
    assert "abcdefgh" not in caught.value.message
