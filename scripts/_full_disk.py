"""Small file systems that are filled at a chosen moment: what a full disk says is the kernel's own."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapper.device import FileDevice
from swapper.files import give_back_ranges

MIB = 1 << 20
ROOM_BYTES = 64 * MIB
NUM_NAMES = 300
"""Files and directories that a file system has names for."""
KINDS = ("ext4", "tmpfs")
_BALLAST = "ballast"
_open, _mkdir, _fallocate = os.open, os.mkdir, os.posix_fallocate


class CannotMount(Exception):
    """This machine does not let this user mount file systems."""


def in_own_mounts(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run the command where it may mount file systems, which are gone with it. Raises ``CannotMount``."""
    for prefix in (["unshare", "--mount"], ["unshare", "--mount", "--user", "--map-root-user"]):
        if _works([*prefix, "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]):
            return subprocess.run([*prefix, *command], check=False)
    raise CannotMount("nobody may mount a file system here")


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def mounted(kind: str, path: Path) -> Iterator[None]:
    """A file system of ``ROOM_BYTES`` at ``path``: a tmpfs, or an ext4 on a loop device over one.

    Raises ``CannotMount``.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        if kind == "tmpfs":
            _must("mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES},nr_inodes={NUM_NAMES}", "tmpfs", path)
        else:
            _must("mount", "-t", "tmpfs", "-o", f"size={2 * ROOM_BYTES}", "tmpfs", folder)
            closing.callback(_must, "umount", "--lazy", folder)
            image = Path(folder) / "image"
            with image.open("wb") as file:
                file.truncate(ROOM_BYTES)
            _must("mkfs.ext4", "-q", "-m", "0", "-N", NUM_NAMES, image)
            _must("mount", "-o", "loop", image, path)
        closing.callback(_must, "umount", "--lazy", path)
        yield


def _must(*words: object) -> None:
    try:
        subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise CannotMount(f"there is no {words[0]}") from None
    except subprocess.CalledProcessError as error:
        raise CannotMount(f"{words[0]}: {error.stderr.strip()}") from None


def clear(root: Path) -> None:
    """Remove everything but what the file system itself has there."""
    for entry in root.iterdir():
        if entry.name != "lost+found":
            subprocess.run(["rm", "-rf", entry], check=True)


# What takes the room.


def take_room(root: Path, spare_bytes: int) -> None:
    """Fill the file system but for ``spare_bytes``."""
    descriptor = _open(root / _BALLAST, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        size, step = 0, ROOM_BYTES
        while step >= 4096:
            try:
                _fallocate(descriptor, size, step)
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                os.ftruncate(descriptor, size)  # some of it may have been taken
                step //= 2
        os.ftruncate(descriptor, max(size - spare_bytes, 0))
    finally:
        os.close(descriptor)


def take_names(root: Path) -> None:
    """Use up all names of files and directories; there is room for their content."""
    folder = root / f"{_BALLAST}s"
    with contextlib.suppress(OSError):
        _mkdir(folder)
    with contextlib.suppress(OSError):
        for number in range(NUM_NAMES):
            os.close(_open(folder / str(number), os.O_CREAT | os.O_WRONLY, 0o600))


def give_room(root: Path) -> None:
    """Take all of it back. Safe to call if there is nothing."""
    subprocess.run(["rm", "-rf", root / _BALLAST, root / f"{_BALLAST}s"], check=True)


# Moments.


@dataclass(frozen=True)
class Moment:
    """Before the ``nth`` call of this kind the file system is filled: all but ``spare_bytes``, or (None) names."""

    kind: str
    nth: int
    spare_bytes: int | None


class Watch:
    """Counts the calls that may need room on one of ``roots``, by kind: ``PHASE: CALL FILE``. The file system is filled
    just before the ``moment``."""

    def __init__(self, roots: tuple[Path, ...], moment: Moment | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.phase = ""
        self.struck: Path | None = None
        """The file system that was filled."""
        self._moment = moment
        self._roots = {root.stat().st_dev: root for root in roots}
        self._lock = threading.Lock()
        """Guards ``counts`` and ``struck``."""

    def give_room(self) -> None:
        """There is room again."""
        if self.struck is not None:
            give_room(self.struck)

    def passing(self, call: str, target: Any, folder: int | None = None, taken: tuple[int, int] | None = None) -> None:
        """A call with ``target``, a path (in the open ``folder``) or a descriptor, is about to be made. ``taken`` is
        the range that it writes over."""
        try:
            if isinstance(target, int):
                device, name = os.fstat(target).st_dev, Path(f"/proc/self/fd/{target}").readlink().name
            else:
                path = Path(os.fsdecode(target))
                device = (os.stat(path.parent) if folder is None else os.fstat(folder)).st_dev  # noqa: PTH116
                name = path.name
        except OSError:
            return
        root = self._roots.get(device)
        if root is None:
            return
        name = re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", name.removesuffix(" (deleted)"))
        kind = f"{self.phase}: {call} {name}"
        with self._lock:
            nth = self.counts[kind]
            self.counts[kind] += 1
            moment = self._moment
            if moment is None or self.struck is not None or (moment.kind, moment.nth) != (kind, nth):
                return
            self.struck = root
            if taken is not None:
                give_back_ranges(target, [taken])
            if moment.spare_bytes is None:
                take_names(root)
            else:
                take_room(root, moment.spare_bytes)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Within ``with``, calls of this process are watched."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in _WATCHED]
        try:
            for (owner, name, real), (_, _, make) in zip(before, _WATCHED, strict=True):
                setattr(owner, name, make(self, real))
            yield
        finally:
            for owner, name, real in before:
                setattr(owner, name, real)


def _opening(watch: Watch, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            watch.passing("open", path if dir_fd is None else dir_fd)
        elif flags & os.O_CREAT:
            watch.passing("open", path, dir_fd)
        return real(path, flags, mode, dir_fd=dir_fd)

    return call


def _opening_file(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int):
            watch.passing("write", file)
        return real(file, mode, *args, **kwargs)

    return call


def _making(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        watch.passing("mkdir", path, dir_fd)
        real(path, mode, dir_fd=dir_fd)

    return call


def _naming(watch: Watch, real: Callable[..., None]) -> Callable[..., None]:
    def call(old: Any, new: Any, **folders: Any) -> None:
        watch.passing(real.__name__, new, folders.get("dst_dir_fd"))
        real(old, new, **folders)

    return call


def _using(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int, *args: Any) -> Any:
        watch.passing(real.__name__, descriptor)
        return real(descriptor, *args)

    return call


def _moving(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(device: FileDevice, offset: int, address: int, nbytes: int, *, urgent: bool) -> Any:
        watch.passing("transfer", device.descriptors[0], taken=(offset, nbytes))
        return real(device, offset, address, nbytes, urgent=urgent)

    return call


def _syncing(watch: Watch, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(device: FileDevice) -> Any:
        watch.passing("sync", device.descriptors[0])
        return real(device)

    return call


_WATCHED: tuple[tuple[Any, str, Callable[[Watch, Any], Any]], ...] = (
    (os, "open", _opening),
    (io, "open", _opening_file),
    (builtins, "open", _opening_file),
    (os, "mkdir", _making),
    (os, "rename", _naming),
    (os, "replace", _naming),
    (os, "link", _naming),
    (os, "write", _using),
    (os, "pwrite", _using),
    (os, "posix_fallocate", _using),
    (os, "fsync", _using),
    (os, "fdatasync", _using),
    (FileDevice, "write", _moving),
    (FileDevice, "sync", _syncing),
)
