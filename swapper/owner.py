"""One owner a durable store: a lock on its data, and a file that names its owner.

[Note: What is locked] The lock is on the open data file itself. The kernel lets go of it when the last user of that
open file is gone, and that includes transfers which a killed process has left in flight. So a new owner that
has the lock can be sure that no old transfer writes any more. A forked child closes its copies at once, so it holds
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from swapper.checked import Cursor, Int, Record, Refused, Text, read_regular, text_of
from swapper.directory import open_file
from swapper.errors import NO_ROOM, StoreLocked

NAME = "owner"
WRITTEN = "owner.new"
_BYTES_MAX = 4096
_GRACE_S = 30.0
"""Seconds that the kernel may take to finish the transfers of a process that has died."""


@dataclass(frozen=True)
class Owner:
    """The process that has, or last had, a store open."""

    pid: int
    host: str
    boot: str
    started: str
    ticks: int
    """Start of the process, in the kernel's clock: a process id alone can be that of another by now."""

    @classmethod
    def me(cls) -> Owner:
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(os.getpid(), socket.gethostname(), _boot(), started, _ticks(os.getpid()))

    def is_dead(self) -> bool:
        """True if this process is certainly gone. A process of another machine is never certain."""
        return self.boot == _boot() and (self.pid <= 0 or _ticks(self.pid) != self.ticks)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which opened it at {self.started}"


_NUMBER, _WORDS = Int(-1, 1 << 63), Text(100)
_OWNER = Record(Owner, {"pid": _NUMBER, "host": _WORDS, "boot": _WORDS, "started": _WORDS, "ticks": _NUMBER})


def lock(descriptor: int, directory: int, where: str) -> None:
    """Become the owner, and write that down if there is room. Raises ``StoreLocked`` if another process is."""
    deadline = time.monotonic() + _GRACE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = read_owner(directory)
            if owner is None or not owner.is_dead() or time.monotonic() > deadline:
                raise StoreLocked(f"{where} is in use by {owner or 'another process'}.") from None
            time.sleep(0.005)  # its last transfers are still coming in: nothing tells when they are over
    _unlink(WRITTEN, directory)
    try:
        with open_file(directory, WRITTEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            os.write(file, json.dumps(vars(Owner.me())).encode())
        os.rename(WRITTEN, NAME, src_dir_fd=directory, dst_dir_fd=directory)  # a copy of hard links keeps its own
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _unlink(WRITTEN, directory)  # a store can be read and removed on a full disk, by an owner without a name
        _unlink(NAME, directory)


def _unlink(name: str, directory: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def is_locked(descriptor: int) -> bool:
    """True if a process has the store open right now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def read_owner(directory: int) -> Owner | None:
    """The owner that was written down last; None if there is none, or its entry makes no sense."""
    with contextlib.suppress(OSError, Refused):
        return _OWNER.read(Cursor(text_of(read_regular(NAME, _BYTES_MAX, directory=directory))))
    return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _ticks(pid: int) -> int:
    """Start of a process; -1 if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    state, *fields = line.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])
