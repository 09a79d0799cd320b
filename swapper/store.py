"""A scratch store: preallocated, nameless files on one or more paths, and the queue that moves their extents."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from swapper.arena import Arena, align
from swapper.errors import StorageFull, StorageIOError, StorageTimeout, StoreLocked, StoreUnsafe

IO_TIMEOUT_S = 300.0
"""No transfer may take longer: a disk that is silent for this long is treated as gone."""


@dataclass(frozen=True)
class Extent:
    """One range of a store that is read and written as a whole. ``nbytes`` is a multiple of the page size."""

    path_index: int
    offset: int
    nbytes: int


class Ticket:
    """The promise of one transfer. ``wait`` returns when the bytes are there, or raises what went wrong."""

    __slots__ = ("_name", "_store", "_ticket")

    def __init__(self, store: Store, ticket: aio_ext.Ticket, name: str) -> None:
        self._store = store
        self._ticket = ticket
        self._name = name

    def done(self) -> bool:
        """True when ``wait`` would not block."""
        return self._ticket.done()

    def wait(self, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Block until the transfer is complete; the buffer is the caller's again.

        Raises ``StorageIOError`` or ``StorageFull`` for what the device said, ``StorageTimeout`` when it said nothing.
        """
        try:
            self._ticket.wait(timeout_s)
        except TimeoutError:
            raise StorageTimeout(
                f"{self._name}: no answer from {self._store.describe()} for {timeout_s:.0f} s. "
                "The device may be hung: see `dmesg`."
            ) from None
        except aio_ext.QueueError as error:
            raise self._store.error(self._name, error) from error


