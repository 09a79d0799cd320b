"""Steps on machines that users have, played: the table of ``docs/plan.md`` under "The bound of the schedule"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload.predict.machine import described, parse_drive
from offload.predict.model import from_count
from offload.predict.prediction import Prediction, predict
from offload.predict.workload import Workload

_GIB = 1 << 30
_DRIVE = parse_drive("7GB/s,5GB/s,4TB")
_BATCHES = (1, 1), (4, 1), (1, 8)
"""Sequences, and micro-batches."""


@dataclass(frozen=True)
class Host:
    """A host with its GPU: cores, bytes a second of its memory."""

    name: str
    gpu: str
    cores: int
    memory_bandwidth: float


HOSTS = (
    Host("RTX 4090, 16 cores, 80 GB/s, PCIe 4", "rtx4090", 16, 80e9),
    Host("H100, 64 cores, 300 GB/s, PCIe 5", "h100", 64, 300e9),
)
MEMORY = {7: {0: 2048, 1: 32, 2: 32}, 70: {0: 2048, 1: 512, 2: 512}}
"""GiB of host memory by billions of parameters and number of drives: all of the model in RAM, or a part on NVMe."""


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield (
        "| parameters | host | drives | batch | s a step, never clipped | of the busiest part | of the bound | "
        "s, always clipped | of the busiest part | of the bound |"
    )
    yield "|" + "---|" * 10
    for billions, memory in MEMORY.items():
        for host in HOSTS:
            for drives, gib in memory.items():
                for batch, micro_batches in _BATCHES:
                    yield _row(billions, host, drives, gib, batch, micro_batches)


def _row(billions: int, host: Host, drives: int, gib: int, batch: int, micro_batches: int) -> str:
    machine = described(
        host.gpu, host_bytes=gib * _GIB, cores=host.cores, memory_bandwidth=host.memory_bandwidth,
        drives=[_DRIVE] * drives,
    )  # fmt: skip
    model, cells = from_count(billions * 10**9), []
    for clipped in (False, True):
        workload = Workload(batch=batch, micro_batches=micro_batches, clipped=clipped, activations="recompute")
        cells.append(_cells(predict(model, machine, workload)))
    where = f"{drives}, {gib} GiB of RAM" if drives else "none, all in RAM"
    size = f"{batch} x {micro_batches}" if micro_batches > 1 else str(batch)
    return f"| {billions}B | {host.name} | {where} | {size} | {' | '.join(cells)} |"


def _cells(found: Prediction) -> str:
    if not found.fits:
        return "does not fit | | "
    shares = (seconds / found.seconds for seconds in (found.bound_seconds, least_seconds(found)))
    return " | ".join([f"{found.seconds:.3g}, {found.limit}", *(f"{share:.2f}" for share in shares)])


def least_seconds(found: Prediction) -> float:
    """What its busiest part takes, or its order."""
    return max(found.bound_seconds, found.schedule_seconds)
