"""Published systems as data: their hardware, what their schedules move for each parameter, and what they measured."""

from __future__ import annotations

from dataclasses import dataclass

from offload.predict.gpus import GPUS
from offload.report.report import Bandwidths

GB = 1e9


@dataclass(frozen=True)
class Part:
    """A phase of a step: bytes a parameter read from and written to the slow tier, bytes of traffic in host memory,
    FLOP a parameter and token. ``overlapped``: all of it at once, else one after the other."""

    name: str
    read: float = 0.0
    written: float = 0.0
    memory: float = 0.0
    flops: float = 0.0
    overlapped: bool = True


@dataclass(frozen=True)
class System:
    """``disk`` and ``memory_rate`` are a node's; ``flops`` that of all its GPUs as it is assumed to be achieved."""

    name: str
    parts: tuple[Part, ...]
    disk: Bandwidths
    flops: float
    memory_rate: float = 200 * GB

    def seconds(self, parameters: float, tokens: int) -> float:
        return sum(self._part_seconds(part, parameters, tokens) for part in self.parts)

    def _part_seconds(self, part: Part, parameters: float, tokens: int) -> float:
        """The least that it takes: of each part of a machine at once, or of one after the other."""
        loads = {
            "slow tier": self.disk.seconds(int(part.read * parameters), int(part.written * parameters)),
            "host memory": part.memory * parameters / self.memory_rate,
            "compute": part.flops * parameters * tokens / self.flops,
        }
        return max(loads.values()) if part.overlapped else sum(loads.values())


@dataclass(frozen=True)
class Row:
    """One published step. ``deviation`` of the replay from it is what docs/plan.md says."""

    system: System
    parameters: float
    tokens: int
    measured: float
    deviation: float

    @property
    def replayed(self) -> float:
        return self.system.seconds(self.parameters, self.tokens)


_H100S = 4 * GPUS["h100"].reach.share * GPUS["h100"].peak_flops

ZERO_INFINITY = System(
    "ZeRO-Infinity, 4 x H100",
    (
        Part("forward", flops=2),
        Part("backward, fp32 gradients written", written=4, flops=6),
        Part("update: states and gradients read, states written", read=16, written=12, memory=28),
    ),
    Bandwidths(6.9 * GB, 5.3 * GB, 1.0),
    _H100S,
)
"""As the authors of MLP-Offload ran it: arXiv:2509.02480, table 1 for the drive, the artifact's logs for seconds."""

MLP_OFFLOAD = System(
    "MLP-Offload, 4 x H100",
    (
        Part("forward and backward, gradients stay in memory", flops=8),
        Part("update over two paths", read=12, written=12, memory=28),
    ),
    Bandwidths(10.5 * GB, 8.9 * GB, 1.0),
    _H100S,
)
"""The same machine with a parallel file system beside the drive."""

CPU_ADAM = System(
    "ZeRO-Offload's CPU Adam, DGX-2",
    (Part("update in host memory", memory=30),),
    Bandwidths(1 * GB, 1 * GB, 1.0),
    1e15,
    0.8 * 256 * GB,
)
"""arXiv:2101.06840, two Xeon 8168 with six channels of DDR4-2666 each."""

DEEPSPEED_HERE = System(
    "DeepSpeed 0.19 ZeRO-3, two cores",
    (
        Part("forward and backward", flops=6),
        Part("parameters, gradients and states over the disk", read=18, written=18),
    ),
    Bandwidths(2.801 * GB, 5.654 * GB, 1.0),
    6 * 110e6 * 128 / 0.58,
)
"""110 million parameters, batch 1 of 128 tokens, bf16; the compute of the same step in memory took 0.58 s."""

ROWS = (
    Row(ZERO_INFINITY, 40e9, 8192, 242, -0.11),
    Row(ZERO_INFINITY, 52e9, 8192, 239, +0.17),
    Row(ZERO_INFINITY, 70e9, 8192, 371, +0.01),
    Row(ZERO_INFINITY, 100e9, 8192, 572, -0.06),
    Row(ZERO_INFINITY, 120e9, 8192, 550, +0.17),
    Row(MLP_OFFLOAD, 40e9, 8192, 102, -0.01),
    Row(MLP_OFFLOAD, 52e9, 8192, 92, +0.42),
    Row(MLP_OFFLOAD, 70e9, 8192, 151, +0.17),
    Row(MLP_OFFLOAD, 100e9, 8192, 276, -0.09),
    Row(MLP_OFFLOAD, 120e9, 8192, 288, +0.05),
    Row(CPU_ADAM, 1e9, 1, 0.22, -0.33),
    Row(CPU_ADAM, 10e9, 1, 2.6, -0.44),
    Row(DEEPSPEED_HERE, 110e6, 128, 2.37, -0.31),
)
