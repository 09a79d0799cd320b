"""Numbers and texts that lie one after the other, as their bytes are."""

from __future__ import annotations

import struct
from collections.abc import Callable

from swapper.checked.refused import Refused

_READ_BYTES = 1 << 20


class PackedCursor:
    """Goes through the first ``most`` bytes of what ``read(start, count)`` reads, a MiB at a time. Little-endian."""

    def __init__(self, read: Callable[[int, int], bytes], most: int) -> None:
        self._read = read
        self._most = most
        self._bytes = bytearray()
        self.at = 0

    @property
    def taken(self) -> bytes:
        """All bytes that were gone through."""
        return bytes(self._bytes[: self.at])

    def take(self, count: int) -> bytes:
        """The next bytes. Raises ``Refused`` if there are not so many, as all that follows."""
        start = self.skip(count)
        return bytes(self._bytes[start : self.at])

    def number(self, form: str) -> int:
        """The next integer, of the type that ``struct`` has this letter for."""
        start = self.skip(width_of(form))
        return int(struct.unpack_from("<" + form, self._bytes, start)[0])

    def text(self) -> str:
        """The next text: 8 bytes with its length, and UTF-8."""
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise Refused("a text is no UTF-8") from None

    def skip(self, count: int) -> int:
        """Pass over bytes. Returns the place of the first one."""
        start, self.at = self.at, self.at + count
        if self.at > self._most:
            raise Refused(f"it is cut off: at byte {start} there should be {count} more, and the end is {self._most}")
        while len(self._bytes) < self.at:
            size = min(max(self.at - len(self._bytes), _READ_BYTES), self._most - len(self._bytes))
            self._bytes += self._read(len(self._bytes), size)
        return start


def width_of(form: str) -> int:
    """The bytes of a number of this type."""
    return struct.calcsize("<" + form)
