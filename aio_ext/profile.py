"""The I/O profile: what was measured on a device, kept for the programs that use it.

One JSON file for all devices, ``$XDG_CONFIG_HOME/offload/io_profiles.json`` (``~/.config`` without the variable).
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_VERSION = 1


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

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """The time that moving so much both ways at once takes."""
        read, write = read_bytes / self.read_bytes_per_s, write_bytes / self.write_bytes_per_s
        longer, shorter = max(read, write), min(read, write)
        if longer == 0:
            return 0.0
        return float(longer * (1 + (shorter / longer) ** self.mixed_q) ** (1 / self.mixed_q))


def profiles_path() -> Path:
    """The file that holds the profiles."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "offload" / "io_profiles.json"


def device_key(path: str | Path) -> str:
    """What the profile of ``path`` is filed under: ``major:minor`` of its device and the file system's type."""
    device = os.stat(path).st_dev  # noqa: PTH116 - a path or a string
    return f"{os.major(device)}:{os.minor(device)} {file_system(path)}"


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
        mount_point = left.split()[4].encode().decode("unicode_escape")
        covers = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        # The device settles it; file systems that show files under other devices (btrfs, overlay) go by the path.
        if left.split()[2] == wanted:
            return right.split()[0]
        if covers and len(mount_point) > len(best[0]):
            best = (mount_point, right.split()[0])
    return best[1]


def load_profile(path: str | Path) -> IoProfile | None:
    """The profile of the device that ``path`` is on; None if there is none, or it cannot be read or made sense of."""
    try:
        stored = json.loads(profiles_path().read_text())["profiles"][device_key(path)]
        return IoProfile(**{field.name: stored[field.name] for field in fields(IoProfile)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_profile(path: str | Path, profile: IoProfile) -> Path:
    """Keep the profile of the device that ``path`` is on; others stay. Returns the file. Raises ``OSError``."""
    file = profiles_path()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        profiles = dict(json.loads(file.read_text())["profiles"])
    except (OSError, ValueError, KeyError, TypeError):
        profiles = {}
    profiles[device_key(path)] = asdict(profile)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump({"version": _VERSION, "profiles": profiles}, stream, indent=2)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink()
        raise
    return file
