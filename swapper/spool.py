"""Memory that need not stay in memory: pages of a nameless file, which the kernel writes out when it needs the room."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

from swapper.arena import align
from swapper.files import Descriptor, open_directory, open_nameless, reserve


class Spool:
    """Gives such memory on one path. It is freed, and its space with it, when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def memory(self, nbytes: int) -> mmap.mmap:
        """``nbytes`` of zeros. Raises ``StorageFull`` or ``StoreUnsafe``: room that is not there cannot be found out
        later, when a page is written."""
        directory = Descriptor(open_directory(self._path))
        try:
            file = Descriptor(open_nameless(self._path, directory.number))
        finally:
            directory.close()
        try:
            reserve(file.number, align(nbytes), self._path)
            return mmap.mmap(file.number, nbytes)
        finally:
            file.close()


def let_go(memory: mmap.mmap) -> None:
    """The process needs the pages no more for now; they are read again when they are looked at. Pages that are locked
    (``mlockall``) stay."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTNEED)
