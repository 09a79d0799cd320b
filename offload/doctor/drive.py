"""The drives that a directory's bytes end on, from sysfs: partitions, encryption, volumes and RAID looked through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SYS = Path("/sys")
_MAPPED = {"CRYPT": "LUKS", "LVM": "LVM", "MPATH": "multipath"}


@dataclass(frozen=True)
class Drive:
    """One physical or virtual disk. ``through`` names what lies between it and the file system, from above."""

    name: str
    folder: Path
    model: str
    nbytes: int
    medium: str
    """"solid state", "rotating", or "virtual": what a virtual disk says of itself means nothing."""
    through: tuple[str, ...]

    @property
    def scheduler(self) -> str:
        """The I/O scheduler of the kernel; empty if it has none to choose."""
        return _read(self.folder / "queue/scheduler").partition("[")[2].partition("]")[0]


def drives_under(path: Path) -> list[Drive]:
    """The drives; none where the file system does not tell, as those in memory, on a network and overlays do."""
    number = _block_device(path)
    folder = _SYS / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    return list(_drives(folder.resolve(), ())) if folder.exists() else []


def _block_device(path: Path) -> int:
    """The number of the device that is mounted there. A btrfs shows a number of its own: its source tells."""
    number = path.stat().st_dev
    if os.major(number) != 0:
        return number
    source = _mount_source(f"{os.major(number)}:{os.minor(number)}")
    return Path(source).stat().st_rdev if source.startswith("/dev/") else number


def _mount_source(number: str) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[1]
    return ""


def _drives(folder: Path, through: tuple[str, ...]) -> Iterator[Drive]:
    if (folder / "partition").exists():
        folder = folder.parent
    layer = _layer(folder)
    below = sorted((folder / "slaves").glob("*")) if (folder / "slaves").is_dir() else []
    if below:
        for each in below:
            yield from _drives(each.resolve(), (*through, layer))
        return
    yield Drive(
        folder.name,
        folder,
        _model(folder),
        int(_read(folder / "size") or 0) * 512,
        _medium(folder),
        (*through, layer) if layer else through,
    )


def _layer(folder: Path) -> str:
    """What a device is that stands on others, or on a file; empty for a disk."""
    if (folder / "dm").is_dir():
        kind = _read(folder / "dm/uuid").partition("-")[0]
        return f"{_MAPPED.get(kind, 'device mapper')} {_read(folder / 'dm/name')}"
    if (folder / "md").is_dir():
        return f"{_read(folder / 'md/level').replace('raid', 'RAID ')} {folder.name}"
    if (folder / "loop").is_dir():
        return f"the file {_read(folder / 'loop/backing_file')}"
    return "compressed memory" if folder.name.startswith("zram") else ""


def _model(folder: Path) -> str:
    return " ".join(_read(folder / "device/model").split()) or "no model"


def _medium(folder: Path) -> str:
    if folder.name.startswith(("vd", "xvd", "loop", "zram")) or _read(folder / "device/vendor") == "QEMU":
        return "virtual"
    return "rotating" if _read(folder / "queue/rotational") == "1" else "solid state"


def _read(file: Path) -> str:
    """Empty if there is no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
