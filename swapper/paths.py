"""The directories that a user gives for stores, looked at before anything is reserved there."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from aio_ext.profile import file_system
from swapper.errors import StoreUnsafe
from swapper.files import Descriptor, named, open_directory, open_nameless

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")

_ON_A_NETWORK = (
    "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "9p", "afs", "coda", "ceph", "lustre", "gpfs", "beegfs",
    "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "vboxsf", "prl_fs", "virtiofs",
)  # fmt: skip

_LAYERED = "fuse.fuse-overlayfs"
"""File systems that a container without privileges has for its root. The program only says which local file is
meant."""


class Medium(Enum):
    """Medium that keeps the bytes of a file system."""

    DISK = "a local disk"
    MEMORY = "host memory"
    ELSEWHERE = "a network, or a program"


@dataclass(frozen=True)
class Directory:
    """A directory that can hold a store. Equal if it is the same one, whatever the path: a link, or a mount."""

    device: int
    inode: int
    file_system: str

    @property
    def medium(self) -> Medium:
        return medium_of(self.file_system)


def medium_of(file_system: str) -> Medium:
    """By the type, as ``/proc/self/mountinfo`` names it. One that we do not know is taken for a disk."""
    if file_system in _IN_MEMORY:
        return Medium.MEMORY
    through_a_program = file_system.partition(".")[0] in ("fuse", "fuseblk") and file_system != _LAYERED
    return Medium.ELSEWHERE if through_a_program or file_system in _ON_A_NETWORK else Medium.DISK


def look_at(path: Path) -> Directory:
    """The directory at ``path``, which may be a link. A file is made there, without a name, and given up.

    Raises ``StoreUnsafe`` if it cannot hold a store: it is missing, cannot be written, or is not on a local disk.
    """
    with contextlib.closing(Descriptor(open_directory(path))) as opened:
        info = os.fstat(opened.number)
        try:
            found = Directory(info.st_dev, info.st_ino, file_system(path))
        except OSError as error:
            raise StoreUnsafe(f"{named(path)} cannot be looked at: {error.strerror}.") from None
        if found.medium is Medium.ELSEWHERE:
            raise StoreUnsafe(
                f"{named(path)} is on a file system of type {found.file_system}, behind {found.medium.value}: a store "
                "needs a local disk, for direct I/O, locks and short waits."
            )
        os.close(open_nameless(path, opened.number))
    return found
