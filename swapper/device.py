"""Protocol of the device that holds a store's bytes, and the real one: files, moved by queues."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

import aio_ext
from aio_ext.profile import load_profile
from swapper.arena import Arena
from swapper.errors import StorageCorrupt, StorageTimeout, failed
from swapper.files import give_back_ranges, reserve_ranges

IO_TIMEOUT_S = 300.0
"""No transfer may take longer: a disk that is silent for this long is treated as gone."""

CHUNK_BYTES = 4 << 20
"""Bytes that are placed on one of several paths as a whole."""

_ROOM = 1.25
"""Factor by which a path has room for more of the bytes than its share, so that a slower one can be relieved."""

_SPARE_CHUNKS = 2


class Transfer(Protocol):
    """One request in flight; ``aio_ext.Ticket`` is one. ``error`` is why it failed, None before and otherwise."""

    @property
    def error(self) -> OSError | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def add_done_callback(self, call: Callable[[Any], object]) -> None: ...
    def __await__(self) -> Generator[object, None, None]: ...


class Device(Protocol):
    """A flat space of bytes on stable storage. Offsets and sizes are whole pages; any thread may call any method."""

    @property
    def backend(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer: ...
    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer: ...

    def sync(self) -> Transfer:
        """Make durable what was written before. A sync that failed is never repeated: what it covered is unknown."""

    def table(self) -> list[tuple[int, int]]:
        """Path and slot of each chunk of a space on several paths, as of the writes that are over; else nothing."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The files that hold the bytes."""

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the space of these ranges (offset, bytes), unless it was all taken at first. Raises ``StorageFull`` or
        ``OSError``."""

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Let the space of these ranges be used by others; what they hold is lost."""

    def register(self, arena: Arena) -> None: ...
    def statistics(self) -> aio_ext.Statistics: ...

    def statistics_by_file(self) -> Sequence[aio_ext.Statistics]:
        """Bytes that each file has moved, in the order of ``descriptors``."""

    def close(self) -> None: ...


class FileDevice:
    """One file on one device, behind one queue."""

    def __init__(self, descriptor: int, *, backend: str, queue_depth: int, block_bytes: int) -> None:
        self.descriptor = descriptor
        self._reserved_before = os.fstat(descriptor).st_blocks * 512
        """Bytes that the file had when it was opened and nobody has asked for since."""
        self.queue = aio_ext.Queue(backend=backend, depth=queue_depth, block_bytes=block_bytes)
        try:
            self.file = self.queue.register_file(descriptor)
        except BaseException:
            self.queue.close()
            raise

    @property
    def backend(self) -> str:
        return self.queue.backend

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.queue.notes)

    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self.queue.read(self.file, offset, address, nbytes, urgent=urgent)

    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self.queue.write(self.file, offset, address, nbytes, urgent=urgent)

    def sync(self) -> Transfer:
        return self.queue.sync(self.file)

    def table(self) -> list[tuple[int, int]]:
        return []

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.descriptor,)

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        reserve_ranges(self.descriptor, ranges, self._reserved_before)
        self._reserved_before = max(self._reserved_before - sum(nbytes for _, nbytes in ranges), 0)

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        give_back_ranges(self.descriptor, ranges)

    def register(self, arena: Arena) -> None:
        self.queue.register_memory(arena.address, arena.nbytes)

    def statistics(self) -> aio_ext.Statistics:
        return self.queue.statistics()

    def statistics_by_file(self) -> Sequence[aio_ext.Statistics]:
        return [self.queue.statistics()]

    def close(self) -> None:
        try:
            self.queue.close()
        except TimeoutError as error:
            raise StorageTimeout(str(error)) from None


