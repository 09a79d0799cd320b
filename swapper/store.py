"""A scratch store: preallocated, nameless files on one or more paths, whose extents come back as they were written."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aio_ext
from swapper.arena import Arena, align
from swapper.checksum import seed
from swapper.device import open_device
from swapper.errors import StoreMisuse
from swapper.files import Descriptor, open_directory, open_nameless, reserve
from swapper.record import Place, Record
from swapper.ticket import Checksum, Ticket, Transfers

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Extent:
    """One piece of a store, moved as a whole. ``nbytes`` is a multiple of the page size; ``offset`` is that of the
    extent's first place in the store's space."""

    index: int
    offset: int
    nbytes: int


def lay_out(sizes: Sequence[int], places: Sequence[int]) -> tuple[tuple[Extent, ...], list[Record], int]:
    """The extents, sizes rounded up to whole pages, with their records; and the bytes of all places.

    Extents with the same number of places lie together: all their first places, one after the other, then all their
    second ones, and so on.
    """
    per_place: dict[int, int] = {}
    starts = []
    for size, count in zip(sizes, places, strict=True):
        starts.append(per_place.setdefault(count, 0))
        per_place[count] += align(size)
    begin, nbytes = {}, 0
    for count, stride in per_place.items():
        begin[count] = nbytes
        nbytes += count * stride
    extents = tuple(
        Extent(index, begin[count] + start, align(size))
        for index, (size, count, start) in enumerate(zip(sizes, places, starts, strict=True))
    )
    records = [Record(e.index, e.offset, per_place[count], count) for e, count in zip(extents, places, strict=True)]
    return extents, records, nbytes


class AnyStore(abc.ABC):
    """What scratch and durable stores have in common."""

    _transfers: Transfers
    _extents: tuple[Extent, ...]

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents, in the order in which their sizes were given."""
        return self._extents

    @property
    def backend(self) -> str:
        """What moves the bytes: ``io_uring``, ``threads`` or ``portable``."""
        return self._transfers.device.backend

    @property
    def notes(self) -> tuple[str, ...]:
        """What the queue had to do without, why, and the fix."""
        return self._transfers.device.notes

    @property
    def num_second_reads(self) -> int:
        """Reads that went wrong and were done once more. More than a few: look after the device."""
        return self._transfers.num_second_reads

    def register(self, arena: Arena) -> None:
        """Tell the queue where its buffers are, so that the kernel need not map them for each transfer."""
        self._transfers.register(arena)

    def statistics(self) -> aio_ext.Statistics:
        """What the queue has moved so far."""
        return self._transfers.device.statistics()

    @property
    def num_second_writes(self) -> int:
        """Writes that failed and were done once more. More than a few: look after the device."""
        return self._transfers.num_second_writes

    @abc.abstractmethod
    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start reading what is current of ``extent`` into memory at ``address``. ``urgent`` overtakes others.

        ``nbytes`` is the extent's. The ``write`` before must be over, and so must the write that was flipped last.
        A ``write_beside`` may be in flight.
        Raises ``StoreMisuse`` for another size, and for an extent that was never written.
        """

    @abc.abstractmethod
    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``; later reads take these bytes.

        The bytes go to a place that is not current, if there is one that is not needed. Then the old bytes are current
        again if the write fails; otherwise they are lost. What was written beside and not flipped is given up.
        No read and no other write of the extent may be in flight.
        """

    @abc.abstractmethod
    def write_beside(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``, beside what is current, which stays current.

        Reads of the extent may be in flight; no other write may. The bytes become current with ``flip``; without it,
        the next write takes their place.
        Raises ``StoreMisuse`` or ``StorageFull`` if the extent has no place for it.
        """

    @abc.abstractmethod
    def flip(self, extent: Extent) -> None:
        """Make current what was written beside ``extent`` last.

        No read of the extent may be in flight. The write may be; a read, and the next write, must wait until it is
        over. If it fails after this, what was current before is current again.
        Raises ``StoreMisuse`` if nothing was written beside since the last flip or write, and the error of the write
        if that has failed already. Nothing has changed then.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, then give everything back. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(AnyStore):
    """Preallocated extents on one or more directories, moved with O_DIRECT, verified on every read.

    The files have no name: they are created 0600 without a directory entry, so that a normal end, an exception and a
    kill all give the space back, and any number of stores can share a path. Each place has a checksum, kept in
    memory; a read gives the bytes that were written, or an error. One thread at a time may deal with one extent.

    ``extent_sizes`` are bytes, rounded up to whole pages. ``places`` is the number of places of each extent, 1 or 2;
    one number counts for all. The store takes ``nbytes``, the sum of sizes times places. Everything is reserved here
    or nothing is.

    Raises ``StoreUnsafe`` for a path that cannot hold a store, ``StorageFull`` if the extents do not fit,
    ``StoreMisuse`` for another number of places. Nothing is left behind.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        extent_sizes: Sequence[int],
        *,
        places: int | Sequence[int] = 1,
        backend: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._extents, self._records, self.nbytes = lay_out(extent_sizes, each(places, len(extent_sizes), (1, 2)))
        self._closers = contextlib.ExitStack()
        try:
            device = open_device(
                self.paths,
                self.nbytes,
                self._open_file,
                backend=backend,
                queue_depth=queue_depth,
                block_bytes=block_bytes,
            )
        except BaseException:
            self._closers.close()
            raise
        self._identity = os.urandom(16)
        self._transfers = Transfers(device, ", ".join(map(str, self.paths)))
        self._closers.callback(self._transfers.close)

    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """See ``AnyStore.read``."""
        place = self._record(extent, nbytes).readable()
        return self._transfers.read(place.offset, address, nbytes, place.checksum, urgent=urgent)

    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """See ``AnyStore.write``. An extent with one place is written over."""
        record = self._record(extent, nbytes)
        place = self._place(record, record.replaceable(), nbytes)
        record.give_up_beside()
        ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
        record.replaced(place)
        return ticket

    def write_beside(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """See ``AnyStore.write_beside``. Raises ``StoreMisuse`` for an extent with one place."""
        record = self._record(extent, nbytes)
        number = record.spare() if record.num_places > 1 else None
        if number is None:
            raise StoreMisuse(
                f"extent {extent.index} has one place: nothing can be written beside what is current.",
                advice="Give the store places=2, for this extent or for all.",
            )
        place = self._place(record, number, nbytes)
        record.give_up_beside()
        ticket = self._transfers.write(place.offset, address, nbytes, place.checksum, urgent=urgent)
        record.put_beside(place)
        return ticket

    def flip(self, extent: Extent) -> None:
        """See ``AnyStore.flip``."""
        self._records[extent.index].flip()

    def close(self) -> None:
        """Wait for what is in flight, then give the space back. Safe to call twice."""
        self._closers.close()

    def _record(self, extent: Extent, nbytes: int) -> Record:
        if nbytes != extent.nbytes:
            raise StoreMisuse(f"extent {extent.index} has {extent.nbytes} bytes, not {nbytes}.")
        return self._records[extent.index]

    def _place(self, record: Record, number: int, nbytes: int) -> Place:
        """Place ``number``, for a new write. The seed has the number, so the other place's bytes are wrong here."""
        checksum = Checksum(f"extent {record.index}", seed(self._identity, record.index, number, nbytes))
        return Place(number, record.offset_of(number), checksum)

    def _open_file(self, path_index: int, nbytes: int) -> int:
        """A nameless file, all of it reserved."""
        path = self.paths[path_index]
        directory = Descriptor(open_directory(path))
        self._closers.callback(directory.close)
        file = Descriptor(open_nameless(path, directory.number))
        self._closers.callback(file.close)
        reserve(file.number, nbytes, path)
        return file.number


def each(places: int | Sequence[int], num_extents: int, allowed: Sequence[int]) -> list[int]:
    """The number of places of each extent, from one number for all or from one for each. Raises ``StoreMisuse``."""
    numbers = [places] * num_extents if isinstance(places, int) else list(places)
    if len(numbers) != num_extents:
        raise StoreMisuse(f"places has {len(numbers)} numbers, there are {num_extents} extents.")
    for index, number in enumerate(numbers):
        if number not in allowed:
            raise StoreMisuse(f"places of extent {index} must be {' or '.join(map(str, allowed))}, got {number}.")
    return numbers
