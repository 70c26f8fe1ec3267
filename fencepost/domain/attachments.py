"""What an attachment is, settled from its address before it is admitted. Pure, and the same on every machine."""

from __future__ import annotations

import mimetypes
import re
from urllib.parse import unquote, urlsplit

from fencepost.domain.contracts import PromptInput
from fencepost.domain.errors import InvalidInputError
from fencepost.domain.inbox import FileAttachment, Prompt

DIRECTORY = "application/x-directory"
UNKNOWN = "application/octet-stream"
_DATA_DEFAULT = "text/plain"

ATTACHMENT_BYTES = 20_000_000
"""The largest prompt with its attachments, in bytes of JSON; its text has a limit of its own."""

# Source text that tables of types do not know, or take for something else.
_TEXT = re.compile(
    r"\.(c|cc|cfg|conf|cpp|cs|css|csv|go|h|hpp|ini|java|js|jsx|kt|lock|log|lua|md|mjs|php|pl|py|rb|rs|rst|scala|sh|sql"
    r"|swift|tex|toml|ts|tsx|txt|vue|yaml|yml|zig)"
)
# Python's own table, without what the machine's files add to it.
_TYPES = mimetypes.MimeTypes(filenames=())


def mime_of(uri: str) -> str:
    """Give the type of what an address names: what a `data:` address says itself, a directory for one that ends in
    `/`, else what its extension means."""
    if uri[:5].lower() == "data:":
        head = uri[5:].partition(",")[0]
        return head.partition(";")[0].strip().lower() or _DATA_DEFAULT
    path = unquote(urlsplit(uri).path) if "://" in uri else uri
    if path.endswith("/"):
        return DIRECTORY
    name = path.rpartition("/")[2].lower()
    extension = name[name.rindex(".") :] if "." in name[1:] else ""
    if _TEXT.fullmatch(extension):
        return {".md": "text/markdown", ".css": "text/css", ".csv": "text/csv"}.get(extension, "text/plain")
    return _TYPES.types_map[True].get(extension, UNKNOWN)


def is_large(given: PromptInput, limit: int) -> bool:
    """Say whether a prompt is more than `limit` bytes, too large for Temporal. Raises InvalidInputError when it is too
    large for us."""
    text = len(given.text.encode(errors="replace"))
    if text > limit:
        raise InvalidInputError(f"the prompt is {text} bytes, more than {limit}: attach a file instead")
    whole = len(given.model_dump_json(by_alias=True).encode())
    if whole > ATTACHMENT_BYTES:
        raise InvalidInputError(
            f"the prompt and its attachments are {whole} bytes, more than {ATTACHMENT_BYTES}: "
            "put the files into the session's directory, and name them"
        )
    return whole > limit


def with_types(prompt: Prompt) -> Prompt:
    """Give the prompt with the type of every attachment that comes without one."""
    if prompt.files is None or all(file.mime is not None for file in prompt.files):
        return prompt
    return prompt.model_copy(update={"files": tuple(_typed(file) for file in prompt.files)})


def _typed(file: FileAttachment) -> FileAttachment:
    return file if file.mime is not None else file.model_copy(update={"mime": mime_of(file.uri)})
