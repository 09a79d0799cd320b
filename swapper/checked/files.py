"""Regular files, opened so that nothing else in their place is waited for, followed or read beyond its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from swapper.checked.refused import Refused
from swapper.files import Descriptor

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: str | Path, *, directory: int | None = None, links: bool = False, flags: int = 0) -> Descriptor:
    """Open a regular file to be read, whoever owns it. ``directory``: the open one that ``path`` is in. ``links`` are
    followed where that is said.

    Opening a pipe or a terminal does not wait. Raises ``Refused`` for what is no regular file, and ``OSError``.
    """
    if "\0" in str(path):
        raise Refused("a name with a zero byte is that of no file")
    flags |= _FLAGS | (0 if links else os.O_NOFOLLOW)
    file = Descriptor(os.open(path, flags, dir_fd=directory))
    try:
        if not stat.S_ISREG(os.fstat(file.number).st_mode):
            raise Refused("it is not a regular file")
        # Where a file system cannot start a read without waiting, a queue would be told to try again, without end.
        fcntl.fcntl(file.number, fcntl.F_SETFL, fcntl.fcntl(file.number, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def _opened(path: str | Path, directory: int | None, links: bool) -> Iterator[int]:
    file = open_regular(path, directory=directory, links=links)
    try:
        yield file.number
    finally:
        file.close()


def read_regular(path: str | Path, nbytes_max: int, *, directory: int | None = None, links: bool = False) -> bytes:
    """All of a file of at most ``nbytes_max``. Raises as ``open_regular``, and ``Refused`` for a larger one."""
    with _opened(path, directory, links) as number:
        return read_all(number, nbytes_max)


def read_all(number: int, nbytes_max: int) -> bytes:
    """All of an open regular file. Raises ``Refused`` if it has more than ``nbytes_max``, before it is read."""
    nbytes = os.fstat(number).st_size
    if nbytes > nbytes_max:
        raise Refused(f"it has {nbytes:,} bytes, and can have at most {nbytes_max:,}")
    data = os.pread(number, nbytes, 0)
    while len(data) < nbytes and (part := os.pread(number, nbytes - len(data), len(data))):
        data += part
    return data
