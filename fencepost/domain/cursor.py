"""Cursors of pages: an item, the order of the pages, and on which side of the item the page lies. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Literal, TypeAlias

from pydantic import ValidationError

from fencepost.domain.errors import InvalidCursorError, InvalidInputError
from fencepost.domain.wire import WireModel

Order: TypeAlias = Literal["asc", "desc"]


class Cursor(WireModel):
    """The page next to an item, before or after it as the order goes. `time` is there where items are ordered by
    time first, in milliseconds."""

    id: str
    order: Order
    direction: Literal["previous", "next"]
    time: int | None = None

    def encode(self) -> str:
        """Give the text for a client: base64url without padding."""
        return base64.urlsafe_b64encode(self.model_dump_json(exclude_none=True).encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Read what a client gave back. Raises InvalidCursorError."""
        try:
            data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
            return cls.model_validate_json(data)
        except (UnicodeEncodeError, binascii.Error, ValidationError):
            raise InvalidCursorError("the cursor cannot be read: pass one that a page gave, unchanged") from None

    @property
    def ascending(self) -> bool:
        """Say whether the rows beyond the item are the greater ones."""
        return (self.order == "asc") == (self.direction == "next")


def checked_limit(limit: int, most: int) -> int:
    """Give the limit. Raises InvalidInputError when it is not from 1 to `most`."""
    if not 1 <= limit <= most:
        raise InvalidInputError(f"limit: from 1 to {most}, please, not {limit}")
    return limit


def starting(cursor: str | None, order: Order | None, default: Order) -> tuple[Order, Cursor | None]:
    """Give the order of a page and its cursor. Raises InvalidInputError for both at once: a cursor has its order."""
    if cursor is None:
        return order or default, None
    if order is not None:
        raise InvalidInputError("order: not together with a cursor, which has an order already")
    read = Cursor.decode(cursor)
    return read.order, read
