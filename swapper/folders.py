"""Durable stores by name: ``PATH/NAME.store``, created, opened, locked, and given back."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from swapper import owner
from swapper.device import Device, open_device
from swapper.directory import RealDirectory
from swapper.durable import DurableStore, begin, take_up
from swapper.errors import StorageCorrupt, StoreMissing, StoreMisuse, StoreUnsafe, failed, readable_bytes
from swapper.files import Descriptor, open_direct, open_directory, reserve
from swapper.manifest import Entry, Manifest
from swapper.store import lay_out

SUFFIX = ".store"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

Paths = Sequence[str | os.PathLike[str]]


def create_store(
    paths: Paths,
    name: str,
    extent_sizes: Sequence[int],
    *,
    retained_max: int = 0,
    places: int = 1,
    metadata: bytes = b"",
    backend: str = "auto",
    queue_depth: int = 32,
    block_bytes: int = 1 << 20,
) -> DurableStore:
    """Make an empty durable store, generation 0, with all its space reserved, and open it.

    ``extent_sizes`` are bytes, rounded up to whole pages; the store takes ``1 + places + retained_max`` times their
    sum: a copy for the last generation, one for each that is retained, and ``places`` for what is not committed. With
    ``places=2`` there is always room for ``write_beside``. The manifests are under the first path; several paths share
    the data.

    Raises ``StoreExists`` if it is there already, ``StoreLocked`` if it is open or being made elsewhere,
    ``StoreUnsafe`` for a path or a file that cannot be trusted, ``StorageFull``. A store whose creation was interrupted
    is no store: it is made anew.
    """
    if places not in (1, 2):
        raise StoreMisuse(f"places must be 1 or 2, got {places}.")
    entries = tuple(Entry(extent.nbytes, 0, 0, 0) for extent in lay_out(extent_sizes)[0])
    empty = Manifest(os.urandom(16), 0, 1 + places + retained_max, len(paths), entries, metadata=metadata)
    with contextlib.ExitStack() as undo:
        folders = undo.enter_context(_Folders(paths, name, create=True))

        def new_file(index: int, nbytes: int) -> int:
            reserve(folders.files[index], nbytes, folders.paths[index])
            return folders.files[index]

        def make_device(manifest: Manifest) -> Device:
            nbytes = manifest.copy_bytes * manifest.num_copies
            return open_device(
                folders.paths, nbytes, new_file, backend=backend, queue_depth=queue_depth, block_bytes=block_bytes
            )

        store = begin(folders.directory, make_device, empty, str(folders))
        undo.pop_all()
        store.closing(folders.close)
        return store


def open_store(
    paths: Paths,
    name: str,
    *,
    generation: int | None = None,
    backend: str = "auto",
    queue_depth: int = 32,
    block_bytes: int = 1 << 20,
) -> DurableStore:
    """Open a durable store at its last generation, or at a retained one, and clear away what a crash left of it.

    Going on from a retained generation gives the next commit a number above all that are there.

    Raises ``StoreMissing`` if there is no such store or generation, ``StoreLocked`` if it is open elsewhere,
    ``StorageCorrupt`` if a manifest is damaged or a file too short, ``StoreUnsafe``. Nothing has changed then.
    """
    with contextlib.ExitStack() as undo:
        folders = undo.enter_context(_Folders(paths, name, create=False))

        def old_file(index: int, nbytes: int) -> int:
            if len(folders.files) == 1 and folders.sizes[index] < nbytes:
                raise StorageCorrupt(
                    f"{folders}: its data has {readable_bytes(folders.sizes[index])}, "
                    f"{readable_bytes(nbytes)} were reserved."
                )
            return folders.files[index]

        def make_device(last: Manifest) -> Device:
            if last.num_paths != len(folders.paths):
                raise StoreMisuse(f"{folders} lies on {last.num_paths} paths, {len(folders.paths)} were given.")
            nbytes = last.copy_bytes * last.num_copies
            return open_device(
                folders.paths, nbytes, old_file,
                backend=backend, queue_depth=queue_depth, block_bytes=block_bytes, table=last.chunks,
            )  # fmt: skip

        store = take_up(folders.directory, make_device, str(folders), generation)
        undo.pop_all()
        store.closing(folders.close)
        return store


class _Folders:
    """The directories and data files of one store, open and locked. Closed by ``close``, or at the end of ``with``."""

    def __init__(self, paths: Paths, name: str, *, create: bool) -> None:
        if not _NAME.fullmatch(name):
            raise StoreMisuse(f"{name!r} cannot be the name of a store: letters, digits, '.', '_' and '-', at most 64.")
        if not paths:
            raise StoreMisuse("a store needs at least one path.")
        self.paths = tuple(Path(path) for path in paths)
        self.files: list[int] = []
        self.sizes: list[int] = []
        self._folder = name + SUFFIX
        self._closers = contextlib.ExitStack()
        try:
            directories = [self._enter(path, create) for path in self.paths]
            self.directory = RealDirectory(directories[0])
            for index, directory in enumerate(directories):
                self.files.append(self._open_data(directory, index, create))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise failed(f"opening {self}", error) from error
            raise

    def __str__(self) -> str:
        return ", ".join(str(path / self._folder) for path in self.paths)

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closers.close()

    def _keep(self, number: int) -> int:
        self._closers.callback(Descriptor(number).close)
        return number

    def _enter(self, path: Path, create: bool) -> int:
        """The store's own directory on a path: yours alone to write to, and no link. A new one is 0700, for good."""
        parent = self._keep(open_directory(path))
        where = path / self._folder
        made = False
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._folder, 0o700, dir_fd=parent)
                    made = True
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            directory = self._keep(os.open(self._folder, flags, dir_fd=parent))
            if made:
                os.fchmod(directory, 0o700)
                os.fsync(parent)
        except FileNotFoundError:
            raise StoreMissing(f"there is no store {where}.") from None
        except OSError as error:
            raise StoreUnsafe(f"{where} cannot be opened: {error.strerror}.") from error
        info = os.fstat(directory)
        if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreUnsafe(f"{where} belongs to user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}.")
        return directory

    def _open_data(self, directory: int, index: int, create: bool) -> int:
        """The data file of a path, locked."""
        name = f"data.{index}"
        try:
            file = self._keep(open_direct(name, os.O_CREAT if create else 0, directory))
        except FileNotFoundError:
            raise StoreMissing(f"{self} has no {name}; are the paths in the order of its creation?") from None
        except OSError as error:
            raise StoreUnsafe(f"{name} of {self} cannot be opened: {error.strerror}.") from error
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or info.st_uid != os.geteuid():
            raise StoreUnsafe(f"{name} of {self} is not a regular file of yours with one name.")
        owner.lock(file, directory, str(self))
        if os.fstat(file).st_nlink == 0:
            raise StoreMissing(f"{self} was removed just now.")
        self.sizes.append(info.st_size)
        return file
