"""Identifiers: a prefix and 26 characters; fresh ones carry time, derived ones are a hash of what they stand for."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import time
from typing import Literal, TypeAlias

from fencepost.domain.errors import InvalidInputError

Prefix: TypeAlias = Literal["ses", "msg", "evt", "per", "que", "psv", "exe", "int", "prj", "tool"]

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SESSION_ID = re.compile(r"(ses_[A-Za-z0-9_-]{1,64}|ses[A-Za-z0-9_-]{1,60})\Z")
_MESSAGE_ID = re.compile(r"msg_[A-Za-z0-9_-]{1,59}\Z")


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))


def fresh_id(prefix: Prefix) -> str:
    """Give a new id from time and randomness. Session ids sort newest first, all others oldest first.

    Never call this in workflow code, which must be deterministic.
    """
    stamp = (time.time_ns() // 1_000_000 * 4096 + secrets.randbelow(4096)) & 0xFFFF_FFFF_FFFF
    if prefix == "ses":
        stamp ^= 0xFFFF_FFFF_FFFF
    return f"{prefix}_{stamp:012x}{_base62(secrets.randbits(96), 14)}"


def derived_id(prefix: Prefix, *parts: str | int) -> str:
    """Give the one id that stands for these parts, in any process and at any time. Nothing sorts by it."""
    # Parts may come from outside: a lone surrogate has an encoding of its own here, and is no error.
    digest = hashlib.sha256("\x1f".join([prefix, *map(str, parts)]).encode("utf-8", "surrogatepass")).digest()
    return f"{prefix}_{_base62(int.from_bytes(digest[:24], 'big'), 26)}"


def is_session_id(text: str) -> bool:
    """Say whether the text can name a session: `ses_` and up to 64 of letters, digits, `_` and `-`."""
    return _SESSION_ID.match(text) is not None


def is_message_id(text: str) -> bool:
    """Say whether the text can name an input or message: `msg_` and up to 59 of letters, digits, `_` and `-`."""
    return _MESSAGE_ID.match(text) is not None


def check_session_id(session_id: str) -> None:
    """Raise InvalidInputError for what is no session id."""
    if not is_session_id(session_id):
        raise InvalidInputError(
            f"{session_id!r} is no session id: `ses_` and up to 64 letters, digits, `_` or `-`, please"
        )