class StripedDevice:
    """Several files, each on a device of its own, as one space: each path carries what it is fast enough for.

    ``shares`` are the expected bandwidths: they place what has not been written yet. From then on writes go to
    the path that is free, see ``aio_ext/striped.py``. ``table`` is where the chunks were at the
    last commit.
    """

    def __init__(
        self,
        devices: Sequence[FileDevice],
        capacities: Sequence[int],
        shares: Sequence[float],
        nbytes: int,
        table: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._devices = tuple(devices)
        paths = [
            aio_ext.StripePath(device.queue, device.file, capacity, share)
            for device, capacity, share in zip(devices, capacities, shares, strict=True)
        ]
        self._space = aio_ext.StripedFile(paths, nbytes, CHUNK_BYTES, table=table)

    @property
    def backend(self) -> str:
        return self._devices[0].backend

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for device in self._devices for note in device.notes))

    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._space.read(offset, address, nbytes, urgent)

    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._space.write(offset, address, nbytes, urgent)

    def sync(self) -> Transfer:
        return self._space.sync()

    def table(self) -> list[tuple[int, int]]:
        return self._space.table()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(device.descriptor for device in self._devices)

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All of it was taken at first: chunks move."""

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        """It stays: a chunk holds pieces of several extents."""

    def register(self, arena: Arena) -> None:
        for device in self._devices:
            device.register(arena)

    def statistics(self) -> aio_ext.Statistics:
        return add_up(self.statistics_by_file())

    def statistics_by_file(self) -> Sequence[aio_ext.Statistics]:
        return [device.statistics() for device in self._devices]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for device in self._devices:
                closing.callback(device.close)


def open_device(
    paths: Sequence[Path],
    nbytes: int,
    open_file: Callable[[int, int], int],
    *,
    backend: str,
    queue_depth: int,
    block_bytes: int,
    table: Sequence[tuple[int, int]] = (),
) -> Device:
    """A space of ``nbytes`` over ``paths``.

    ``open_file`` gives a descriptor of a file on the path of this number; a new file gets room for so many bytes.
    ``table`` is what the space's ``table`` was, if it is not new.
    """
    shares = bandwidth_shares(paths)
    num_chunks = -(-nbytes // CHUNK_BYTES)
    sizes = [nbytes]
    if len(paths) > 1:
        sizes = [(math.ceil(num_chunks * share * _ROOM) + _SPARE_CHUNKS) * CHUNK_BYTES for share in shares]
    with contextlib.ExitStack() as undo:
        devices = []
        for index, size in enumerate(sizes):
            file = open_file(index, size)
            try:
                devices.append(FileDevice(file, backend=backend, queue_depth=queue_depth, block_bytes=block_bytes))
            except OSError as error:
                raise failed(f"making a queue for {paths[index]}", error) from error
            undo.callback(devices[-1].close)
            sizes[index] = os.fstat(file).st_size
        _check_table(table, sizes, num_chunks if len(paths) > 1 else 0)
        device = devices[0] if len(devices) == 1 else StripedDevice(devices, sizes, shares, nbytes, table or None)
        undo.pop_all()
    return device


def _check_table(table: Sequence[tuple[int, int]], sizes: Sequence[int], num_chunks: int) -> None:
    outside = [entry for entry in table if entry[0] >= len(sizes) or (entry[1] + 1) * CHUNK_BYTES > sizes[entry[0]]]
    if outside or len(table) not in (0, num_chunks):
        raise StorageCorrupt(
            f"the table of chunks does not fit the files: {len(table)} chunks, {num_chunks} are needed; "
            f"{len(outside)} are outside of the files, which have {list(sizes)} bytes."
        )


def bandwidth_shares(paths: Sequence[Path]) -> list[float]:
    """Share of the bytes that each path should carry: by the profiles that `aio_bench` wrote, if all have one."""
    rates = []
    for path in paths:
        with contextlib.suppress(OSError):  # a path that cannot be looked at is refused when it is opened
            profile = load_profile(path)
            if profile is not None:
                rates.append(profile.mixed_bytes_per_s)
    if len(rates) < len(paths):
        return [1 / len(paths)] * len(paths)
    return [rate / sum(rates) for rate in rates]


def add_up(parts: Sequence[aio_ext.Statistics]) -> aio_ext.Statistics:
    """The statistics of several queues as if they were one: counts are added, latencies and times are the largest."""

    def join(values: list[Any], name: str) -> Any:
        if isinstance(values[0], aio_ext.DirectionStatistics):
            return aio_ext.DirectionStatistics(
                **{key: join([vars(v)[key] for v in values], key) for key in vars(values[0])}
            )
        return max(values) if name.endswith("_s") or name.endswith("seconds") else sum(values)

    return aio_ext.Statistics(**{key: join([vars(part)[key] for part in parts], key) for key in vars(parts[0])})
