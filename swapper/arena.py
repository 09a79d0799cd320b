"""The arena: all host memory that I/O touches, taken once, in huge pages, and handed out in leases."""

from __future__ import annotations

from collections.abc import Callable

import aio_ext
from swapper.errors import OffloadError

PAGE_BYTES = 4096
"""Alignment of every lease and every extent: what O_DIRECT asks for on any disk."""


def align(nbytes: int, multiple: int = PAGE_BYTES) -> int:
    """Round ``nbytes`` up to a multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


class Lease:
    """The right to use one range of the arena, until the arena is closed. ``address`` is page-aligned."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class Arena:
    """``nbytes`` of page-aligned memory, reserved at once and leased from front to back.

    Leases are never returned: what shares memory over time does so in a ``Pool`` of equal buffers, so the
    arena cannot fragment and its size is exactly the sum of what was planned.
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
                f"arena is used up: asked for {nbytes} bytes, {self.nbytes - self._next} of {self.nbytes} are left"
            )
        lease = Lease(self._memory.address + self._next, nbytes)
        self._next += nbytes
        return lease

    def huge_bytes(self) -> int:
        """How much of the arena the kernel backs with huge pages right now."""
        return self._memory.huge_bytes()

    def close(self) -> None:
        """Give the memory back. No I/O may be in flight in it: close the store first."""
        self._memory.close()


class Pool:
    """Equal buffers, lent one at a time by one thread; when none is free, ``reclaim`` must bring one back.

    ``reclaim`` is called with no argument, blocks until some buffer has been given back, and raises if none
    ever can be: pressure is felt by the caller, never by the RAM.
    """

    def __init__(self, arena: Arena, nbytes: int, count: int, reclaim: Callable[[], None]) -> None:
        self.nbytes = align(nbytes)
        self._free = [arena.lease(self.nbytes) for _ in range(count)]
        self._reclaim = reclaim

    def __len__(self) -> int:
        """Number of buffers that are free now."""
        return len(self._free)

    def take(self) -> Lease:
        """Lend a buffer, waiting for one if need be."""
        while not self._free:
            self._reclaim()
        return self._free.pop()

    def give(self, lease: Lease) -> None:
        """Take a buffer back."""
        self._free.append(lease)
