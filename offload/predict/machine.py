"""The machine of a forecast: what it can hold, and what each of its links and processors can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload import option_values
from offload.predict import rates
from offload.predict.network import ALONE, Network
from offload.report.report import Bandwidths

COMPUTE_SHARE = 0.45
"""Of a GPU's dense peak a training step is assumed to reach this much, unless the compute rate is given."""

LINK_SHARE = 0.8
"""Of the rate that a PCIe or NVLink data sheet names, copies of pinned memory are assumed to reach this much."""

MEMORY_BANDWIDTH = 200e9
"""Host memory bandwidth of a described node that updates are assumed to get, bytes a second."""

NETWORK = 50e9
"""Rate at which a described node is assumed to send and receive over the network at once, bytes a second: 400 Gb/s."""

HOP = 25e-6
"""Seconds that a small message between two ranks is assumed to take, and its turn in a ring of all of them."""

CONTEXT_BYTES = 2 << 30
"""Device memory that libraries and the allocator's gaps are assumed to take."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it: bytes, dense bf16 FLOP/s with fp32 sums, bytes a second each way.

    ``peers`` is the rate of NVLink, each way; None: GPUs talk over ``link``.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    link: float
    peers: float | None
    source: str


_GB = 10**9
_GEN3, _GEN4, _GEN5 = 15.8e9, 31.5e9, 63.0e9  # PCI-SIG, 16 lanes, after encoding

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100", 32 * _GB, 125e12, _GEN3, 150e9, "NVIDIA V100 data sheet, SXM2 32 GB (fp16: it has no bf16)"),
        Gpu("a100", 80 * _GB, 312e12, _GEN4, 300e9, "NVIDIA A100 data sheet, SXM4 80 GB"),
        Gpu("a100-40", 40 * _GB, 312e12, _GEN4, 300e9, "NVIDIA A100 data sheet, SXM4 40 GB"),
        Gpu("h100", 80 * _GB, 989e12, _GEN5, 450e9, "NVIDIA H100 data sheet, SXM5, without sparsity"),
        Gpu("h100-pcie", 80 * _GB, 756e12, _GEN5, None, "NVIDIA H100 data sheet, PCIe, without sparsity"),
        Gpu("h200", 141 * _GB, 989e12, _GEN5, 450e9, "NVIDIA H200 data sheet, SXM, without sparsity"),
        Gpu("b200", 180 * _GB, 2250e12, _GEN5, 900e9, "NVIDIA HGX B200 data sheet, without sparsity"),
        Gpu("l40s", 48 * _GB, 362e12, _GEN4, None, "NVIDIA L40S data sheet, without sparsity"),
        Gpu("rtx3090", 24 * _GB, 71e12, _GEN4, None, "NVIDIA GA102 white paper, fp32 sums, without sparsity"),
        Gpu("rtx4090", 24 * _GB, 165e12, _GEN4, None, "NVIDIA Ada white paper, fp32 sums, without sparsity"),
    )
}
"""By the names that ``--gpu`` takes."""


@dataclass(frozen=True)
class Cores:
    """Rates of compute: FLOP/s that a step reaches in blocks, and in the head with its loss.

    ``count`` are the cores of a CPU that a rank has, a part of one where ranks share it, and ``busy`` what of them a
    step's compute keeps busy. Both are for a CPU.
    """

    blocks: float
    head: float
    busy: float = 1.0
    count: float = 1.0


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
    traffic of the optimizer's kernel and ``checksum`` what a core checks of the bytes that pass NVMe, bytes a second.
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
    assumptions: tuple[str, ...] = ()
    """Assumptions about what was not measured or given, in words."""

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
    """``7GB/s,5GB/s,3.8TB``: read, write, capacity. Raises ``ConfigError``."""
    parts = text.split(",")
    if len(parts) != 3:
        option_values.refuse("--nvme", 'read, write and capacity such as "7GB/s,5GB/s,3.8TB"', text)
    read, write = (rates.bytes_per_second("--nvme", part) for part in parts[:2])
    return Drive(read, write, rates.nbytes("--nvme", parts[2]))


def described(
    gpu: str,
    *,
    host_bytes: int,
    gpus: int = 1,
    nodes: int = 1,
    drives: Sequence[Drive] = (),
    compute: float | None = None,
    memory_bandwidth: float = MEMORY_BANDWIDTH,
    network: float = NETWORK,
    added_inside: bool = False,
) -> Machine:
    """One rank of a described machine; ``host_bytes``, ``drives``, ``memory_bandwidth`` and ``network`` are a node's,
    ``compute`` is what a GPU achieves in FLOP/s; ``added_inside`` is that of ``Network``. Raises ``ConfigError`` for
    a GPU that is not in the table."""
    if gpu not in GPUS:
        option_values.refuse("--gpu", option_values.one_of(tuple(GPUS)), gpu)
    found = GPUS[gpu]
    device = DeviceMachine(gpu, found.memory_bytes, LINK_SHARE * found.link)
    assumptions = [f"{gpu}: {found.source}"]
    if compute is None:
        compute = COMPUTE_SHARE * found.peak_flops
        assumptions.append(
            f"compute reaches {COMPUTE_SHARE:.0%} of the dense peak: {compute / 1e12:,.0f} TFLOPS a GPU (--compute)"
        )
    assumptions.append(f"links reach {LINK_SHARE:.0%} of what is named: PCIe {device.link / 1e9:,.0f} GB/s each way")
    joined = ALONE
    if gpus * nodes > 1:
        joined = _network(found, gpus, nodes, network, added_inside)
        assumptions.append(_of_ranks(found, joined))
    assumptions.append(f"updates on the CPU get {memory_bandwidth / 1e9:,.0f} GB/s of a node's memory bandwidth")
    if drives:
        assumptions.append("reads and writes of a drive add up; drives are as fast for long as they are named")
    return Machine(
        host_bytes=host_bytes // gpus,
        nvme_bytes=sum(drive.nbytes for drive in drives) // gpus,
        nvme=nvme_of(drives, gpus),
        cores=Cores(compute, compute),
        update=memory_bandwidth / gpus,
        checksum=25e9,
        unit_seconds=1e-4,
        record_seconds=1e-3,
        device=device,
        network=joined,
        assumptions=tuple(assumptions),
    )


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
