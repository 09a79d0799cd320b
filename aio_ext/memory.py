"""Memory that I/O is done from, and addresses that show a pattern."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ._core import core

if TYPE_CHECKING:
    from ._aio import Lease


class _Range:
    """A range of addresses that stays mapped while anything uses it, a request in flight included."""

    def __init__(self, lease: Lease, nbytes: int) -> None:
        self._lease = lease
        self.address: int = lease.address
        self.nbytes: int = nbytes

    def close(self) -> None:
        """Give the range up. Its pages stay parked as long as a request in flight or a queue needs them."""
        self._lease.close()

    def __enter__(self):  # type: ignore[no-untyped-def]  # typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memory(_Range):
    """``nbytes`` of private memory on a 2 MiB boundary, from huge pages where they can be had.

    Effects: takes pages reserved as hugetlb if there are enough, else asks for transparent ones; pages appear when
             first touched, or all at once with :meth:`populate`. Overruns meet a guard page. Children made by ``fork``
             do not have the memory at all, core dumps leave it out. Never remap a part that a queue has registered.
    Raises:  ``ValueError`` for a size of 0 or less, ``OSError`` (``ENOMEM``) when there are no addresses or pages.
    """

    def __init__(self, nbytes: int, huge_pages: bool = True) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes must be > 0, got {nbytes}")
        super().__init__(core.anonymous_memory(nbytes, huge_pages), nbytes)

    def populate(self) -> None:
        """Give every page its memory now. Raises ``OSError`` (``ENOMEM``) when there is not enough."""
        self._lease.populate()

    def huge_bytes(self) -> int:
        """Bytes that rest on 2 MiB pages at this moment, as the kernel tells; 0 before the memory is touched."""
        return huge_bytes(self.address, self.nbytes)


class Pattern(_Range):
    """``nbytes`` of read-only addresses that show the 16-bit ``value`` over and over, at the cost of 2 MiB of memory.

    Meant as what stands under data that is elsewhere: with 0x7fff a stray read gives NaN in bf16, fp16, fp32 and
    fp64; a stray write traps. Every 2 MiB take one of the process's mappings (``vm.max_map_count``, usually 65530).
    Raises: ``ValueError`` for a bad size or value, ``OSError`` (``ENOMEM``) when there are too many mappings.
    """

    def __init__(self, nbytes: int, value: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes must be > 0, got {nbytes}")
        if not 0 <= value <= 0xFFFF:
            raise ValueError(f"value must be a 16-bit number, got {value}")
        super().__init__(core.pattern_memory(nbytes, value), nbytes)


def share(address: int, nbytes: int) -> Lease | None:
    """A part in the range that contains ``[address, address + nbytes)``, which stays mapped as long as this does; None
    where no range does."""
    return core.lease_containing(address, nbytes)


def huge_bytes(address: int, nbytes: int) -> int:
    """Bytes of ``[address, address + nbytes)`` on 2 MiB pages, by ``/proc/self/smaps``; whole mappings are counted."""
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split(" ", 1)[0]:
            begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            inside = begin < address + nbytes and address < end
        elif inside and name in ("AnonHugePages", "Private_Hugetlb"):
            total += int(value.split()[0]) * 1024
    return total
