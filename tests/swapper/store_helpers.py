"""Memory to transfer from and to, and what a process has open, for the tests of the store."""

import ctypes
import stat
from pathlib import Path

from swapper import Lease


def fill(lease: Lease, value: int) -> None:
    ctypes.memset(lease.address, value, lease.nbytes)


def memory(lease: Lease) -> memoryview:
    return memoryview((ctypes.c_char * lease.nbytes).from_address(lease.address)).cast("B")


def open_files_under(path: Path) -> list[int]:
    """Descriptors of this process on regular files under ``path``, one for each file."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink() and str(entry.readlink()).startswith(str(path)):
            info = entry.stat()
            if stat.S_ISREG(info.st_mode):
                found[info.st_ino] = int(entry.name)
    return list(found.values())
