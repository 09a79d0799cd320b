"""Files and directories: by descriptor, never through a link, private under any umask, closed in children."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from swapper.errors import StorageFull, StoreUnsafe, failed, no_room, readable_bytes, unusable

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
_renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SHOWN = 120
"""Of a longer path, messages show so many letters at either end."""
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def open_directory(path: Path) -> int:
    """The directory that a user gave, which may be a link. Raises ``StoreUnsafe``."""
    name = named(path)
    try:
        return os.open(path, _DIRECTORY)
    except FileNotFoundError:
        if path.is_symlink():
            raise StoreUnsafe(f"{name} is a link to {named(path.readlink())}, which does not exist.") from None
        raise StoreUnsafe(f"{name} does not exist.", advice=f"Create it: mkdir -p {shlex.quote(name)}") from None
    except NotADirectoryError:
        raise StoreUnsafe(f"{name} is not a directory.") from None
    except OSError as error:
        raise StoreUnsafe(f"{name} cannot be opened: {error.strerror}.") from None


def open_nameless(path: Path, directory: int) -> int:
    """A new file without a name in the open ``directory``, for direct I/O where the file system can.

    ``path`` is what the user calls it. Not every file system can make such a file: there, it is created and unlinked
    at once. Raises ``StoreUnsafe`` or ``StorageFull``.
    """
    try:
        try:
            descriptor = open_direct(".", os.O_TMPFILE, directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            name = f".offload-{os.getpid()}-{os.urandom(8).hex()}"
            descriptor = open_direct(name, os.O_CREAT | os.O_EXCL, directory)
            os.unlink(name, dir_fd=directory)
    except OSError as error:
        raise unusable(f"cannot create a file in {named(path)}", error) from None
    return descriptor


def open_direct(path: str | Path, flags: int, directory: int | None = None) -> int:
    """A descriptor for I/O past the page cache, or through it where the file system can do no better.

    A new file is 0600 under any umask.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, flags, 0o600, dir_fd=directory)
    if flags & (os.O_CREAT | os.O_TMPFILE):
        try:
            os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def reserve(descriptor: int, nbytes: int, where: Path | str) -> None:
    """Make the file ``nbytes`` long, with all its space taken. Raises ``StorageFull``; the file may have grown then."""
    try:
        needed = nbytes - os.fstat(descriptor).st_blocks * 512
    except OSError as error:
        raise failed(f"asking for the room in {where}", error) from error
    advice = "Free some, give another path, or raise host_memory so that less goes there."
    require_room(descriptor, needed, where, advice)
    try:
        _take_range(descriptor, 0, max(nbytes, 1))
    except OSError as error:
        raise no_room(f"{readable_bytes(nbytes)} in {where}", error) from error


def require_room(descriptor: int, needed: int, where: Path | str, advice: str) -> None:
    """Raise ``StorageFull`` unless the file system of an open file or directory has ``needed`` bytes."""
    try:
        available = os.fstatvfs(descriptor)
    except OSError as error:
        raise failed(f"asking for the room in {where}", error) from error
    free_bytes = available.f_bavail * available.f_frsize
    if needed > free_bytes:
        raise StorageFull(
            f"{where} has too little room: {readable_bytes(needed)} are needed, {readable_bytes(free_bytes)} are free.",
            advice=advice,
        )


def take_room(descriptor: int, nbytes: int) -> None:
    """Make the file ``nbytes`` long, with all its space taken, where the file system can do that: those of a network
    often cannot. Raises ``OSError``."""
    while nbytes and _fallocate(descriptor, 0, 0, nbytes) != 0:
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def reserve_ranges(descriptor: int, ranges: Sequence[tuple[int, int]], reserved_bytes: int = 0) -> None:
    """Take the space of these ranges (offset, bytes) of a file, which grows as far as they reach. It has
    ``reserved_bytes`` of them already.

    Raises ``StorageFull``, before anything is taken if that can be seen.
    """
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    needed = sum(nbytes for _, nbytes in joined) - reserved_bytes
    available = os.fstatvfs(descriptor)
    free_bytes = available.f_bavail * available.f_frsize
    if needed > free_bytes:
        raise StorageFull(
            f"too little room: {readable_bytes(needed)} more are needed, {readable_bytes(free_bytes)} are free.",
            survives="Nothing has changed.",
            advice="Free some, give another path, or raise host_memory so that less goes there.",
        )
    for offset, nbytes in joined:
        if not nbytes:
            continue
        try:
            _take_range(descriptor, offset, nbytes)
        except OSError as error:
            raise no_room(readable_bytes(nbytes), error) from error


def _take_range(descriptor: int, offset: int, nbytes: int) -> None:
    """Take the space of a range of a file; what is there stays. Where the file system has no call for it, the C library
    writes to each block, which it cannot past the page cache. Raises ``OSError``."""
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, offset, nbytes)
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def give_back_ranges(descriptor: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Give the space of these ranges (offset, bytes) of a file back, which keeps its size. Where the file system cannot
    do that, the file stays as it is."""
    for offset, nbytes in ranges:
        _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


def named(path: Path) -> str:
    """A path as a message shows it: in one line, and not a long one."""
    text = str(path) if str(path).isprintable() else ascii(str(path))
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}...{text[-_SHOWN:]}"


class Descriptor:
    """An open descriptor that is closed once: here, or in a forked child, which must not keep a lock or space alive."""

    _open: set[Descriptor] = set()  # noqa: RUF012 - one set for the process

    def __init__(self, number: int) -> None:
        self.number = number
        Descriptor._open.add(self)

    @classmethod
    def kept(cls, closing: contextlib.ExitStack, number: int) -> int:
        """The number, whose descriptor is closed with the stack."""
        closing.callback(cls(number).close)
        return number

    @property
    def is_open(self) -> bool:
        """It was not closed yet, and this is the process that has opened it."""
        return self in Descriptor._open

    def close(self) -> None:
        """Close it, unless that has been done."""
        if self.is_open:
            Descriptor._open.discard(self)
            os.close(self.number)


def _close_in_child() -> None:
    for descriptor in list(Descriptor._open):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)


def exchange(path: Path, other: Path) -> bool:
    """Exchange two names at once. False if the kernel or the file system cannot. Raises ``OSError``."""
    if _renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(path), None, str(other))
