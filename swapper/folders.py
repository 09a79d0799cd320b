"""Durable stores by name: ``PATH/NAME.store``, created, opened, locked, and given back."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from aio_ext.queue import DEPTH
from swapper import owner
from swapper.arena import align
from swapper.device import Device, open_device
from swapper.directory import Directory, MemoryDirectory, RealDirectory
from swapper.durable import DurableStore
from swapper.errors import (
    StorageCorrupt,
    StoreExists,
    StoreMissing,
    StoreMisuse,
    StoreUnsafe,
    failed,
    readable_bytes,
    unusable,
)
from swapper.files import Descriptor, open_direct, open_directory, open_nameless, reserve
from swapper.links import REPLACES
from swapper.manifest import Entry, Manifest
from swapper.opening import begin, take_up
from swapper.publication import committed, layout_of, left_over, published, used_bytes

SUFFIX = ".store"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_DATA = re.compile(r"data\.[0-9]+")

Paths = Sequence[str | os.PathLike[str]]


def _generation_0(extent_sizes: Sequence[int], counts: Sequence[int], num_paths: int, metadata: bytes) -> Manifest:
    """The manifest of a store without content, of so many places (``counts``) for each extent."""
    num_copies = max([2, *counts])
    entries = tuple(
        Entry(align(size), 0, 0, 0, 0 if count == num_copies else count)
        for size, count in zip(extent_sizes, counts, strict=True)
    )
    return Manifest(os.urandom(16), 0, num_copies, num_paths, entries, metadata=metadata)


def create_store(
    paths: Paths,
    name: str | None,
    extent_sizes: Sequence[int],
    *,
    retained_max: int = 0,
    places: int | Sequence[int] = 1,
    reserved: Sequence[int] | None = None,
    metadata: bytes = b"",
    replaces: bytes = b"",
    backend: str = "auto",
    queue_depth: int = DEPTH,
    block_bytes: int = 1 << 20,
) -> DurableStore:
    """Make an empty durable store, generation 0, with its space reserved, and open it.

    ``extent_sizes`` are bytes, rounded up to whole pages. An extent takes ``1 + places + retained_max`` times its size:
    a copy for the last generation, one for each that is retained, and ``places`` (1 or 2, for each extent or for all)
    for what is not committed. With 2 there is always room for ``write_shadow``. An extent with ``places`` 0 is scratch:
    it has one place, is written over, and is no part of any generation.

    The manifests are under the first path; several paths share the data. ``reserved`` is how many places of each extent
    get their space now, if it is not all: see ``DurableStore.reserve``. On several paths all of it is taken at once.

    ``replaces`` is the ``identity`` of a store that this one is to take over from: see ``DurableStore.replaces``.

    Without a ``name`` the store is gone with its process, however that ends, except for generations that were linked
    elsewhere. Its files are 0600 and have no directory entry; any number of such stores share a path.

    Raises ``StoreExists`` if it is there already, ``StoreLocked`` if it is open or being made elsewhere,
    ``StoreUnsafe`` for a path or a file that cannot be trusted, ``StorageFull``. A store whose creation was interrupted
    is no store: it is made anew.
    """
    counts = [1 + kind + retained_max if kind else 1 for kind in _each(places, len(extent_sizes))]
    empty = _generation_0(extent_sizes, counts, len(paths), metadata)
    if len(paths) > 1:
        reserved = None
    with contextlib.ExitStack() as undo:
        folders: _AnyFolders = _Nameless(paths) if name is None else _Folders(paths, name, create=True)
        undo.callback(folders.close)

        def new_file(index: int, nbytes: int) -> int:
            if reserved is None:
                reserve(folders.files[index], nbytes, folders.paths[index])
            return folders.files[index]

        def make_device(manifest: Manifest) -> Device:
            nbytes = layout_of(manifest)[2]
            return open_device(
                folders.paths, nbytes, new_file, backend=backend, queue_depth=queue_depth, block_bytes=block_bytes
            )

        try:
            _note_replaced(folders.directory, replaces)
            store = begin(folders.directory, make_device, empty, str(folders), reserved)
        except StoreExists:
            raise
        except BaseException:
            folders.discard()
            raise
        undo.pop_all()
        store.closing(folders.close)
        return store


def _note_replaced(directory: Directory, identity: bytes) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            directory.remove(REPLACES)
        if identity:
            directory.create(REPLACES, identity)
    except OSError as error:
        raise failed("noting which store this one replaces", error) from error


def _each(places: int | Sequence[int], num_extents: int) -> list[int]:
    """The ``places`` of each extent, from one number for all or from one for each. Raises ``StoreMisuse``."""
    numbers = [places] * num_extents if isinstance(places, int) else list(places)
    if len(numbers) != num_extents:
        raise StoreMisuse(f"places has {len(numbers)} numbers, there are {num_extents} extents.")
    for index, number in enumerate(numbers):
        if number not in (0, 1, 2):
            raise StoreMisuse(f"places of extent {index} must be 0, 1 or 2, got {number}.")
    return numbers


def open_store(
    paths: Paths,
    name: str,
    *,
    generation: int | None = None,
    reserved: Sequence[int] | None = None,
    backend: str = "auto",
    queue_depth: int = DEPTH,
    block_bytes: int = 1 << 20,
) -> DurableStore:
    """Open a durable store at its last generation, or at a retained one, and clear away what a crash left of it.

    Going on from a retained generation gives the next commit a number above all that are there. If the last owner left
    a generation prepared, ``DurableStore.prepared`` is its number: ``finish`` or ``abandon`` it before anything is
    written. ``reserved`` is that of ``create_store``. If the manifest of another generation is damaged,
    ``DurableStore.damage`` says so, and the store is only read.

    Raises ``StoreMissing`` if there is no such store or generation, ``StoreLocked`` if it is open elsewhere,
    ``StorageCorrupt`` if its manifest is damaged, or gone though it was committed, or a file is too short,
    ``StoreUnsafe``. Nothing has changed then.
    """
    if len(paths) > 1:
        reserved = None
    with contextlib.ExitStack() as undo:
        folders = _Folders(paths, name, create=False)
        undo.callback(folders.close)

        def make_device(last: Manifest) -> Device:
            if last.num_paths != len(folders.paths):
                raise StoreMisuse(f"{folders} lies on {last.num_paths} paths, {len(folders.paths)} were given.")
            nbytes = layout_of(last)[2]
            needed = nbytes if reserved is None else used_bytes(last)
            if len(folders.files) == 1 and folders.sizes[0] < needed:
                raise StorageCorrupt(
                    f"{folders}: its data has {readable_bytes(folders.sizes[0])}, {readable_bytes(needed)} were "
                    "reserved."
                )
            return open_device(
                folders.paths, nbytes, lambda index, _: folders.files[index],
                backend=backend, queue_depth=queue_depth, block_bytes=block_bytes, table=last.chunks,
            )  # fmt: skip

        store = take_up(folders.directory, make_device, str(folders), generation, reserved)
        undo.pop_all()
        store.closing(folders.close)
        return store


def remove_store(paths: Paths, name: str) -> None:
    """Remove a store and all its generations. Those that were linked elsewhere stay there.

    Raises ``StoreMissing`` if there is none, ``StoreLocked`` if it is open.
    """
    folders = _Folders(paths, name, create=False)
    try:
        folders.remove()
    except OSError as error:
        raise failed(f"removing {folders}", error) from error
    finally:
        folders.close()


def remove_unfinished(paths: Paths, name: str) -> None:
    """Remove what an interrupted creation or removal has left of a store, on any of the paths. What holds a generation,
    or a file that is no store's, stays.

    Raises ``StoreLocked`` if it is open or being made elsewhere, ``StoreUnsafe``.
    """
    try:
        if not all(_is_unfinished([entry.name for entry in path.iterdir()]) for path in _existing(paths, name)):
            return
        folders = _Folders(paths, name, create=True)  # a folder that some path lacks is made: all are locked
        try:
            if _is_unfinished(folders.directory.names()):
                folders.remove()
        finally:
            folders.close()
    except OSError as error:
        raise failed(f"removing {name}{SUFFIX}", error) from error


def _existing(paths: Paths, name: str) -> list[Path]:
    found = [Path(path) / f"{name}{SUFFIX}" for path in paths]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _is_unfinished(names: Sequence[str]) -> bool:
    """The names of a store's files, none of which is a generation or says that there was one."""
    known = {owner.NAME, owner.WRITTEN, REPLACES, *left_over(names)}
    is_store = all(name in known or _DATA.fullmatch(name) for name in names)
    return is_store and not published(names) and not committed(names)


