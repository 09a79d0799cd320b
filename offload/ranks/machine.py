"""A machine that several ranks share: each has its part of the cores, the drives and their queues.

[Note: Every rank works out the same] Which drives a rank has follows from the order of the paths, from where the drives
are, and from where all local ranks are. So ranks exchange where they are (``bind`` tells each), and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.config import OffloadConfig
from offload.ranks.topology import (
    SYS,
    disks_under,
    node_distances,
    node_of_device,
    node_of_path,
    numa_nodes,
    pci_address,
)

_log = logging.getLogger("offload")

_DEPTH_MIN = 2
"""Blocks in flight that a rank has at least: the drive has one to do while the rank sees to the other."""


@dataclass(frozen=True)
class Share:
    """Share of one rank in its machine."""

    config: OffloadConfig
    """The options, with this rank's drives alone. The budgets in it stay those of the machine: whoever plans divides
    them by the number of local ranks, those that are given and those that are measured."""
    sharers: int
    """Ranks on this rank's drives, itself included. They divide free space, bandwidth and queue of these drives."""


def bind(local_rank: int, num_local: int, device: torch.device | None = None, sys: Path = SYS) -> int | None:
    """Keep the threads of this process, and those they start, on the cores of one NUMA node: its GPU's, else local
    ranks are spread evenly. Memory follows: the kernel takes a page from the node whose core touches it first.

    Does nothing on a machine of one node, with fewer ranks than nodes (the cores of a node would idle), and where a
    user or a launcher has narrowed the affinity before. Returns the node that the rank is at, whoever put it there, or
    that of its GPU; None if there is none.
    """
    nodes = numa_nodes(sys)
    if len(nodes) < 2:
        return None
    allowed = os.sched_getaffinity(0)
    if allowed < frozenset().union(*nodes.values()):
        node = next((node for node, cpus in nodes.items() if allowed <= cpus), None)
        _log.info("local rank %d: its %d CPUs were chosen before, and stay", local_rank, len(allowed))
        return node
    node = _node_of_gpu(device, sys)
    if num_local < len(nodes):
        return node
    if node not in nodes:
        node = sorted(nodes)[local_rank * len(nodes) // num_local]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), nodes[node])
    _log.info("local rank %d: bound to the %d CPUs of NUMA node %d", local_rank, len(nodes[node]), node)
    return node


def share(config: OffloadConfig, local_rank: int, nodes: Sequence[int | None], sys: Path = SYS) -> Share:
    """Return the rank's share of its machine. ``nodes``: what ``bind`` returned on each local rank, in order.

    Of several drives under ``nvme_path`` each rank has those that are nearest to it, as many as the others or one more;
    with more ranks than drives each rank has one. Two paths on one drive go together. Raises ``OSError`` for a path
    that is not there.
    """
    drives = _drives(config.paths, sys)
    drives_of = assign(nodes, [node_of_path(paths[0], sys) for paths in drives], node_distances(sys))
    own = drives_of[local_rank]
    paths = tuple(path for drive in own for path in drives[drive])
    sharers = max((sum(drive in others for others in drives_of) for drive in own), default=1)
    return Share(dataclasses.replace(config, nvme_path=paths), sharers)


def assign(
    ranks: Sequence[int | None], drives: Sequence[int | None], distances: Mapping[tuple[int, int], int]
) -> list[list[int]]:
    """The drives (indices) of each rank, given the NUMA node of each rank and drive; None is unknown.

    With at least as many ranks as drives, each rank has one drive, and no drive serves two ranks more than another.
    With more drives than ranks, each drive serves one rank, and no rank has two drives more than another. Within that
    as many as can be are at the node of their partner. Where nothing is known it goes round robin.
    """

    def distance(rank: int | None, drive: int | None) -> float:
        return math.inf if rank is None or drive is None else distances.get((rank, drive), math.inf)

    if not drives:
        return [[] for _ in ranks]
    if len(ranks) >= len(drives):
        return [[drive] for drive in _spread([[distance(rank, drive) for drive in drives] for rank in ranks])]
    rank_of = _spread([[distance(rank, drive) for rank in ranks] for drive in drives])
    return [[drive for drive, of in enumerate(rank_of) if of == rank] for rank in range(len(ranks))]


def queue_share(depth: int, sharers: int) -> int:
    """Blocks that one of several ranks on a drive may have in flight, so that all of them together have no more than
    one process would, as far as each has two."""
    return max(min(depth, _DEPTH_MIN), depth // sharers)


def _spread(distances: Sequence[Sequence[float]]) -> list[int]:
    """For each row (there are at least as many as columns) a column, all columns equally often, or once more.

    The nearest are brought together first, and of equally near columns a row gets the one that has the fewest. So it is
    only for the sake of balance that a row goes to a farther one.
    """
    columns = range(len(distances[0]))
    least, num_more = divmod(len(distances), len(columns))
    loads = [0 for _ in columns]
    chosen: dict[int, int] = {}
    for distance in sorted({each for row in distances for each in row}):
        for index, row in enumerate(distances):
            full = least + (sum(load > least for load in loads) < num_more)
            near = [column for column in columns if row[column] == distance and loads[column] < full]
            if index not in chosen and near:
                chosen[index] = min(near, key=loads.__getitem__)
                loads[chosen[index]] += 1
    return [chosen[index] for index in range(len(distances))]


def _node_of_gpu(device: torch.device | None, sys: Path) -> int | None:
    if device is None or device.type != "cuda":
        return None
    address = pci_address(torch.cuda.get_device_properties(device))
    return None if address is None else node_of_device(address, sys)


def _drives(paths: Sequence[Path], sys: Path) -> list[list[Path]]:
    """The paths by drive, as far as the file systems tell: directories on partitions of one drive go together."""
    drives: dict[object, list[Path]] = {}
    for path in paths:
        disks = tuple(disk for disk, _ in disks_under(path, sys))
        drives.setdefault(disks or path.stat().st_dev, []).append(path)
    return list(drives.values())
