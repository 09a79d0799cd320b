"""A generation of an open store, copied into a folder that ``open_generation`` reads, a few MiB at a time.

[Note: The layout of a copy] The copy has the generation's manifest, with a layout of its own: the extents that are a
part of the generation lie one after the other, the others have no bytes. Identity, numbers, generations and sizes are
what they were, and so are the checksums: what is read is compared with what was committed, and written as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import xxhash

import aio_ext
from swapper.checksum import seed
from swapper.device import IO_TIMEOUT_S, Transfer
from swapper.directory import RealDirectory
from swapper.durable import DurableStore
from swapper.errors import NO_ROOM, StorageCorrupt, StorageTimeout, failed
from swapper.extent import Extent
from swapper.files import Descriptor, named, open_direct, open_directory, require_room, take_room
from swapper.manifest import Entry, Manifest
from swapper.publication import layout_of, publish, used_bytes

_PART_BYTES = 2 << 20
"""Bytes that are read at once: the store's other transfers wait for so much at most."""

_SYNC_BYTES = 256 << 20
"""After so many bytes the disk must have them: where there is no direct I/O, the page cache takes no more of them."""


def copy_generation(store: DurableStore, generation: int, folder: Path, copied: Callable[[int], None]) -> None:
    """Copy a generation that ``store`` keeps into the empty directory ``folder``, for good.

    Memory: two buffers of 2 MiB. ``copied`` is called with the bytes of each part that is written; what it raises ends
    the copy. Any thread may call this while others use the store; the generation must be kept meanwhile.
    Raises ``StorageFull``, before anything is written if that can be seen, ``StorageIOError``, ``StorageTimeout``, and
    ``StorageCorrupt`` if a part comes back wrong twice. ``folder`` holds no generation then.
    """
    source = store.manifest_of(generation)
    target = _laid_out_anew(source)
    try:
        with contextlib.ExitStack() as closing:
            directory = Descriptor.kept(closing, open_directory(folder))
            require_room(directory, used_bytes(target), named(folder), "Free some space, or give another directory.")
            file = Descriptor.kept(closing, open_direct("data.0", os.O_CREAT | os.O_EXCL, directory))
            take_room(file, used_bytes(target))
            parts = _Parts(store, generation, file, copied)
            closing.callback(parts.close)
            for extent, entry in zip(layout_of(target)[0], source.entries, strict=True):
                if entry.generation and entry.nbytes:
                    parts.copy(store.extents[extent.index], extent.offset, entry, source.store)
            os.fsync(file)
            publish(RealDirectory(directory), target)
    except OSError as error:
        raise failed(f"copying generation {generation} to {named(folder)}", error) from error


def _laid_out_anew(source: Manifest) -> Manifest:
    entries = [replace(e, copy=0, places=0) if e.generation else Entry(0, 0, 0, 0) for e in source.entries]
    return replace(source, entries=tuple(entries), num_copies=2, num_paths=1, chunks=())


class _Parts:
    """Copies extents: while one part is written, the next is read."""

    def __init__(self, store: DurableStore, generation: int, file: int, copied: Callable[[int], None]) -> None:
        self._store = store
        self._generation = generation
        self._file = file
        self._copied = copied
        self._memory = aio_ext.Memory(2 * _PART_BYTES)
        self._synced_bytes = self._written_bytes = 0

    def copy(self, extent: Extent, offset: int, entry: Entry, identity: bytes) -> None:
        """Copy what the generation has of ``extent`` to ``offset`` of the file; once more, if that goes wrong."""
        wanted = seed(identity, extent.index, entry.generation, entry.nbytes)
        for is_last in (False, True):
            try:
                seen = self._copy(extent, offset, wanted)
            except OSError as error:
                if is_last or error.errno in NO_ROOM:
                    raise
                continue
            if seen == entry.checksum:
                return
            if is_last:
                raise StorageCorrupt(
                    f"extent {extent.index}, generation {entry.generation}, came back wrong, twice: checksum "
                    f"{seen:016x}, expected {entry.checksum:016x}.",
                    expected=entry.checksum,
                    seen=seen,
                )

    def close(self) -> None:
        """Give the buffers back."""
        self._memory.close()

    def _copy(self, extent: Extent, offset: int, wanted: int) -> int:
        """The checksum of what was copied."""
        checksum = xxhash.xxh3_64(seed=wanted)
        reading, part = self._read(extent, 0)
        try:
            for start in range(0, extent.nbytes, _PART_BYTES):
                _wait(reading, f"read of extent {extent.index}")
                arrived = part
                if start + _PART_BYTES < extent.nbytes:
                    reading, part = self._read(extent, start + _PART_BYTES)
                checksum.update(arrived)
                self._write(arrived, offset + start)
        finally:
            with contextlib.suppress(OSError):  # no other read may be given its buffer before
                reading.wait(IO_TIMEOUT_S)
        return checksum.intdigest()

    def _read(self, extent: Extent, start: int) -> tuple[Transfer, memoryview]:
        """Start reading a part into one of the buffers, in turns."""
        nbytes = min(_PART_BYTES, extent.nbytes - start)
        address = self._memory.address + start % (2 * _PART_BYTES)
        reading = self._store.read_part(self._generation, extent, start, address, nbytes)
        return reading, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def _write(self, part: memoryview, offset: int) -> None:
        nbytes = len(part)
        while part:
            written = os.pwrite(self._file, part, offset)
            part, offset = part[written:], offset + written
        self._written_bytes += nbytes
        if self._written_bytes - self._synced_bytes >= _SYNC_BYTES:
            self._sync()
        self._copied(nbytes)

    def _sync(self) -> None:
        try:
            os.fdatasync(self._file)
        except OSError as error:  # not to be tried again: what it covered is unknown
            raise failed("sync of the copy", error) from error
        self._synced_bytes = self._written_bytes


def _wait(reading: Transfer, name: str) -> None:
    try:
        reading.wait(IO_TIMEOUT_S)
    except TimeoutError:
        raise StorageTimeout(f"{name}: no answer for {IO_TIMEOUT_S:g} s.") from None
