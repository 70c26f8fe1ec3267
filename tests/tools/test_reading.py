"""The read tool: pages, images, binaries, directories, and the permissions of paths."""

from __future__ import annotations

import base64

import pytest

from fencepost.domain.permissions import Rule
from fencepost.domain.tools import FileItem, ToolFailure
from tests.tools.conftest import ALLOW_OUTSIDE, Workspace, text_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))


async def test_a_small_file_comes_whole(workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    output = await workspace.call("read", path="a.txt")
    assert text_of(output) == "one\ntwo"
    assert output.structured == {"type": "file", "path": "a.txt", "offset": 1, "lines": 2}


async def test_a_long_file_comes_in_pages_that_say_how_to_go_on(workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("".join(f"{number}\n" for number in range(1, 2501)))
    first = await workspace.call("read", path="a.txt")
    assert text_of(first).endswith("\n2000\n[lines 1 to 2000 of more; go on with offset=2001]")
    second = await workspace.call("read", path="a.txt", offset=first.structured["next"])
    assert text_of(second).startswith("2001\n")
    assert text_of(second).endswith("\n2500")
    with pytest.raises(ToolFailure, match=r"Offset 9000 is past the end of a.txt: it has 2500 lines"):
        await workspace.call("read", path="a.txt", offset=9000)


async def test_a_page_ends_at_its_bytes_and_a_line_at_its_characters(workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text(("x" * 1023 + "\n") * 100 + "ä" * 5_000_000)
    first = await workspace.call("read", path="a.txt")
    assert first.structured["lines"] == 50
    last = text_of(await workspace.call("read", path="a.txt", offset=101))
    assert last == "ä" * 2000 + " [... line truncated: 10000000 bytes in total]"


async def test_an_empty_file_says_so(workspace: Workspace) -> None:
    (workspace.root / "a.txt").touch()
    assert text_of(await workspace.call("read", path="a.txt")) == "(The file is empty.)"


@pytest.mark.parametrize(
    ("mime", "data"),
    [
        ("image/png", PNG),
        ("image/jpeg", b"\xff\xd8\xff\xe0\0\x10JFIF"),
        ("image/gif", b"GIF89a\0\0"),
        ("image/webp", b"RIFF\x10\0\0\0WEBPVP8 "),
    ],
)
async def test_an_image_is_given_once_as_media(workspace: Workspace, mime: str, data: bytes) -> None:
    (workspace.root / "picture.txt").write_bytes(data)
    output = await workspace.call("read", path="picture.txt")
    assert text_of(output) == "Image read successfully"
    uri = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    assert [one for one in output.content if isinstance(one, FileItem)] == [
        FileItem(uri=uri, mime=mime, name="picture.txt")
    ]
    assert base64.b64encode(data).decode() not in str(output.structured)


async def test_a_large_image_is_refused(workspace: Workspace) -> None:
    with (workspace.root / "a.png").open("wb") as handle:
        handle.write(PNG)
        handle.truncate(21 * 1024 * 1024)
    with pytest.raises(ToolFailure, match=r"Image is larger than 20 MiB: a.png"):
        await workspace.call("read", path="a.png")


@pytest.mark.parametrize("data", [b"PK\x03\x04\0\0" + bytes(range(256)), b"PK\x03\x04", b"\x01\x02\x03\x04", b"t\0"])
async def test_a_binary_file_is_refused_by_its_content(workspace: Workspace, data: bytes) -> None:
    (workspace.root / "a.txt").write_bytes(data)
    with pytest.raises(ToolFailure) as caught:
        await workspace.call("read", path="a.txt")
    assert caught.value.message == "Cannot read binary file: a.txt"


async def test_bytes_that_are_no_text_become_replacement_characters(workspace: Workspace) -> None:
    (workspace.root / "b.txt").write_bytes(b"caf\xe9\n")
    assert text_of(await workspace.call("read", path="b.txt")) == "caf\ufffd"
    (workspace.root / "c.txt").write_bytes(b"line\n" * 1999 + b"\0\xff")
    assert text_of(await workspace.call("read", path="c.txt")).endswith("line\n\ufffd\ufffd")


async def test_a_directory_is_listed_in_pages(workspace: Workspace) -> None:
    (workspace.root / "sub").mkdir()
    for name in ("b", "a"):
        (workspace.root / name).touch()
    assert text_of(await workspace.call("read", path=".")) == "a\nb\nsub/"
    assert text_of(await workspace.call("read", path=".", limit=1, offset=2)).startswith("b\n[entries 2 to 2 of more")


async def test_a_missing_file_hints_at_close_names(workspace: Workspace) -> None:
    (workspace.root / "settings.py").touch()
    with pytest.raises(ToolFailure, match=r"^File not found: setings.py. Did you mean settings.py in the same"):
        await workspace.call("read", path="setings.py")
    with pytest.raises(ToolFailure, match="File not found: no/such"):
        await workspace.call("read", path="no/such")


async def test_a_pipe_is_not_waited_for(workspace: Workspace) -> None:
    await workspace.call("bash", command="mkfifo pipe")
    with pytest.raises(ToolFailure, match="Not a file or directory"):
        await workspace.call("read", path="pipe")


@pytest.mark.parametrize("name", [".env", "sub/prod.env", ".env.local"])
async def test_dotenv_files_need_a_rule(workspace: Workspace, name: str) -> None:
    (workspace.root / "sub").mkdir()
    (workspace.root / name).write_text("KEY=secret")
    with pytest.raises(ToolFailure, match="needs the user's approval"):
        await workspace.call("read", path=name)
    assert text_of(await workspace.call("read", Rule(action="read", effect="allow"), path=name)) == "KEY=secret"


async def test_a_link_to_a_dotenv_file_is_judged_by_where_it_leads(workspace: Workspace) -> None:
    (workspace.root / ".env").write_text("KEY=secret")
    (workspace.root / "plain.txt").symlink_to(".env")
    with pytest.raises(ToolFailure, match="needs the user's approval"):
        await workspace.call("read", path="plain.txt")


async def test_an_example_of_a_dotenv_file_may_be_read(workspace: Workspace) -> None:
    (workspace.root / ".env.example").write_text("KEY=")
    assert text_of(await workspace.call("read", path=".env.example")) == "KEY="


@pytest.mark.parametrize("path", ["link", "in/../../out/v", "esc/v", "{out}/v"])
async def test_a_path_that_leads_outside_needs_its_own_rule(workspace: Workspace, path: str) -> None:
    out = workspace.root.parent / "out"
    out.mkdir()
    (out / "v").write_text("outside")
    (workspace.root / "in").mkdir()
    (workspace.root / "esc").symlink_to("../out")
    (workspace.root / "link").symlink_to("../out/v")
    given = path.replace("{out}", str(out))
    with pytest.raises(ToolFailure, match="external_directory") as caught:
        await workspace.call("read", path=given)
    assert f'"{out}/*"' in caught.value.message
    assert text_of(await workspace.call("read", ALLOW_OUTSIDE, path=given)) == "outside"
    deny = Rule(action="read", resource=f"{out}/*", effect="deny")
    with pytest.raises(ToolFailure, match="Permission denied"):
        await workspace.call("read", ALLOW_OUTSIDE, deny, path=given)


async def test_a_path_that_no_file_can_have_is_a_failure(workspace: Workspace) -> None:
    with pytest.raises(ToolFailure, match="Invalid tool input: path"):
        await workspace.call("read", path="a\0b")
    (workspace.root / "loop").symlink_to("loop")
    with pytest.raises(ToolFailure, match="loop"):
        await workspace.call("read", path="loop")
