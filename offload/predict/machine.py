"""The machine of a forecast: what it can hold, and what each of its links and processors can do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload import option_values
from offload.predict import rates
from offload.predict.gpus import Gpu, find_gpu
from offload.predict.network import ALONE, Network
from offload.report.report import Bandwidths

LINK_SHARE = 0.8
"""Of the rate that a PCIe or NVLink data sheet names, copies of pinned memory are assumed to reach this much."""

SERVER_MEMORY, DESKTOP_MEMORY = 200e9, 70e9
"""Host memory bandwidth of a described node that updates are assumed to get, bytes a second. A desktop has two channels
of DDR5-5600, 89.6 GB/s by JEDEC's JESD79-5, of which streams reach about 80 %."""

CORE_UPDATE = 30e9
"""Of that, what one core sweeps through in the optimizer's kernel, bytes a second: 26 bytes a parameter (bf16, Adam) in
0.85 ns, the slower of the two states in which ``docs/kernels.md`` has measured it."""

CORE_BESIDE = 10e9
"""The same where the new numbers go beside the old ones: 26 bytes a parameter in 2.6 ns, as ``docs/kernels.md`` has
measured it. Where memory is the limit it takes no longer than in place: as many bytes pass."""
CORE_PRODUCTS = 100e9
"""FLOP/s of one core in products of matrices, which updates of whole matrices take; here one reaches 130e9 in fp32."""

UNKNOWN_CAPACITY = 1 << 50
"""Bytes of a drive of which only the rate was given."""

NETWORK = 50e9
"""Rate at which a described node is assumed to send and receive over the network at once, bytes a second: 400 Gb/s."""

HOP = 25e-6
"""Seconds that a small message between two ranks is assumed to take, and its turn in a ring of all of them."""

CONTEXT_BYTES = 2 << 30
"""Device memory that libraries and the allocator's gaps are assumed to take."""


@dataclass(frozen=True)
class Cores:
    """Rates of compute: FLOP/s that a step reaches in blocks, and in the head with its loss.

    ``count`` are the cores of a CPU that a rank has, a part of one where ranks share it, and ``busy`` what of them a
    step's compute keeps busy. ``gradients`` is the traffic of putting a backward's gradients where they are stored,
    bytes a second. ``lost`` is the share of the cores' work that is lost where compute and updates want twice as much
    as there is. These are for a CPU.
    """

    blocks: float
    head: float
    busy: float = 1.0
    count: float = 1.0
    gradients: float = math.inf
    lost: float = 0.0


@dataclass(frozen=True)
class DeviceMachine:
    """A GPU and its link, as they are assumed to do in practice. Bytes a second each way."""

    name: str
    memory_bytes: int
    link: float
    computes: bool = True
    """It does, not the CPU."""


CPU = DeviceMachine("cpu", 0, math.inf, computes=False)
"""In place of a device where the CPU computes: weights are there already."""


@dataclass(frozen=True)
class Machine:
    """One rank's part of a machine: host memory, drives and memory bandwidth of a node are divided among its ranks.

    Where the CPU computes, updates and checksums take its cores. ``update`` is the memory
    traffic of the optimizer's kernel, ``beside`` that of updates before the verdict of units in host memory,
    ``memory`` that of updates and of a device's link together, and ``checksum`` what a core checks of the bytes that
    pass NVMe, bytes a second.
    ``unit_seconds`` and ``record_seconds`` are what the engine itself takes of a core in a step, for each unit and for
    each record on NVMe. ``network`` joins the ranks.
    """

    host_bytes: int
    nvme_bytes: int
    nvme: Bandwidths | None
    cores: Cores
    update: float
    checksum: float
    unit_seconds: float
    record_seconds: float
    device: DeviceMachine = CPU
    network: Network = ALONE
    beside: float = math.inf
    memory: float = math.inf
    update_cores: float = 1.0
    """Cores of the CPU that updates get where a device computes."""
    beside_bytes: float = math.inf
    """Host memory beside the engine's, where the CPU computes: for activations."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about what was not measured or given, in words."""

    @property
    def products(self) -> float:
        """FLOP/s that products of matrices in updates get of the CPU."""
        return CORE_PRODUCTS * self.update_cores if self.device.computes else self.cores.blocks

    @property
    def num_ranks(self) -> int:
        return self.network.num_ranks

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.network.ranks_a_node


@dataclass(frozen=True)
class Drive:
    """An SSD: bytes a second, and bytes."""

    read: float
    write: float
    nbytes: int


def parse_drive(text: str) -> Drive:
    """``7GB/s,5GB/s,3.8TB``: read, write, capacity; or one rate for both, and what is left out is not known. Raises
    ``ConfigError``."""
    parts = [part.strip() for part in text.split(",")]
    nbytes = UNKNOWN_CAPACITY if parts[-1].endswith("/s") else rates.nbytes("--nvme", parts.pop())
    if not 1 <= len(parts) <= 2:
        option_values.refuse("--nvme", 'read, write and capacity such as "7GB/s,5GB/s,3.8TB", or one rate', text)
    read, write = (rates.bytes_per_second("--nvme", part) for part in (parts[0], parts[-1]))
    return Drive(read, write, nbytes)


