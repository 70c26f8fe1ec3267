"""Text that PostgreSQL cannot hold, made holdable: NUL and lone surrogates become U+FFFD, in values and in keys."""

from __future__ import annotations

import re
from typing import Any

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean_text(text: str) -> str:
    """Give the text with every NUL and lone surrogate replaced by U+FFFD."""
    # A search alone settles the common case without making a copy.
    return _UNSTORABLE.sub("\ufffd", text) if _UNSTORABLE.search(text) else text


def clean(value: Any) -> Any:
    """Give a JSON value in which every text, keys included, can be stored. Other values pass unchanged."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None  # JSON knows no such numbers
    return value
