"""The drives that a directory's bytes end on, from sysfs: partitions, encryption, volumes and RAID looked through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.ranks.topology import disks_under, text_of

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
        return text_of(self.folder / "queue/scheduler").partition("[")[2].partition("]")[0]


def drives_under(path: Path) -> list[Drive]:
    """The drives; none where the file system does not tell, as those in memory, on a network and overlays do."""
    return [_drive(disk, above) for disk, above in disks_under(path, _SYS)]


def _drive(folder: Path, above: tuple[Path, ...]) -> Drive:
    """A disk is itself a layer if it stands on a file or in memory."""
    layers = [layer for each in (*above, folder) if (layer := _layer(each))]
    nbytes = int(text_of(folder / "size") or 0) * 512
    return Drive(folder.name, folder, _model(folder), nbytes, _medium(folder), tuple(layers))


def _layer(folder: Path) -> str:
    """Name of a device that stands on others, or on a file; empty for a disk."""
    if (folder / "dm").is_dir():
        kind = text_of(folder / "dm/uuid").partition("-")[0]
        return f"{_MAPPED.get(kind, 'device mapper')} {text_of(folder / 'dm/name')}"
    if (folder / "md").is_dir():
        return f"{text_of(folder / 'md/level').replace('raid', 'RAID ')} {folder.name}"
    if (folder / "loop").is_dir():
        return f"the file {text_of(folder / 'loop/backing_file')}"
    return "compressed memory" if folder.name.startswith("zram") else ""


def _model(folder: Path) -> str:
    return " ".join(text_of(folder / "device/model").split()) or "no model"


def _medium(folder: Path) -> str:
    if folder.name.startswith(("vd", "xvd", "loop", "zram")) or text_of(folder / "device/vendor") == "QEMU":
        return "virtual"
    return "rotating" if text_of(folder / "queue/rotational") == "1" else "solid state"
