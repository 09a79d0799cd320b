"""Scratch space: nameless files for bytes that this process alone needs, and soon.

Nothing there is committed, so no commit holds up a transfer, and no record has to remember it: a range is taken,
written, read and given back. Each write has a checksum of its content and its place, as in a store, and a read gives
those bytes or an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from swapper.arena import Arena, align
from swapper.checksum import seed
from swapper.device import Device, bandwidth_shares, open_device
from swapper.errors import StorageFull, readable_bytes
from swapper.files import Descriptor, open_directory, open_nameless
from swapper.ranges import Ranges
from swapper.ticket import Checksum, Ticket, Transfers

_STEP_BYTES = 64 << 20
"""A file grows by so much: its space is taken before it is written."""


@dataclass(eq=False, slots=True)
class ScratchRange:
    """A range of one of the files, from ``take`` to ``give_back``."""

    file: int
    offset: int
    nbytes: int
    checksum: Checksum


class Scratch:
    """Up to ``nbytes`` over the files of ``devices``, one for each path, which grow as they are needed. One thread
    calls.

    ``names`` are those of the paths in messages, ``shares`` the parts of the bytes that they are to carry.
    """

    def __init__(self, devices: Sequence[Device], names: Sequence[str], shares: Sequence[float], nbytes: int) -> None:
        self._identity = os.urandom(16)
        self._num_taken = 0
        self._files = [
            _File(Transfers(device, name), align(int(nbytes * share)), share)
            for device, name, share in zip(devices, names, shares, strict=True)
        ]
        self._closers = contextlib.ExitStack()
        for file in self._files:
            self._closers.callback(file.transfers.close)

    def closing(self, close: Callable[[], object]) -> None:
        """Have ``close`` called after the devices are closed."""
        before = self._closers.pop_all()
        self._closers.callback(close)
        self._closers.push(before)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the ranges that are taken now."""
        return sum(file.ranges.taken_bytes for file in self._files)

    def take(self, nbytes: int) -> ScratchRange:
        """A range of so many bytes, rounded up to whole pages, on the path that has least to do for its bandwidth.

        Raises ``StorageFull`` if the bound or the disk leaves no room.
        """
        nbytes = align(nbytes)
        for number in sorted(range(len(self._files)), key=lambda number: self._files[number].load):
            file = self._files[number]
            offset = file.ranges.take(nbytes)
            if offset is None:
                continue
            try:
                file.grow(offset + nbytes)
            except BaseException:
                file.ranges.give_back(offset, nbytes)
                raise
            self._num_taken += 1
            origin = seed(self._identity, number << 48 | offset, self._num_taken, nbytes)
            return ScratchRange(
                number, offset, nbytes, Checksum(f"scratch range [{offset}, {offset + nbytes})", origin)
            )
        bound = sum(file.ranges.nbytes for file in self._files)
        raise StorageFull(
            f"scratch space is used up: {readable_bytes(nbytes)} more are needed, of {readable_bytes(bound)} "
            f"{readable_bytes(self.taken_bytes)} are taken.",
            survives="Nothing has changed.",
        )

    def write(self, to: ScratchRange, address: int) -> Ticket:
        """Start writing the range from memory at ``address``, whole pages. Once for each range."""
        transfers = self._files[to.file].transfers
        return transfers.write(to.offset, address, to.nbytes, to.checksum, urgent=False)

    def read(self, source: ScratchRange, address: int, *, urgent: bool = False) -> Ticket:
        """Start reading the range, whose write is over, into memory at ``address``."""
        transfers = self._files[source.file].transfers
        return transfers.read(source.offset, address, source.nbytes, source.checksum, urgent=urgent)

    def give_back(self, taken: ScratchRange) -> None:
        """The range is free for others. No transfer of it is in flight."""
        self._files[taken.file].ranges.give_back(taken.offset, taken.nbytes)

    def register(self, arena: Arena) -> None:
        """Tell the queues where the buffers are."""
        for file in self._files:
            file.transfers.register(arena)

    def statistics_by_path(self) -> Sequence[aio_ext.Statistics]:
        """Statistics of what was moved so far, in the order of the paths."""
        return [file.transfers.device.statistics_by_file()[0] for file in self._files]

    def close(self) -> None:
        """Wait for what is in flight, and give the space back. Raises ``StorageTimeout``."""
        self._closers.close()


def open_scratch(
    paths: Sequence[str | os.PathLike[str]],
    nbytes: int,
    *,
    backend: str = "auto",
    queue_depth: int = 32,
    block_bytes: int = 1 << 20,
) -> Scratch:
    """Scratch space under ``paths``, in files without a name, 0600: a normal end, an exception and a ``kill -9`` all
    leave nothing behind. Raises ``StoreUnsafe`` for a path that cannot be trusted."""
    found = [Path(path) for path in paths]
    with contextlib.ExitStack() as undo:
        files = undo.enter_context(contextlib.ExitStack())
        devices = []
        for path in found:
            number = Descriptor.kept(files, _nameless(path))
            device = open_device(
                [path],
                0,
                lambda index, size, number=number: number,  # type: ignore[misc]
                backend=backend,
                queue_depth=queue_depth,
                block_bytes=block_bytes,
            )
            undo.callback(device.close)
            devices.append(device)
        scratch = Scratch(devices, [str(path) for path in found], bandwidth_shares(found), nbytes)
        scratch.closing(files.pop_all().close)
        undo.pop_all()
    return scratch


def _nameless(path: Path) -> int:
    parent = Descriptor(open_directory(path))
    try:
        return open_nameless(path, parent.number)
    finally:
        parent.close()


class _File:
    def __init__(self, transfers: Transfers, nbytes: int, share: float) -> None:
        self.transfers = transfers
        self.ranges = Ranges(nbytes)
        self._share = share
        self._reserved = 0

    @property
    def load(self) -> float:
        """Bytes taken, for its bandwidth."""
        return self.ranges.taken_bytes / self._share

    def grow(self, stop: int) -> None:
        """Have the space up to ``stop``. Raises ``StorageFull``."""
        if stop <= self._reserved:
            return
        wanted = min(align(stop, _STEP_BYTES), self.ranges.nbytes)
        self.transfers.reserve([(self._reserved, wanted - self._reserved)])
        self._reserved = wanted