class _AnyFolders(Protocol):
    """Folders of the files of a store, until ``close``."""

    paths: tuple[Path, ...]
    directory: Directory
    files: list[int]

    def discard(self) -> None:
        """Remove what is there of a store that could not be made."""

    def close(self) -> None: ...


class _Nameless:
    """The files of a store that has no name."""

    def __init__(self, paths: Paths) -> None:
        if not paths:
            raise StoreMisuse("a store needs at least one path.")
        self.paths = tuple(Path(path) for path in paths)
        self.directory: Directory = MemoryDirectory()
        self.files: list[int] = []
        self._closers = contextlib.ExitStack()
        try:
            for path in self.paths:
                parent = Descriptor(open_directory(path))
                self._closers.callback(parent.close)
                file = Descriptor(open_nameless(path, parent.number))
                self._closers.callback(file.close)
                self.files.append(file.number)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def discard(self) -> None:
        """There is nothing: what has no name is gone when it is closed."""

    def close(self) -> None:
        self._closers.close()


class _Folders:
    """The directories and data files of one store, open and locked. Closed by ``close``, or at the end of ``with``."""

    def __init__(self, paths: Paths, name: str, *, create: bool) -> None:
        if not _NAME.fullmatch(name):
            raise StoreMisuse(f"{name!r} cannot be the name of a store: letters, digits, '.', '_' and '-', at most 64.")
        if not paths:
            raise StoreMisuse("a store needs at least one path.")
        self.paths = tuple(Path(path) for path in paths)
        self.directory: Directory
        self.files: list[int] = []
        self.sizes: list[int] = []
        self._folder = name + SUFFIX
        self._opened: list[int] = []
        self._made: list[Path] = []
        self._closers = contextlib.ExitStack()
        try:
            self._opened = [self._enter(path, create) for path in self.paths]
            self.directory = RealDirectory(self._opened[0])
            for index, directory in enumerate(self._opened):
                self.files.append(self._open_data(directory, index, create))
                if create:
                    os.fsync(directory)
        except BaseException as error:
            self.close()
            for folder in self._made:
                with contextlib.suppress(OSError):  # files in it are removed when a store is made there
                    folder.rmdir()
            if isinstance(error, OSError):
                raise failed(f"opening {self}", error) from error
            raise

    def __str__(self) -> str:
        return ", ".join(str(path / self._folder) for path in self.paths)

    def close(self) -> None:
        self._closers.close()

    def discard(self) -> None:
        """Remove what is there of a store that could not be made."""
        with contextlib.suppress(OSError):  # the error at hand says more
            self.remove()

    def remove(self) -> None:
        """Manifests first: without them what is left is the beginning of a store. Before them goes, for good, what says
        that there was a commit."""
        for directory, path in zip(self._opened, self.paths, strict=True):
            files = RealDirectory(directory)
            for name in committed(files.names()).values():
                files.remove(name)
                files.sync()
            for name in sorted(files.names(), key=lambda name: name.startswith("data.")):
                files.remove(name)
            (path / self._folder).rmdir()

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
                    self._made.append(where)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            directory = self._keep(os.open(self._folder, flags, dir_fd=parent))
            if made:
                os.fchmod(directory, 0o700)
                os.fsync(parent)
        except FileNotFoundError:
            raise StoreMissing(f"there is no store {where}.") from None
        except OSError as error:
            raise unusable(f"{where} cannot be opened", error) from error
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
            raise unusable(f"{name} of {self} cannot be opened", error) from error
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():  # checkpoints are further names of it
            raise StoreUnsafe(f"{name} of {self} is not a regular file of yours.")
        try:
            owner.lock(file, directory, str(self))
        except OSError:
            if create and info.st_size == 0:  # ours by the lock, and never a store
                for left in (owner.WRITTEN, owner.NAME, name):
                    with contextlib.suppress(OSError):
                        os.unlink(left, dir_fd=directory)
            raise
        if os.fstat(file).st_nlink == 0:
            raise StoreMissing(f"{self} was removed just now.")
        self.sizes.append(info.st_size)
        return file
