"""Locks on files: what is in use by a process, and what a dead one has left.

The kernel gives a lock back when its process ends, however that ends. A process id says less: another container counts
its own, and the next process of this one gets the same. Where a file system cannot lock, nothing is known: who wants to
use a file goes on, and who wants to remove it leaves it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from swapper.files import Descriptor

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def share(path: Path) -> Descriptor:
    """Open a file and have it in use, as others may, until the descriptor is closed. Who is removing it is waited for.
    Raises ``OSError``, also if it was removed."""
    found = Descriptor(os.open(path, os.O_RDONLY | _OPEN))
    try:
        with contextlib.suppress(OSError):  # the file system cannot
            fcntl.flock(found.number, fcntl.LOCK_SH)
        if not os.fstat(found.number).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        found.close()
        raise
    return found


def take(path: Path) -> Descriptor | None:
    """Make a file, if it is not there, and have it alone until the descriptor is closed; None if another process has
    it. Raises ``OSError``."""
    while True:
        found = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o600))
        if _lock(found, fcntl.LOCK_EX) is False:
            found.close()
            return None
        if os.fstat(found.number).st_nlink:
            return found
        found.close()  # it was removed before it was locked


def take_unused(path: Path) -> Descriptor | None:
    """Have a file alone that is there; None if it is not certain that nobody uses it."""
    try:
        found = Descriptor(os.open(path, os.O_RDWR | _OPEN))
    except OSError:
        return None
    if _lock(found, fcntl.LOCK_EX) and os.fstat(found.number).st_nlink:
        return found
    found.close()
    return None


def _lock(file: Descriptor, kind: int) -> bool | None:
    """None: the file system cannot."""
    try:
        fcntl.flock(file.number, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
