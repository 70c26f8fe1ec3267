"""What the command line was given, checked before anything is started for it."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from typer.exceptions import TyperException

from fencepost.domain.attachments import ATTACHMENT_BYTES, UNKNOWN, mime_of
from fencepost.domain.errors import DirectoryError, InvalidInputError
from fencepost.domain.ids import is_message_id, is_session_id
from fencepost.domain.inbox import FileAttachment


def check_encoding(arguments: Sequence[str]) -> None:
    """Raise InvalidInputError for an argument that is no text: neither database nor terminal could hold it."""
    for number, each in enumerate(arguments, 1):
        try:
            each.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(f"argument {number}, {each!a}, is not text in UTF-8: write it anew") from None


def usage_error(error: TyperException) -> str:
    """Give the line for a command line that cannot be understood: what is wrong, and whose help says more."""
    message = error.format_message().rstrip(".")
    found = re.match(r"(?P<where>Invalid value.*?): Input should be a valid (?P<kind>integer|number)", message)
    context = getattr(error, "ctx", None)
    if found is not None:
        given = _given_for(found["where"], sys.argv[1:])
        kind = "a whole number" if found["kind"] == "integer" else "a number"
        message = f"{found['where']}: must be {kind}{given}"
    return f"{message} (see `{context.command_path if context is not None else 'fencepost'} --help`)"


def _given_for(where: str, arguments: Sequence[str]) -> str:
    """Give what the named option was given, to be repeated in a message."""
    for option in re.findall(r"--[a-z-]+", where):
        for number, each in enumerate(arguments):
            if each.startswith(f"{option}="):
                return f", not {each.partition('=')[2]!r}"
            if each == option and number + 1 < len(arguments):
                return f", not {arguments[number + 1]!r}"
    return ""


def session_id(given: str, option: str = "") -> str:
    """Give the id of a session as it stands. Raises InvalidInputError."""
    if not is_session_id(given):
        where = f"{option}: " if option else ""
        raise InvalidInputError(
            f"{where}{given!r} is no session id: one begins with ses_ (`fencepost session list` shows them)"
        )
    return given


def input_id(given: str | None) -> str | None:
    """Give the id of an input as it stands. Raises InvalidInputError."""
    if given is not None and not is_message_id(given):
        raise InvalidInputError(
            f"--id: {given!r} is no input id: `msg_` and up to 59 letters, digits, `_` or `-`, please"
        )
    return given


def text(given: str, most: int, usage: str) -> str:
    """Give the prompt's text, from standard input for `-`; `most` is its limit in bytes. Raises InvalidInputError."""
    try:
        found = sys.stdin.read() if given == "-" else given
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the prompt on standard input is not text: {error.reason}") from None
    if not found.strip():
        where = "standard input held none" if given == "-" else "it is empty"
        raise InvalidInputError(f"no prompt: {where}; write `{usage}`")
    size = len(found.encode(errors="replace"))
    if size > most:
        raise InvalidInputError(
            f"the prompt is {size} bytes, more than {most}: attach a file instead, with --file PATH"
        )
    return found


def directory(given: Path | None, *, exists: bool = True, option: str = "--directory") -> str:
    """Give an absolute directory, the current one by default. Raises DirectoryError."""
    try:
        found = Path(given or Path.cwd()).expanduser().absolute()
        str(found).encode()
    except FileNotFoundError:
        raise DirectoryError("the current directory does not exist any more: change to another one") from None
    except RuntimeError as error:  # ~somebody who is not there
        raise DirectoryError(f"{option}: {error}") from None
    except UnicodeEncodeError:
        raise DirectoryError(f"the directory's name is not text in UTF-8: {str(given or '.')!a}: rename it") from None
    if exists and not found.is_dir():
        raise DirectoryError(f"{option}: {found} is not a directory: create it first")
    return str(found)


def attachments(paths: Sequence[Path]) -> tuple[FileAttachment, ...]:
    """Give the files as attachments that hold their content. Raises InvalidInputError."""
    if not paths:
        return ()
    most = ATTACHMENT_BYTES * 3 // 4  # what base64 makes of it has to fit
    found = []
    for path in paths:
        data = _content(path, most)
        most -= len(data)
        if most < 0:
            raise InvalidInputError(
                f"--file: {path} and what is attached before it are more than {ATTACHMENT_BYTES * 3 // 4} bytes: "
                "put the files into the session's directory, and name them"
            )
        mime = mime_of(path.name)
        if mime == UNKNOWN and _is_text(data):
            mime = "text/plain"
        uri = f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"
        found.append(FileAttachment(uri=uri, mime=mime, name=path.name))
    return tuple(found)


def _content(path: Path, most: int) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(max(most, 0) + 1)
    except IsADirectoryError:
        raise InvalidInputError(
            f"--file: {path} is a directory: name it in the prompt, tools can look into it"
        ) from None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"--file: {path} cannot be read: {reason}") from None


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False
