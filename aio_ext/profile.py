"""The I/O profile: what was measured on a file system, kept for the programs that use it.

One JSON file for all of them, ``$XDG_CONFIG_HOME/offload/io_profiles.json`` (``~/.config`` without the variable). A
profile is filed under the identity of its file system, so it is not found on another drive, though that may have the
old one's name; and it counts only under the Linux version that it was measured under, with a backend that works.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .kept import KeptFile
from .queue import available_backends

_FILE = KeptFile("io_profiles.json", "profiles", version=2)


@dataclass(frozen=True, kw_only=True)
class IoProfile:
    """Best settings and bandwidths of one device."""

    backend: str
    block_bytes: int
    queue_depth: int
    num_threads: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Bytes read plus bytes written a second, both at once, as many of each."""
    mixed_q: float
    """Reads of R and writes of W bytes at once take ``((R/read)^q + (W/write)^q)^(1/q)`` seconds: 1 for a device that
    shares its bandwidth between them, large for one that does both at once at full speed."""


def profiles_path() -> Path:
    """The file that holds the profiles."""
    return _FILE.path


def file_system_key(path: str | Path) -> str:
    """Key that the profile of ``path`` is filed under: type, identity and size of its file system.

    The identity (``f_fsid``) comes from the UUID on most file systems, and from the device's number on the others.
    """
    status = os.statvfs(path)
    return f"{file_system(path)} {status.f_fsid:x} {status.f_blocks * status.f_frsize}"


def file_system(path: str | Path) -> str:
    """The type of the file system that ``path`` is on, such as ``ext4``; ``unknown`` where /proc does not tell."""
    device = os.stat(path).st_dev  # noqa: PTH116
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    target = str(Path(path).resolve())
    best = ("", "unknown")
    for line in mounts:
        left, _, right = line.partition(" - ")
        _, _, number, _, shown, *_ = left.split()
        # The device settles it; file systems that show files under other devices (btrfs, overlay) go by the path.
        if number == wanted:
            return right.split()[0]
        mount_point = shown.encode().decode("unicode_escape")
        covers = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        if covers and len(mount_point) > len(best[0]):
            best = (mount_point, right.split()[0])
    return best[1]


def load_profile(*paths: str | Path) -> IoProfile | None:
    """The profile of the drives under these directories together; None if one of them has none that holds here.

    Directories of one file system count once. Of several drives, bandwidths are the sums, which a
    :class:`aio_ext.StripedFile` reaches; ``mixed_q`` is the least; the settings are those of the fastest, for each
    queue. See :func:`missing_profile` for the reason of a None. Raises ``OSError`` for a path that is not there.
    """
    stored = _FILE.entries()
    of_file_systems = {file_system_key(path): path for path in paths}
    found = {key: _find(path, stored.get(key)) for key, path in of_file_systems.items()}
    profiles = [profile for profile in found.values() if isinstance(profile, IoProfile)]
    if not profiles or len(profiles) < len(found):
        return None
    return replace(
        max(profiles, key=lambda profile: profile.read_bytes_per_s),
        read_bytes_per_s=sum(profile.read_bytes_per_s for profile in profiles),
        write_bytes_per_s=sum(profile.write_bytes_per_s for profile in profiles),
        mixed_bytes_per_s=sum(profile.mixed_bytes_per_s for profile in profiles),
        mixed_q=min(profile.mixed_q for profile in profiles),
    )


def missing_profile(path: str | Path) -> str:
    """Reason why :func:`load_profile` finds nothing for ``path``, and the fix, in a sentence; empty if it finds
    something."""
    found = _find(path, _FILE.entries().get(file_system_key(path)))
    return "" if isinstance(found, IoProfile) else f"{found}; `offload bench {path}` measures it"


def save_profile(path: str | Path, profile: IoProfile) -> Path:
    """Keep the profile of the file system that ``path`` is on; others stay. Returns the file. Raises ``OSError``."""
    return _FILE.add({file_system_key(path): {"linux": _linux(), "path": str(path), **asdict(profile)}})


def _find(path: str | Path, entry: dict[str, Any] | None) -> IoProfile | str:
    """The profile that ``entry`` of the file is, or why there is none."""
    if entry is None:
        return f"{path} has no I/O profile"
    try:
        profile = IoProfile(**{field.name: entry[field.name] for field in fields(IoProfile)})
        linux = entry["linux"]
    except (KeyError, TypeError):
        return f"the I/O profile of {path} is damaged"
    if linux != _linux():
        return f"the I/O profile of {path} was measured under Linux {linux}, this is {_linux()}"
    if profile.backend not in available_backends():
        return f"the I/O profile of {path} is for the backend {profile.backend}, which does not work here"
    return profile


def _linux() -> str:
    """Version and patch level; what distributions append does not change how fast a drive is."""
    return ".".join(platform.release().split(".")[:2])
