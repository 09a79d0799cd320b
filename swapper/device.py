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

    def statistics_by_file(self) -> Sequence[aio_ext.Statistics]:
        """Bytes that each file has moved, in the order of ``descriptors``."""

    def close(self) -> None: ...


class _OpenFile:
    """A file on one path, and the queue that serves it."""

    def __init__(self, descriptor: int, *, backend: str, queue_depth: int, block_bytes: int) -> None:
        self.descriptor = descriptor
        self.queue = aio_ext.Queue(backend=backend, depth=queue_depth, block_bytes=block_bytes)
        try:
            self.number = self.queue.register_file(descriptor)
        except BaseException:
            self.queue.close()
            raise

    def close(self) -> None:
        try:
            self.queue.close()
        except TimeoutError as error:
            raise StorageTimeout(str(error)) from None


class _Files:
    """All of a device that does not depend on how many files it has."""

    def __init__(self, files: Sequence[_OpenFile]) -> None:
        self._files = tuple(files)

    @property
    def backend(self) -> str:
        return self._files[0].queue.backend

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for file in self._files for note in file.queue.notes))

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(file.descriptor for file in self._files)

    def register(self, arena: Arena) -> None:
        for file in self._files:
            file.queue.register_memory(arena.address, arena.nbytes)

    def statistics_by_file(self) -> Sequence[aio_ext.Statistics]:
        return [file.queue.statistics() for file in self._files]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for file in self._files:
                closing.callback(file.close)


class FileDevice(_Files):
    """One file on one device, behind one queue."""

    def __init__(self, file: _OpenFile) -> None:
        super().__init__([file])
        self._file = file
        self._reserved_before = os.fstat(file.descriptor).st_blocks * 512
        """Bytes that the file had when it was opened and nobody has asked for since."""

    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._file.queue.read(self._file.number, offset, address, nbytes, urgent=urgent)

    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._file.queue.write(self._file.number, offset, address, nbytes, urgent=urgent)

    def sync(self) -> Transfer:
        return self._file.queue.sync(self._file.number)

    def table(self) -> list[tuple[int, int]]:
        return []

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        reserve_ranges(self._file.descriptor, ranges, self._reserved_before)
        self._reserved_before = max(self._reserved_before - sum(nbytes for _, nbytes in ranges), 0)

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        give_back_ranges(self._file.descriptor, ranges)


class StripedDevice(_Files):
    """Several files, each on a device of its own, as one space: each path carries what it is fast enough for.

    ``shares`` are the expected bandwidths: they place what has not been written yet. From then on writes go to
    the path that is free, see ``aio_ext/striped.py``. ``table`` is where the chunks were at the
    last commit.
    """

    def __init__(
        self,
        files: Sequence[_OpenFile],
        capacities: Sequence[int],
        shares: Sequence[float],
        nbytes: int,
        table: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(files)
        paths = [
            aio_ext.StripePath(file.queue, file.number, capacity, share)
            for file, capacity, share in zip(files, capacities, shares, strict=True)
        ]
        self._space = aio_ext.StripedFile(paths, nbytes, CHUNK_BYTES, table=table)

    def read(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._space.read(offset, address, nbytes, urgent)

    def write(self, offset: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        return self._space.write(offset, address, nbytes, urgent)

    def sync(self) -> Transfer:
        return self._space.sync()

    def table(self) -> list[tuple[int, int]]:
        return self._space.table()

    def reserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All of it was taken at first: chunks move."""

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        """It stays: a chunk holds pieces of several extents."""


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
        files = []
        for index, size in enumerate(sizes):
            file = open_file(index, size)
            try:
                files.append(_OpenFile(file, backend=backend, queue_depth=queue_depth, block_bytes=block_bytes))
            except OSError as error:
                raise failed(f"making a queue for {paths[index]}", error) from error
            undo.callback(files[-1].close)
            sizes[index] = os.fstat(file).st_size
        _check_table(table, sizes, num_chunks if len(paths) > 1 else 0)
        several = len(files) > 1
        device = StripedDevice(files, sizes, shares, nbytes, table or None) if several else FileDevice(files[0])
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
