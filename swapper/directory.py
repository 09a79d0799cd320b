"""The small files of a durable store: written, synced, renamed and removed by name in one directory."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Protocol

from swapper.errors import StoreUnsafe
from swapper.files import Descriptor

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Directory(Protocol):
    """Protocol of the place of a durable store's manifests. Failures are ``OSError``.

    Nothing is durable before it has been synced: the content of a file by ``sync_file``, its name, a new name and its
    removal by ``sync``. A rename replaces what had the new name, at once and as a whole.
    """

    def names(self) -> list[str]: ...
    def read(self, name: str, nbytes_max: int) -> bytes: ...
    def create(self, name: str, data: bytes) -> None: ...
    def sync_file(self, name: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def sync(self) -> None: ...
    def is_name_of(self, name: str, file: int) -> bool: ...


class RealDirectory:
    """A directory by its descriptor: what becomes of its path meanwhile does not matter."""

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor

    def names(self) -> list[str]:
        return sorted(os.listdir(self._number))  # noqa: PTH208 - a descriptor

    def read(self, name: str, nbytes_max: int) -> bytes:
        """The first ``nbytes_max + 1`` bytes of a regular file of one name: one too many tells that it is too long."""
        with open_file(self._number, name, _READ) as descriptor:
            parts, left = [], nbytes_max + 1
            while left > 0 and (part := os.read(descriptor, min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

    def create(self, name: str, data: bytes) -> None:
        """A new file, 0600. Raises ``FileExistsError`` if there is one."""
        with open_file(self._number, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

    def sync_file(self, name: str) -> None:
        with open_file(self._number, name, _READ) as descriptor:
            os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._number, dst_dir_fd=self._number)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._number)

    def sync(self) -> None:
        os.fsync(self._number)

    def is_name_of(self, name: str, file: int) -> bool:
        """An open file has this name here."""
        try:
            return os.path.samestat(os.stat(name, dir_fd=self._number, follow_symlinks=False), os.fstat(file))
        except FileNotFoundError:
            return False


class MemoryDirectory:
    """The directory of a store that is gone with its process."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str, nbytes_max: int) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name][: nbytes_max + 1]

    def create(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def sync_file(self, name: str) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        if old not in self._files:
            raise FileNotFoundError(old)
        self._files[new] = self._files.pop(old)

    def remove(self, name: str) -> None:
        if self._files.pop(name, None) is None:
            raise FileNotFoundError(name)

    def sync(self) -> None:
        pass

    def is_name_of(self, name: str, file: int) -> bool:
        return False


class open_file(contextlib.AbstractContextManager[int]):
    """A descriptor of a regular file of ours in a directory, closed at the end and in forked children.

    Never follows a link; a new file is 0600 under any umask. Raises ``OSError``, and ``StoreUnsafe`` for a file that
    has another owner, and for one to be written that has another name (what is read may: ``cp -al`` makes them).
    """

    def __init__(self, directory: int, name: str, flags: int) -> None:
        self.descriptor = Descriptor(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory))
        try:
            info = os.fstat(self.descriptor.number)
            names_max = 1 if flags & (os.O_WRONLY | os.O_RDWR) else info.st_nlink
            if not stat.S_ISREG(info.st_mode) or info.st_nlink > names_max or info.st_uid != os.geteuid():
                raise StoreUnsafe(f"{name} is not a regular file of yours with one name.")
            if flags & os.O_CREAT:
                os.fchmod(self.descriptor.number, 0o600)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.descriptor.close()

    def __enter__(self) -> int:
        return self.descriptor.number

    def __exit__(self, *_: object) -> None:
        self.close()
