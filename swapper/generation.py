"""One generation of a durable store, read where it was linked or copied to, whoever has the store open.

A folder of its own holds it: ``data.0`` (and so on), and one manifest. What a generation needs is never written again,
so nothing is locked.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from swapper.arena import Arena
from swapper.checksum import seed
from swapper.device import Device, open_device
from swapper.directory import RealDirectory
from swapper.errors import StorageCorrupt, StoreMissing, StoreMisuse, StoreUnsafe, failed, readable_bytes
from swapper.extent import Extent
from swapper.files import Descriptor, named
from swapper.manifest import Manifest
from swapper.publication import layout_of, published, read_manifest, used_bytes
from swapper.ticket import Checksum, Ticket, Transfers

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_generation(folder: Path) -> Generation:
    """Open the last generation that ``folder`` holds.

    Raises ``StoreMissing`` if there is none, ``StorageCorrupt`` if its manifest is damaged or its data too short,
    ``StoreUnsafe`` for a folder or a file that cannot be opened.
    """
    return Generation(folder)


def generation_metadata(folder: Path) -> bytes:
    """The metadata of the last generation that ``folder`` holds, without its data. Raises as ``open_generation``."""
    with _opened(folder) as directory:
        return _read_manifest(directory, folder).metadata


class Generation:
    """Extents that are read, and verified, and ``metadata``. See ``open_generation``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._closers = contextlib.ExitStack()
        try:
            with _opened(folder) as directory:
                self._manifest = _read_manifest(directory, folder)
            self.extents, self._records, nbytes = layout_of(self._manifest)
            self._transfers = Transfers(self._open_data(nbytes), str(folder))
            self._closers.callback(self._transfers.close)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StoreUnsafe):
                raise failed(f"opening {named(folder)}", error) from error
            raise

    @property
    def generation(self) -> int:
        """Its number."""
        return self._manifest.generation

    @property
    def metadata(self) -> bytes:
        """Metadata that was given to ``commit``."""
        return self._manifest.metadata

    def holds(self, extent: Extent) -> bool:
        """The extent is a part of the generation."""
        return self._manifest.entries[extent.index].generation > 0

    def register(self, arena: Arena) -> None:
        """As that of a store."""
        self._transfers.register(arena)

    def read(self, extent: Extent, address: int, nbytes: int) -> Ticket:
        """Start reading ``extent`` into memory at ``address``. Raises ``StoreMisuse`` if it was never written."""
        entry = self._manifest.entries[extent.index]
        if nbytes != extent.nbytes:
            raise StoreMisuse(f"extent {extent.index} has {extent.nbytes} bytes, not {nbytes}.")
        if not entry.generation:
            raise StoreMisuse(f"extent {extent.index} is no part of generation {self.generation}.")
        label = f"extent {extent.index}, generation {entry.generation}"
        identity = seed(self._manifest.store, extent.index, entry.generation, extent.nbytes)
        checksum = Checksum(label, identity, entry.checksum)
        offset = self._records[extent.index].offset_of(entry.copy)
        return self._transfers.read(offset, address, nbytes, checksum, urgent=False)

    def close(self) -> None:
        """Wait for what is in flight, give the files back. Safe to call twice."""
        self._closers.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_data(self, nbytes: int) -> Device:
        files, sizes = [], []
        for index in range(self._manifest.num_paths):
            descriptor, size = self._open_file(self.folder / f"data.{index}")
            files.append(descriptor)
            sizes.append(size)
        needed = used_bytes(self._manifest)
        if len(files) == 1 and sizes[0] < needed:
            raise StorageCorrupt(
                f"{named(self.folder)}: its data has {readable_bytes(sizes[0])}, {readable_bytes(needed)} are needed."
            )
        paths = [self.folder] * len(files)
        return open_device(
            paths, nbytes, lambda index, _: files[index],
            backend="auto", queue_depth=32, block_bytes=1 << 20, table=self._manifest.chunks,
        )  # fmt: skip

    def _open_file(self, path: Path) -> tuple[int, int]:
        """A descriptor and the size of a data file."""
        try:
            try:
                number = os.open(path, _READ | os.O_DIRECT)
            except OSError:
                number = os.open(path, _READ)
        except FileNotFoundError:
            raise StorageCorrupt(f"{named(path)} is missing.") from None
        except OSError as error:
            raise StoreUnsafe(f"{named(path)} cannot be opened: {error.strerror}.") from None
        self._closers.callback(Descriptor(number).close)
        info = os.fstat(number)
        if not stat.S_ISREG(info.st_mode):
            raise StoreUnsafe(f"{named(path)} is not a regular file.")
        return number, info.st_size


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[RealDirectory]:
    try:
        descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissing(f"there is no checkpoint {named(folder)}.") from None
    except OSError as error:
        raise StoreUnsafe(f"{named(folder)} cannot be opened: {error.strerror}.") from None
    with contextlib.closing(descriptor):
        yield RealDirectory(descriptor.number)


def _read_manifest(directory: RealDirectory, folder: Path) -> Manifest:
    found = published(directory.names())
    if not found:
        raise StoreMissing(f"{named(folder)} holds no generation: it was never finished.")
    return read_manifest(directory, found[max(found)])
