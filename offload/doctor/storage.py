"""The storage under one path: whether a store can be there, what is below it, and how fast it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.filesize import decimal

from aio_ext import Memory, Queue, direct_io_alignment
from aio_ext.measure import Range
from aio_ext.profile import IoProfile, file_system, load_profile, missing_profile
from offload.doctor.drive import Drive, drives_under
from offload.doctor.finding import Finding, better, broken, good
from offload.doctor.pci import link_of
from offload.ranks.topology import nearest_node
from swapper import PAGE_BYTES, StorageFull, StoreUnsafe
from swapper.files import open_directory, open_nameless
from swapper.paths import Medium, look_at

_SYS = Path("/sys")
_MIB = 1 << 20
_LEAST_FREE_BYTES = 256 * _MIB
"""The least that a store of use takes."""
_FULL = 0.95
_FILE_BYTES = 64 * _MIB
_SECONDS = 0.2
"""Time for which each direction is measured."""
_MEMORY_BYTES = 16 * _MIB
_SLOW_BYTES_PER_S = 1e9
_OF_PROFILE = 0.5
"""Share of the measured bandwidth that is left where something is wrong, and not only busy for a moment."""


def checks_of(path: Path) -> Sequence[Callable[[Path], Iterator[Finding]]]:
    """Checks that can be made on a path: nothing but what is wrong with it, or all."""
    if not path.is_dir():
        return (directory,)
    try:
        found = look_at(path)
    except (StoreUnsafe, StorageFull):
        return (directory, drive, free_space)
    if found.medium is Medium.MEMORY:
        return (directory, free_space, direct_io)
    return (directory, drive, pcie, free_space, direct_io, bandwidth)


def directory(path: Path) -> Iterator[Finding]:
    """Verdict of the engine itself."""
    try:
        found = look_at(path)
    except (StoreUnsafe, StorageFull) as error:
        yield broken("directory", " ".join(str(error.args[0]).split()), error.advice)
        return
    if found.medium is Medium.MEMORY:
        says = f"{found.file_system}: what is stored there takes memory, and host_memory does not count it"
        yield better("directory", says, "nvme_path on a local SSD")
    elif found.file_system.endswith(("overlay", "overlayfs")):
        says = f"{found.file_system}, the layers of a container: the first write to a file may copy it"
        yield better("directory", says, "mount a directory of the host: docker run -v /mnt/nvme:/nvme")
    else:
        yield good("directory", f"{found.file_system}, on {found.medium.value}, can be written")


def drive(path: Path) -> Iterator[Finding]:
    drives = drives_under(path)
    if not drives:
        yield good("drive", f"{file_system(path)} does not say what is behind it")
    for each in drives:
        yield _drive(each)
        if each.scheduler not in ("", "none") and each.medium == "solid state":
            repair = f"echo none | sudo tee /sys/block/{each.name}/queue/scheduler"
            yield better("I/O scheduler", f"{each.name}: {each.scheduler} stands between queue and drive", repair)


def _drive(each: Drive) -> Finding:
    says = f"{each.name}: {each.model}, {decimal(each.nbytes)}, {each.medium}"
    says += f", through {', '.join(each.through)}" if each.through else ""
    if any(layer.startswith(("the file", "compressed")) for layer in each.through):
        return better("drive", says, "nvme_path on the file system of a drive")
    if each.medium == "rotating":
        return better("drive", f"{says}: every step waits for its head", "nvme_path on a local SSD")
    for layer in each.through:
        kind, _, name = layer.partition(" ")
        if kind == "LUKS":
            repair = f"cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {name}"
            return better("drive", f"{says}: the CPU encrypts all bytes", f"{repair}; or a partition without")
    return good("drive", says)


def pcie(path: Path) -> Iterator[Finding]:
    """The link of each drive, and the memory that is nearest to it."""
    for each in drives_under(path):
        link = link_of(each.folder)
        if link is not None and (link.speed < link.speed_max or link.width < link.width_max):
            says = f"{each.name}: {link} of {link.speed_max:g} GT/s x{link.width_max}"
            yield better("PCIe link", says, "another slot, or its setting in the BIOS")
        elif link is not None:
            yield good("PCIe link", f"{each.name}: {link}")
        node = nearest_node(each.folder)
        if node is not None and (_SYS / "devices/system/node/node1").exists():
            keep = f"numactl --cpunodebind={node} --membind={node} keeps to it"
            yield good("NUMA node", f"{each.name} is at node {node}: {keep}")


def free_space(path: Path) -> Iterator[Finding]:
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    says = f"{decimal(free)} of {decimal(total)} free"
    repair = f"free some: du -xh --max-depth=2 {shlex.quote(str(path))} | sort -h | tail"
    if status.f_files and status.f_favail == 0:
        yield broken("free space", "no more files can be made: all inodes are taken", repair)
    elif free < _LEAST_FREE_BYTES:
        yield broken("free space", f"{says}, too little for a store", repair)
    elif free < total * (1 - _FULL):
        yield better("free space", f"{says}: a drive that is nearly full writes slowly", repair)
    else:
        yield good("free space", says)


def direct_io(path: Path) -> Iterator[Finding]:
    """Find whether bytes go past the page cache, and the granularity."""
    with _nameless(path) as descriptor:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        of_memory, of_offset = direct_io_alignment(descriptor)
    if not direct:
        says = "no O_DIRECT: bytes go through the page cache, which takes memory and time"
        yield better("direct I/O", says, "nvme_path on ext4 or xfs")
    elif max(of_memory, of_offset) > PAGE_BYTES:
        says = f"O_DIRECT needs {max(of_memory, of_offset):,} bytes of alignment, the store has {PAGE_BYTES:,}"
        yield broken("direct I/O", says, "nvme_path on ext4 or xfs with blocks of 4096 bytes")
    else:
        yield good("direct I/O", f"O_DIRECT; aligned to {of_memory:,} bytes in memory and {of_offset:,} in the file")


def bandwidth(path: Path) -> Iterator[Finding]:
    """A second of reads and writes, against what was measured before."""
    if shutil.disk_usage(path).free < _LEAST_FREE_BYTES:
        return
    profile = load_profile(path)
    read, write = _rates(path, profile)
    says = f"{_rate(read)} read, {_rate(write)} written"
    if profile is None:
        missing = missing_profile(path).partition("; ")[0]
        yield better("bandwidth", f"{says} in a quick look; {missing}", f"offload bench {shlex.quote(str(path))}")
        return
    says += f"; its profile says {_rate(profile.read_bytes_per_s)} and {_rate(profile.write_bytes_per_s)}"
    if min(read / profile.read_bytes_per_s, write / profile.write_bytes_per_s) < _OF_PROFILE:
        repair = "see what else uses the drive (iostat -x 1), its temperature and its wear (smartctl -a)"
        yield better("bandwidth", says, repair)
    elif read < _SLOW_BYTES_PER_S:
        yield better("bandwidth", f"{says}: less than an NVMe drive has", "nvme_path on an NVMe drive")
    else:
        yield good("bandwidth", says)


def _rate(bytes_per_s: float) -> str:
    return f"{decimal(int(bytes_per_s))}/s"


def _rates(path: Path, profile: IoProfile | None) -> tuple[float, float]:
    """Bytes a second, read and written, of a file without a name, with the settings that the engine would take."""
    backend, depth, block_bytes = "auto", 16, _MIB
    if profile is not None:
        backend, depth, block_bytes = profile.backend, profile.queue_depth, profile.block_bytes
    with _nameless(path) as descriptor, Memory(_MEMORY_BYTES) as memory:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        memory.populate()
        with Queue(backend, depth, block_bytes) as queue:
            range_ = Range(queue, queue.register_file(descriptor), _FILE_BYTES, memory, depth, block_bytes)
            first = range_.measure("write", _FILE_BYTES).bytes_per_s  # it allocates, and does not count
            nbytes = max(_FILE_BYTES // 2, int(first * _SECONDS))
            write = range_.measure("write", nbytes).bytes_per_s
            return range_.measure("read", nbytes).bytes_per_s, write


@contextlib.contextmanager
def _nameless(path: Path) -> Iterator[int]:
    """A file as the store makes its own."""
    folder = open_directory(path)
    try:
        descriptor = open_nameless(path, folder)
    finally:
        os.close(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
