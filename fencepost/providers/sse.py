"""Server-sent events, from body bytes to the data of each event.

The reader of httpx2 takes twice the time per event, drops the first event after a byte order mark, and drops an event
that the end of the body cuts off from its blank line; providers send both.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 8 * 1024 * 1024
"""One event may hold a whole file as tool arguments; beyond this, something is broken."""

_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(Exception):
    """An event is larger than MAX_EVENT_BYTES."""


class ErrorData(bytes):
    """The data of an event that is named `error`."""

    __slots__ = ()


class EventReader:
    """Takes body bytes as the network cuts them and gives the data of every event that is complete.

    Lines end with LF, CRLF or CR. Comments are skipped, as is a payload that begins with a colon, which some gateways
    send as a keep-alive.
    """

    __slots__ = ("_at_start", "_data", "_data_size", "_name", "_rest", "_rest_size", "_trailing_cr")

    def __init__(self) -> None:
        self._at_start = True
        self._trailing_cr = False
        self._rest: list[bytes] = []  # pieces of the line that has not ended yet
        self._rest_size = 0
        self._data: list[bytes] = []  # data lines of the event that has not ended yet
        self._data_size = 0
        self._name = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Give the data of the events that this chunk completes, in order. Raises EventTooLargeError."""
        if self._at_start:
            chunk = self._without_bom(chunk)
        if self._trailing_cr or b"\r" in chunk:
            chunk = self._with_line_feeds(chunk)
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[bytes] = []
        if lines:
            if self._rest:
                self._rest.append(lines[0])
                lines[0] = b"".join(self._rest)
                self._rest.clear()
                self._rest_size = 0
            events = self._read(lines)
        if rest:
            self._rest.append(rest)
            self._rest_size += len(rest)
        if self._rest_size + self._data_size > MAX_EVENT_BYTES:
            raise EventTooLargeError
        return events

    def finish(self) -> list[bytes]:
        """Give what the end of the body leaves: the last event, when its blank line is missing."""
        lines = [b"".join(self._rest), b""]
        self._rest.clear()
        return self._read(lines)

    def _read(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    event = data[0] if len(data) == 1 else b"\n".join(data)
                    if event:
                        events.append(ErrorData(event) if self._name == b"error" else event)
                    data.clear()
                    self._data_size = 0
                self._name = b""
            elif line.startswith(b"data:"):
                value = line[6:] if line.startswith(b" ", 5) else line[5:]
                if not value.startswith(b":"):
                    data.append(value)
                    self._data_size += len(value)
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
        return events

    def _without_bom(self, chunk: bytes) -> bytes:
        start = b"".join(self._rest) + chunk
        if len(start) < len(_BOM) and _BOM.startswith(start):
            self._rest = [start] if start else []
            return b""
        self._rest = []
        self._at_start = False
        return start.removeprefix(_BOM)

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        if not chunk:
            return chunk
        if self._trailing_cr and chunk.startswith(b"\n"):
            # The CR at the end of the chunk before has ended its line already; this LF belongs to it.
            chunk = chunk[1:]
        self._trailing_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
