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
from swapper.ticket import Checksum, Ticket, Transfers

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Extent:
    """One piece of a store, moved as a whole. ``nbytes`` is a multiple of the page size; ``offset`` is that of the
    extent in the store's space (in a durable store, in each copy of it)."""

    index: int
    offset: int
    nbytes: int


def lay_out(sizes: Sequence[int]) -> tuple[tuple[Extent, ...], int]:
    """One extent after the other, sizes rounded up to whole pages; and the bytes of all of them."""
    extents, offset = [], 0
    for index, size in enumerate(sizes):
        extents.append(Extent(index, offset, align(size)))
        offset += align(size)
    return tuple(extents), offset


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
    kill all give the space back, and any number of stores can share a path. Each extent has a checksum, kept in
    memory; a read gives the bytes that were written, or an error.

    ``extent_sizes`` are bytes, rounded up to whole pages. Everything is reserved here or nothing is.

    Raises ``StoreUnsafe`` for a path that cannot hold a store, ``StorageFull`` if the extents do not fit. Nothing is
    left behind in either case.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        extent_sizes: Sequence[int],
        *,
        backend: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
    ) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._extents, self.nbytes = lay_out(extent_sizes)
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
        identity = os.urandom(16)
        self._transfers = Transfers(device, ", ".join(map(str, self.paths)))
        self._closers.callback(self._transfers.close)
        self._checksums = [
            Checksum(f"extent {extent.index}", seed(identity, extent.index, 0, extent.nbytes))
            for extent in self._extents
        ]

    def read(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start reading ``extent`` into memory at ``address``. ``urgent`` overtakes background transfers.

        A read and a write of one extent must not be in flight at a time. ``nbytes`` is the extent's.
        Raises ``StoreMisuse`` for another size, and for an extent that was never written.
        """
        checksum = self._checksum(extent, nbytes)
        if checksum.value is None:
            raise StoreMisuse(f"extent {extent.index} was never written.")
        return self._transfers.read(extent.offset, address, nbytes, checksum, urgent=urgent)

    def write(self, extent: Extent, address: int, nbytes: int, *, urgent: bool = False) -> Ticket:
        """Start writing ``extent`` from memory at ``address``. See ``read``."""
        return self._transfers.write(extent.offset, address, nbytes, self._checksum(extent, nbytes), urgent=urgent)

    def close(self) -> None:
        """Wait for what is in flight, then give the space back. Safe to call twice."""
        self._closers.close()

    def _checksum(self, extent: Extent, nbytes: int) -> Checksum:
        if nbytes != extent.nbytes:
            raise StoreMisuse(f"extent {extent.index} has {extent.nbytes} bytes, not {nbytes}.")
        return self._checksums[extent.index]

    def _open_file(self, path_index: int, nbytes: int) -> int:
        """A nameless file, all of it reserved."""
        path = self.paths[path_index]
        directory = Descriptor(open_directory(path))
        self._closers.callback(directory.close)
        file = Descriptor(open_nameless(path, directory.number))
        self._closers.callback(file.close)
        reserve(file.number, nbytes, path)
        return file.number
