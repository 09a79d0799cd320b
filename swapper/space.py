"""The places of a store that have their space, and taking it.

[Note: Space] The space of a place is taken when the store is made, or else by ``reserve``, or before it is first
written. So there can be room for many generations in the layout that takes no room on the disk before they are there.
The file system may take long for it. So a write that finds its place without space lets go of the store, takes the
space, and looks again which place is its own: a commit may have changed that meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from swapper.extent import Extent
from swapper.record import Record
from swapper.ticket import Transfers


class Space:
    """Number of places of each extent that have their space: the first ones of its record.

    ``reserved`` is how many of each of the first extents get it now; None: all places have it already. Raises
    ``StorageFull``. Any thread may call any method.
    """

    def __init__(
        self,
        transfers: Transfers,
        extents: Sequence[Extent],
        records: Sequence[Record],
        reserved: Sequence[int] | None,
    ) -> None:
        self._transfers = transfers
        self._extents = extents
        self._records = records
        self._taken = [record.num_places if reserved is None else 0 for record in records]
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards ``_taken``, and what the device knows of its room. Held while the file system takes space, which it
        does for one caller at a time; nobody waits for it but those who need space, too, and ``close``. No lock is
        taken under it, and none of the store's is held."""
        if reserved is not None:
            self.reserve(reserved)

    def has(self, extent: Extent, number: int) -> bool:
        """Place ``number`` of the extent has its space."""
        return number < self._taken[extent.index]

    def take(self, extent: Extent, number: int) -> None:
        """Take the space of the places up to ``number``. Raises ``StorageFull`` or ``StorageIOError``; what is taken
        for the call then is found by the next one, as space that is there."""
        self._take({extent.index: number + 1})

    def reserve(self, num_places: Sequence[int]) -> None:
        """Take the space of so many places of each of the first extents. Raises as ``take``."""
        self._take(dict(enumerate(num_places[: len(self._extents)])))

    def give_back(self, needed: Sequence[set[int]]) -> None:
        """Give back the space of all places but those that are ``needed``, by extent. Each place is taken again when it
        is to be written."""
        with self._lock:
            ranges = []
            for extent, record, kept in zip(self._extents, self._records, needed, strict=True):
                numbers = (number for number in range(record.num_places) if number not in kept)
                ranges += [(record.offset_of(number), extent.nbytes) for number in numbers]
            self._transfers.device.give_back(ranges)
            self._taken = [0] * len(self._taken)

    def close(self) -> None:
        """Wait until nobody takes space. Nothing is taken any more: the files may be closed then."""
        with self._lock:
            self._is_closed = True

    def _take(self, wanted: Mapping[int, int]) -> None:
        """Take the space of so many places of the extents with these numbers."""
        with self._lock:
            if self._is_closed:
                return
            ranges: list[tuple[int, int]] = []
            more: dict[int, int] = {}
            for index, want in wanted.items():
                record, have = self._records[index], self._taken[index]
                if have < min(want, record.num_places):
                    more[index] = min(want, record.num_places)
                    numbers = range(have, more[index])
                    ranges += [(record.offset_of(number), self._extents[index].nbytes) for number in numbers]
            self._transfers.reserve(ranges)
            for index, now in more.items():
                self._taken[index] = now
