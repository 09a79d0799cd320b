"""One generation of a durable store, read where it was linked or copied to, whoever has the store open.

A folder of its own holds it: ``data.0`` (and so on), and one manifest. What a generation needs is never written again,
so nothing is locked. Whoever may read the files may read it: others' checkpoints, backups, further links. Nothing in
them is trusted, see ``swapper.checked``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from swapper.arena import Arena
from swapper.checked import Refused, open_regular, read_regular, refusals
from swapper.checksum import seed
from swapper.device import Device, open_device
from swapper.errors import StorageCorrupt, StoreMissing, StoreMisuse, StoreUnsafe, failed, readable_bytes
from swapper.extent import Extent
from swapper.files import Descriptor, named
from swapper.manifest import MANIFEST_BYTES_MAX, Manifest
from swapper.publication import Held, missing, published, used_bytes
from swapper.ticket import Checksum, Ticket, Transfers


def open_generation(folder: Path) -> Generation:
    """Open the last generation that ``folder`` holds.

    Raises ``StoreMissing`` if there is none, ``StorageCorrupt`` if its manifest is damaged or its data too short,
    ``StoreUnsafe`` for a folder or a file that cannot be opened.
    """
    return Generation(folder)


def generation_metadata(folder: Path) -> bytes:
    """The metadata of the last generation that ``folder`` holds, without its data. Raises as ``open_generation``."""
    return generation_manifest(folder).metadata


def generation_manifest(folder: Path) -> Manifest:
    """The manifest of the last generation that ``folder`` holds. Raises as ``open_generation``."""
    with _opened(folder) as directory:
        names = os.listdir(directory)  # noqa: PTH208 - a descriptor
        if gone := missing(names):
            raise StorageCorrupt(f"{named(folder)}: {gone}")
        found = published(names)
        if not found:
            raise StoreMissing(f"{named(folder)} holds no generation: it was never finished.")
        number, name = max(found), found[max(found)]
        with refusals(f"manifest {name} of {named(folder)}", StorageCorrupt):
            try:
                data = read_regular(name, MANIFEST_BYTES_MAX, directory=directory)
            except OSError as error:
                raise failed(f"read of manifest {name} of {named(folder)}", error) from error
            manifest = Manifest.decode(data, f"manifest {name} of {named(folder)}")
            if manifest.generation != number:
                raise Refused(f"it is that of generation {manifest.generation}")
        return manifest


def check_generation(folder: Path) -> None:
    """Look whether ``folder`` holds a generation, with all of its bytes; what they are is not read. Raises as
    ``open_generation``."""
    manifest = generation_manifest(folder)
    sizes = []
    for index in range(manifest.num_paths):
        path = folder / f"data.{index}"
        try:
            sizes.append(path.stat().st_size)
        except OSError as error:
            raise StorageCorrupt(f"{named(path)} cannot be looked at: {error.strerror}.") from None
    _check_size(folder, manifest, sizes)


class Generation:
    """Extents that are read, and verified, and ``metadata``. See ``open_generation``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._closers = contextlib.ExitStack()
        try:
            self._manifest = generation_manifest(folder)
            self._held = Held(self._manifest)
            self._transfers = Transfers(self._open_data(), str(folder))
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

    @property
    def extents(self) -> Sequence[Extent]:
        """All extents, each made when it is asked for."""
        return Extents(self)

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
        offset = self._held.offset(extent.index)
        return self._transfers.read(offset, address, nbytes, checksum, urgent=False)

    def close(self) -> None:
        """Wait for what is in flight, give the files back. Safe to call twice."""
        self._closers.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_data(self) -> Device:
        files, sizes = [], []
        for index in range(self._manifest.num_paths):
            descriptor, size = self._open_file(self.folder / f"data.{index}")
            files.append(descriptor)
            sizes.append(size)
        _check_size(self.folder, self._manifest, sizes)
        paths = [self.folder] * len(files)
        return open_device(
            paths, self._held.store_bytes, lambda index, _: files[index],
            backend="auto", queue_depth=32, block_bytes=1 << 20, table=self._manifest.chunks,
        )  # fmt: skip

    def _open_file(self, path: Path) -> tuple[int, int]:
        """A descriptor and the size of a data file."""
        try:
            try:
                file = open_regular(path, flags=os.O_DIRECT)
            except OSError:
                file = open_regular(path)
        except FileNotFoundError:
            raise StorageCorrupt(f"{named(path)} is missing.") from None
        except (OSError, Refused) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise StoreUnsafe(f"{named(path)} cannot be opened: {said}.") from None
        self._closers.callback(file.close)
        return file.number, os.fstat(file.number).st_size


class Extents(Sequence[Extent]):
    """The extents of a generation, in order."""

    def __init__(self, generation: Generation) -> None:
        self._held, self._len = generation._held, len(generation._manifest.entries)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Extent:  # type: ignore[override]  # nobody asks for some of them
        return self._held.extent(index)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissing(f"there is no checkpoint {named(folder)}.") from None
    except OSError as error:
        raise StoreUnsafe(f"{named(folder)} cannot be opened: {error.strerror}.") from None
    with contextlib.closing(descriptor):
        yield descriptor.number


def _check_size(folder: Path, manifest: Manifest, sizes: Sequence[int]) -> None:
    needed = used_bytes(manifest)
    if len(sizes) == 1 and sizes[0] < needed:
        raise StorageCorrupt(
            f"{named(folder)}: its data has {readable_bytes(sizes[0])}, {readable_bytes(needed)} are needed."
        )