def described(
    gpu: str,
    *,
    host_bytes: int,
    gpus: int = 1,
    nodes: int = 1,
    drives: Sequence[Drive] = (),
    compute: float | None = None,
    memory_bandwidth: float | None = None,
    cores: float | None = None,
    network: float = NETWORK,
    sustained_write: float | None = None,
    added_inside: bool = False,
) -> Machine:
    """One rank of a described machine; ``host_bytes``, ``drives``, ``memory_bandwidth``, ``cores`` of the CPU (None: as
    many as use the bandwidth) and ``network`` are a node's,
    ``compute`` is what a GPU achieves in FLOP/s; ``sustained_write`` what each drive still writes when its fast cache
    is full; ``added_inside`` is that of ``Network``. Raises ``ConfigError`` for a GPU that is not in the table."""
    found = find_gpu(gpu)
    memory_bytes = found.memory_bytes - (host_bytes // gpus if found.unified else 0)
    device = DeviceMachine(found.name, max(memory_bytes, 0), LINK_SHARE * found.link)
    assumptions = [f"{found.name}: {found.source}"]
    if found.unified:
        assumptions.append(f"GPU and host share {found.memory_bytes / 1e9:,.0f} GB: what one has the other lacks")
    if compute is None:
        compute, reach = found.reach.share * found.peak_flops, found.reach
        assumptions.append(
            f"compute reaches {reach.share:.0%} of the dense peak ({reach.source}): {compute / 1e12:,.0f} TFLOPS a GPU "
            "(--compute)"
        )
    assumptions.append(
        f"links reach {LINK_SHARE:.0%} of what is named: {'memory' if found.unified else 'PCIe'} "
        f"{device.link / 1e9:,.0f} GB/s each way"
    )
    joined = ALONE
    if gpus * nodes > 1:
        joined = _network(found, gpus, nodes, network, added_inside)
        assumptions.append(_of_ranks(found, joined))
    if memory_bandwidth is None:
        memory_bandwidth = DESKTOP_MEMORY if found.desktop and gpus == 1 else SERVER_MEMORY
    update, updating, assumption = _of_updates(memory_bandwidth, cores, gpus)
    assumptions.append(assumption)
    if drives:
        assumptions += _of_drives(drives, sustained_write)
    if sustained_write is not None:
        drives = [replace(drive, write=min(drive.write, sustained_write)) for drive in drives]
    return Machine(
        host_bytes=host_bytes // gpus,
        nvme_bytes=sum(drive.nbytes for drive in drives) // gpus,
        nvme=nvme_of(drives, gpus),
        cores=Cores(compute, compute),
        update=update / gpus,
        beside=min(memory_bandwidth, updating * CORE_BESIDE) / gpus,
        memory=memory_bandwidth / gpus,
        update_cores=updating / gpus,
        checksum=25e9,
        unit_seconds=1e-4,
        record_seconds=1e-3,
        device=device,
        network=joined,
        assumptions=tuple(assumptions),
    )


def _of_updates(memory_bandwidth: float, cores: float | None, gpus: int) -> tuple[float, float, str]:
    """Bytes a second and cores that updates on a node's CPU get, and the assumption in words."""
    enough = math.ceil(memory_bandwidth / CORE_UPDATE)
    updating = enough if cores is None else max(cores - gpus, 1)  # of each GPU one core sees to it
    update = min(memory_bandwidth, updating * CORE_UPDATE)
    return (
        update,
        updating,
        (
            f"updates on the CPU get {update / 1e9:,.0f} of {memory_bandwidth / 1e9:,.0f} GB/s of a node's memory "
            f"bandwidth, which takes {enough} cores beside one for each GPU, and share it with what crosses the link "
            "(--memory-bandwidth, --cores)"
        ),
    )


def _of_drives(drives: Sequence[Drive], sustained_write: float | None) -> Iterator[str]:
    yield "reads and writes of a drive add up"
    if sustained_write is None:
        yield (
            "drives write as fast for long as they are named: those for desktops fall to a third or less when their "
            "fast cache, tens to hundreds of GB, is full (--sustained-write)"
        )
    else:
        yield f"each drive writes {sustained_write / 1e9:,.1f} GB/s in the long run, as given"
    if any(drive.nbytes == UNKNOWN_CAPACITY for drive in drives):
        yield "a drive without a capacity has room for all"


def _network(gpu: Gpu, gpus: int, nodes: int, between: float, added_inside: bool) -> Network:
    peers = LINK_SHARE * (gpu.peers or gpu.link)
    return Network(gpus * nodes, gpus, peers, peers, between, (gpus * nodes - 1) * HOP, added_inside=added_inside)


def _of_ranks(gpu: Gpu, network: Network) -> str:
    inside = f"{'NVLink' if gpu.peers else 'PCIe'} {network.gather / 1e9:,.0f} GB/s inside a node"
    between = (
        f", {network.between / 1e9:,.0f} GB/s a node between nodes" if network.num_ranks > network.ranks_a_node else ""
    )
    sums = "added up inside of a node before they leave it" if network.added_inside else "sent to their rank directly"
    return (
        f"ranks are joined by {inside}{between}; they agree on a collective in {1000 * network.wait_seconds:.3g} ms; "
        f"gradients are {sums}. GPUs gather in their own memory: this is a forecast, several GPUs were never tried"
    )


def nvme_of(drives: Sequence[Drive], ranks: int) -> Bandwidths | None:
    """Rates that a rank gets of all drives of its node, whose reads and writes add up."""
    if not drives:
        return None
    return Bandwidths(sum(drive.read for drive in drives) / ranks, sum(drive.write for drive in drives) / ranks, 1.0)


def with_second_drive(machine: Machine) -> Machine:
    """The machine with twice the drives."""
    assert machine.nvme is not None
    twice = Bandwidths(2 * machine.nvme.read, 2 * machine.nvme.write, machine.nvme.q)
    return replace(machine, nvme=twice, nvme_bytes=2 * machine.nvme_bytes)