class Store:
    """Preallocated extents on one or more directories, moved with O_DIRECT by one queue.

    The files have no name: they are created 0600 without a directory entry (or unlinked at once where the file
    system cannot do that), so that a normal end, an exception and a kill all give the space back. While the store is
    open it holds a lock on each directory.

    ``extent_sizes`` are bytes, rounded up to whole pages; the extents are spread over the paths so that each carries
    about the same number of bytes. Everything is reserved here or nothing is.

    Raises ``StoreUnsafe`` for a path that cannot hold a store, ``StoreLocked`` if another owner has it, ``StorageFull``
    if the extents do not fit. Nothing is left behind in any of these cases.
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
        self._closers = contextlib.ExitStack()
        self._extents, file_sizes = _spread(extent_sizes, len(self.paths))
        self.nbytes = sum(file_sizes)
        try:
            directories = [self._claim(path) for path in self.paths]
            descriptors = [
                self._reserve(path, directory, size)
                for path, directory, size in zip(self.paths, directories, file_sizes, strict=True)
            ]
            self._queue = aio_ext.Queue(backend=backend, depth=queue_depth, block_bytes=block_bytes)
            self._closers.callback(self._queue.close)
            self._files = [self._queue.register_file(descriptor) for descriptor in descriptors]
        except BaseException:
            self._closers.close()
            raise

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents, in the order of ``extent_sizes``."""
        return self._extents

    @property
    def backend(self) -> str:
        """What moves the bytes: ``io_uring`` or ``threads``."""
        return self._queue.backend

    @property
    def notes(self) -> tuple[str, ...]:
        """What the queue had to do without, why, and the fix."""
        return tuple(self._queue.notes)

    def register(self, arena: Arena) -> None:
        """Tell the queue where its buffers are, so that the kernel need not map them for each transfer."""
        self._queue.register_memory(arena.address, arena.nbytes)

    def read(self, extent: Extent, address: int, nbytes: int, *, offset: int = 0, urgent: bool = False) -> Ticket:
        """Start reading ``nbytes`` of ``extent`` from ``offset`` into memory at ``address``.

        The memory must stay valid, and untouched, until the ticket is done. ``urgent`` overtakes background transfers.
        """
        name = f"read of {nbytes} bytes"
        file = self._files[extent.path_index]
        return Ticket(self, self._queue.read(file, extent.offset + offset, address, nbytes, urgent=urgent), name)

    def write(self, extent: Extent, address: int, nbytes: int, *, offset: int = 0, urgent: bool = False) -> Ticket:
        """Start writing ``nbytes`` from memory at ``address`` to ``extent`` at ``offset``. See ``read``."""
        name = f"write of {nbytes} bytes"
        file = self._files[extent.path_index]
        return Ticket(self, self._queue.write(file, extent.offset + offset, address, nbytes, urgent=urgent), name)

    def statistics(self) -> aio_ext.Statistics:
        """What the queue has moved so far."""
        return self._queue.statistics()

    def describe(self) -> str:
        """The store's paths, for messages."""
        return ", ".join(str(path) for path in self.paths)

    def error(self, name: str, error: aio_ext.QueueError) -> StorageIOError | StorageFull:
        """Turn what the queue saw into the error that the user gets."""
        kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageIOError
        return kind(
            f"{name} failed on {self.describe()}: {error}\n"
            "  What the store held is lost; restart from the last checkpoint. The device may be failing: see `dmesg`."
        )

    def close(self) -> None:
        """Wait for what is in flight, then give the space and the locks back. Safe to call twice."""
        self._closers.close()

    def _claim(self, path: Path) -> int:
        """Open and lock the directory; the descriptor lives as long as the store."""
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreUnsafe(f"nvme_path {path} does not exist. Create it: mkdir -p {path}") from None
        except NotADirectoryError:
            raise StoreUnsafe(f"nvme_path {path} is not a directory. Give a directory on a local SSD.") from None
        except OSError as error:
            raise StoreUnsafe(f"nvme_path {path} cannot be opened: {error.strerror}") from None
        self._closers.callback(_close_once(directory))
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(
                f"nvme_path {path} is in use by {_lock_holder(directory)}. "
                "Wait for it to end, or give another directory."
            ) from None
        return directory

    def _reserve(self, path: Path, directory: int, size: int) -> int:
        """Create the nameless file and take ``size`` bytes of the disk for it."""
        try:
            descriptor = _open_nameless(path, directory)
        except OSError as error:
            raise StoreUnsafe(f"cannot create a file in nvme_path {path}: {error.strerror}") from None
        self._closers.callback(_close_once(descriptor))
        os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
        available = os.fstatvfs(directory)
        free_bytes = available.f_bavail * available.f_frsize
        if size > free_bytes:
            raise StorageFull(
                f"{path} has too little room: {size} bytes are needed, {free_bytes} are free. "
                "Free some, give another nvme_path, or raise host_memory so that less goes there."
            )
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            raise StorageFull(f"cannot reserve {size} bytes in {path}: {error.strerror}") from None
        return descriptor


def _spread(sizes: Sequence[int], num_paths: int) -> tuple[tuple[Extent, ...], list[int]]:
    """Give each extent to the path that carries the fewest bytes so far; also the bytes of each path."""
    filled = [0] * num_paths
    extents = []
    for size in sizes:
        path_index = filled.index(min(filled))
        extents.append(Extent(path_index, filled[path_index], align(size)))
        filled[path_index] += align(size)
    return tuple(extents), filled


def _open_nameless(path: Path, directory: int) -> int:
    """A file without a directory entry. Not every file system can make one: there, create it and unlink it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
    try:
        return os.open(path, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    name = f".offload-{os.getpid()}-{os.urandom(8).hex()}"
    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    os.unlink(name, dir_fd=directory)
    return descriptor


def _lock_holder(directory: int) -> str:
    """Who holds the flock on this directory, from what the kernel tells."""
    inode = os.fstat(directory).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                return f"process {fields[4]}"
    return "another process"


class _close_once:
    """Close a descriptor, unless a fork has closed it for this process already."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _descriptors.add(self)

    def __call__(self) -> None:
        if self in _descriptors:
            _descriptors.discard(self)
            os.close(self._descriptor)


_descriptors: set[_close_once] = set()


def _drop_in_child() -> None:
    """A forked child must not keep the locks or the space of a store alive: it is its parent's."""
    for close in list(_descriptors):
        close()


os.register_at_fork(after_in_child=_drop_in_child)
