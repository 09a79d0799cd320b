"""The arena: all host memory that I/O touches, taken once, in huge pages, and handed out in leases."""

from __future__ import annotations

from dataclasses import dataclass

import aio_ext
from swapper.errors import OffloadError, readable_bytes

PAGE_BYTES = 4096
"""Alignment of every lease and every extent: what O_DIRECT asks for on any disk."""


def align(nbytes: int, multiple: int = PAGE_BYTES) -> int:
    """Round ``nbytes`` up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


@dataclass(eq=False, slots=True)
class Lease:
    """The right to use one range of the arena, until the arena is closed. ``address`` is page-aligned."""

    address: int
    nbytes: int


class Arena:
    """``nbytes`` of page-aligned memory, reserved at once and leased from front to back.

    Leases are never returned: what shares memory over time passes through buffers of equal size, so the arena cannot
    fragment and its size is exactly the sum of what was planned.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align(nbytes)
        self._memory = aio_ext.Memory(max(self.nbytes, PAGE_BYTES))
        self._next = 0

    @property
    def address(self) -> int:
        return self._memory.address

    def lease(self, nbytes: int) -> Lease:
        """Take the next ``nbytes`` (rounded up to whole pages). Raises ``OffloadError`` when the arena is used up."""
        nbytes = align(nbytes)
        if self._next + nbytes > self.nbytes:
            raise OffloadError(
                f"arena is used up: asked for {readable_bytes(nbytes)}, of {readable_bytes(self.nbytes)} "
                f"{readable_bytes(self.nbytes - self._next)} are left"
            )
        lease = Lease(self._memory.address + self._next, nbytes)
        self._next += nbytes
        return lease

    def huge_bytes(self) -> int:
        """Bytes of the arena that the kernel backs with huge pages right now."""
        return self._memory.huge_bytes()

    def close(self) -> None:
        """Give the memory back. No I/O may be in flight in it: close the store first."""
        self._memory.close()
