"""Topology of a machine's cores, GPUs and drives, as sysfs tells. ``sys`` is where it is mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYS = Path("/sys")


def numa_nodes(sys: Path = SYS) -> dict[int, frozenset[int]]:
    """The CPUs that are online at each NUMA node. A node that has memory alone is left out."""
    cpus = {number: numbers_in(text_of(folder / "cpulist")) for number, folder in _node_folders(sys)}
    return {number: of_node for number, of_node in cpus.items() if of_node}


def node_distances(sys: Path = SYS) -> dict[tuple[int, int], int]:
    """Distances of NUMA nodes from each other, in the firmware's measure: 10 is a node's own memory."""
    folders = _node_folders(sys)
    return {
        (number, other): int(distance)
        for number, folder in folders
        for (other, _), distance in zip(folders, text_of(folder / "distance").split(), strict=False)
    }


def node_of_device(address: str, sys: Path = SYS) -> int | None:
    """The NUMA node of the device at a PCI address (``0000:41:00.0``); None where all are equally near."""
    return nearest_node((sys / "bus/pci/devices" / address).resolve())


def node_of_path(path: Path, sys: Path = SYS) -> int | None:
    """The NUMA node of the drive that holds a directory. None if it is unknown, and if several drives of several nodes
    hold it together."""
    nodes = {_node_of_disk(disk) for disk, _ in disks_under(path, sys)}
    return nodes.pop() if len(nodes) == 1 else None


def nearest_node(device: Path) -> int | None:
    """The NUMA node of the first device, on the way from a folder of sysfs to its root, that has one."""
    for folder in (device, *device.parents):
        if (folder / "numa_node").exists():
            node = int(text_of(folder / "numa_node"))
            return node if node >= 0 else None
    return None


def pci_address(properties: Any) -> str | None:
    """The PCI address of a GPU by what torch knows of it; None where torch is too old to know."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def disks_under(path: Path, sys: Path = SYS) -> list[tuple[Path, tuple[Path, ...]]]:
    """The folders of the disks that a directory's bytes end on, each with the block devices (volumes, RAID, encryption)
    between the file system and it, from above. None where the file system does not tell, as those in memory, on a
    network and overlays do. Raises ``OSError`` for a directory that is not there."""
    number = block_device_number(path)
    folder = sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    return list(disks_below(folder.resolve())) if folder.exists() else []


def disks_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """The disks that a block device (its folder) stands on, as ``disks_under`` gives them."""
    if (folder / "partition").exists():
        folder = folder.parent
    below = sorted((folder / "slaves").glob("*")) if (folder / "slaves").is_dir() else []
    for each in below:
        yield from disks_below(each.resolve(), (*above, folder))
    if not below:
        yield folder, above


def block_device_number(path: Path) -> int:
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


def _node_of_disk(folder: Path) -> int | None:
    """A drive of several ports belongs to its NVMe subsystem, which has a link to the controller of each port."""
    node = nearest_node(folder)
    ports = {nearest_node(link.resolve()) for link in folder.parent.glob("nvme[0-9]*") if link.is_symlink()}
    return ports.pop() if node is None and len(ports) == 1 else node


def _node_folders(sys: Path) -> list[tuple[int, Path]]:
    """By number, as the kernel lists distances."""
    folders = (sys / "devices/system/node").glob("node[0-9]*")
    return sorted((int(folder.name.removeprefix("node")), folder) for folder in folders)


def numbers_in(text: str) -> frozenset[int]:
    """Numbers that a list such as ``0-3,8`` names."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for first, _, last in ranges for n in range(int(first), int(last or first) + 1))


def cpuinfo() -> dict[str, str]:
    """The kernel's facts on the first processor, by their names."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def text_of(file: Path) -> str:
    """The text in a file of sysfs; empty if there is no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
