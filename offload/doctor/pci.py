"""A device's place on PCI Express, from sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """Speeds are GT/s of a lane, widths are lanes; now, and the most that the device can."""

    address: str
    speed: float
    speed_max: float
    width: int
    width_max: int

    def __str__(self) -> str:
        return f"PCIe {self.speed:g} GT/s x{self.width}"


def link_of(device: Path) -> Link | None:
    """The link of the nearest PCI Express device on the way from ``device`` (a folder of sysfs) to the root, if any."""
    for folder in (device, *device.parents):
        if not (folder / "current_link_width").exists():
            continue
        values = [(folder / name).read_text().split()[0] for name in _FILES]
        if "Unknown" in values:
            return None
        return Link(folder.name, float(values[0]), float(values[1]), int(values[2]), int(values[3]))
    return None


_FILES = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
