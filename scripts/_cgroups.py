"""Limits for a process by cgroups of version 1 and 2: memory, and bytes a second of the drive under a path. They need
root; where they cannot be made, the script ends and says why."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(pid: int, nbytes: int) -> Iterator[None]:
    """Within ``with`` the process has so much memory, page cache included."""
    of_memory, name = (_GROUPS / "memory", "memory.limit_in_bytes")
    if not of_memory.exists():
        of_memory, name = (_GROUPS, "memory.max")
    with _group(of_memory, pid, {name: str(nbytes)}):
        yield


@contextlib.contextmanager
def drive_limit(pid: int, path: Path, read: float, write: float) -> Iterator[None]:
    """Within ``with`` the process reads and writes the drive of ``path`` at so many bytes a second at most."""
    number = path.stat().st_dev
    drive = f"{os.major(number)}:{os.minor(number)}"
    of_drives = _GROUPS / "blkio"
    rules = {
        "blkio.throttle.read_bps_device": f"{drive} {read:.0f}",
        "blkio.throttle.write_bps_device": f"{drive} {write:.0f}",
    }
    if not of_drives.exists():
        of_drives, rules = _GROUPS, {"io.max": f"{drive} rbps={read:.0f} wbps={write:.0f}"}
    with _group(of_drives, pid, rules):
        yield


@contextlib.contextmanager
def _group(parent: Path, pid: int, rules: dict[str, str]) -> Iterator[None]:
    """A group of its own for the process."""
    group = parent / f"offload-bench-{pid}"
    try:
        group.mkdir()
        for name, rule in rules.items():
            (group / name).write_text(rule)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        sys.exit(f"cannot limit a process by a cgroup: {error}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()
