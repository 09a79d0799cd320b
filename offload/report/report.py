"""The report of a step: seconds, bytes, stalls, and how close it came to its bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MIB = 1 << 20

_LIMITS = {
    "compute": "compute alone takes",
    "nvme": "NVMe alone takes",
    "to_device": "copying to the device alone takes",
    "to_host": "copying to the host alone takes",
    "memory": "host memory, which updates and copies share, alone takes",
    "schedule": "forward and then backward, each with its own transfers, take",
}
"""Limits of a step, in words."""


@dataclass(frozen=True)
class Bandwidths:
    """Measured rates of the store, bytes per second; ``q`` bends the mixed envelope (1: reads and writes add up)."""

    read: float
    write: float
    q: float
    stored: bool = False
    """From the I/O profile of the paths; else they were measured when the engine was made."""

    def __str__(self) -> str:
        source = "by its profile" if self.stored else "measured at the start"
        return f"reads {self.read / 1e9:,.2f} GB/s and writes {self.write / 1e9:,.2f} GB/s, {source}"

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Least time for reading and writing this much: ``((R/Br)^q + (W/Bw)^q)^(1/q)``."""
        reading, writing = read_bytes / self.read, write_bytes / self.write
        if reading == 0 or writing == 0:
            return reading + writing
        return float((reading**self.q + writing**self.q) ** (1 / self.q))


@dataclass(frozen=True)
class DriveUse:
    """Bytes that one path of the store carried in a step. ``busy_seconds``: there was something to move."""

    path: str
    read_bytes: int
    write_bytes: int
    busy_seconds: float


@dataclass
class ActivationUse:
    """Bytes of activations over the tiers, in a step."""

    kept_bytes: int = 0
    """Of activations that have left the memory of compute."""
    read_bytes: int = 0
    """From NVMe."""
    write_bytes: int = 0
    """To NVMe."""
    host_bytes_max: int = 0
    """In host memory at a time."""
    nvme_bytes_max: int = 0
    """On NVMe at a time."""


@dataclass(frozen=True)
class LinkRates:
    """Measured rates of the link between host memory and a device, bytes per second. ``LinkRates()`` is that of no
    link, over which nothing comes."""

    to_device: float = math.inf
    to_host: float = math.inf

    @property
    def is_there(self) -> bool:
        """Something comes over it."""
        return math.isfinite(self.to_device)


@dataclass(frozen=True)
class MemoryRates:
    """Traffic that host memory bears, bytes per second: of updates alone, and of updates and of what crosses a device's
    link together. ``MemoryRates()`` bounds nothing."""

    updates: float = math.inf
    shared: float = math.inf

    def seconds(self, update_bytes: float, link_bytes: float) -> float:
        """Least time for updates that move so many bytes, while so many cross the link."""
        return max(update_bytes / self.updates, (update_bytes + link_bytes) / self.shared)


@dataclass(frozen=True)
class ExpertUse:
    """Weights of experts, in a step or since the engine was made."""

    routed_bytes: int = 0
    """Of experts that tokens were sent to, for each forward and each backward of a layer once."""
    read_bytes: int = 0
    """Of experts that were read from NVMe for it, those included that were read ahead in vain."""
    visited_bytes: int = 0
    """Of all experts of the layers that tokens passed, for each forward and each backward once."""

    @property
    def hit_rate(self) -> float:
        """Share of the routed bytes that were in memory when they were needed."""
        return max(1 - self.read_bytes / self.routed_bytes, 0.0) if self.routed_bytes else 1.0

    def since(self, start: ExpertUse) -> ExpertUse:
        """Difference to an earlier moment."""
        return ExpertUse(
            self.routed_bytes - start.routed_bytes,
            self.read_bytes - start.read_bytes,
            self.visited_bytes - start.visited_bytes,
        )


@dataclass(frozen=True)
class Report:
    """The last step, from the end of one ``step()`` to the end of the next; of an engine that does not train, the last
    forward of the model, from the end of the one before it.

    Seconds are wall time. ``compute_seconds`` is the time that the training thread did not wait for the engine, or, on
    a device, how long it worked on units. ``nvme_seconds``, ``to_device_seconds`` and ``to_host_seconds`` are the times
    that the bytes take at the measured bandwidths. ``memory_seconds`` is that of host memory: where a device computes,
    updates on the CPU share its bandwidth with what crosses the link. ``bound_seconds`` is the largest of them
    (``bound_by`` says which), ``efficiency`` its share of the step. ``stall_seconds`` names what the training thread
    waited for.

    Where the updates had to wait for the verdict of the last step, since its gradients were clipped, they can overlap
    with forward alone. Then ``schedule_seconds`` counts, too: what forward and backward must take, each by itself, the
    larger of compute and NVMe. Else it is 0.

    ``host_memory_bytes`` and ``device_memory_bytes`` are measured: host memory that the engine's buffers take, by the
    kernel's count, and device memory that it has allocated.
    """

    step: int
    seconds: float
    bound_seconds: float
    bound_by: str
    compute_seconds: float
    nvme_seconds: float
    schedule_seconds: float
    to_device_seconds: float
    to_host_seconds: float
    update_seconds: float
    stall_seconds: dict[str, float]
    nvme_read_bytes: int
    nvme_write_bytes: int
    nvme_write_bytes_total: int
    """Since the engine was made: what an SSD's endurance is spent on."""
    drives: tuple[DriveUse, ...]
    """The same bytes, by path."""
    activations: ActivationUse
    """Of the bytes from and to NVMe, those of activations; seconds of waiting are in ``stall_seconds``."""
    to_device_bytes: int
    to_host_bytes: int
    network_bytes: int
    """Received from other ranks."""
    host_memory_bytes: int
    device_memory_bytes: int
    memory: dict[str, dict[str, int]]
    io_backend: str | None
    bandwidths: Bandwidths | None
    """Rates that ``nvme_seconds`` is worked out with."""
    grad_norm: float | None
    """Before clipping."""
    loss_scale: float
    """Factor that the loss was multiplied by: 1 unless ``precision="fp16"``."""
    experts: ExpertUse = ExpertUse()
    """Of a mixture of experts: what tokens were sent to, and what of it was not there."""
    memory_seconds: float = 0.0
    sequences: int = 0
    """Sequences of a forward without training, each of which gets a token in generation; 0 for a step of training."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens that generation makes at this rate; 0 for a step of training."""
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        return self.bound_seconds / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    """The report for people. What is nothing is left out."""
    limit = f"{_LIMITS[report.bound_by]} {_seconds(report.bound_seconds)}"
    limit += f", {report.efficiency:.0%} of it"
    if report.sequences:
        yield f"forward {report.step} took {_seconds(report.seconds)}; {limit}"
        yield f"in generation that is {report.tokens_per_second:,.2f} tokens/s, of {report.sequences} sequences"
    else:
        yield f"step {report.step} took {_seconds(report.seconds)}; {limit}"
    parts = {
        "compute": report.compute_seconds,
        "NVMe": report.nvme_seconds,
        "to the device": report.to_device_seconds,
        "to the host": report.to_host_seconds,
        "host memory": report.memory_seconds,
        "updates": report.update_seconds,
    }
    yield f"side by side: {_listed(parts)}"
    if waits := _listed(report.stall_seconds):
        yield f"compute waited for: {waits}"
    if report.nvme_write_bytes_total or report.nvme_read_bytes:
        moved = f"{_megabytes(report.nvme_read_bytes)} read, {_megabytes(report.nvme_write_bytes)} written"
        rates = "" if report.bandwidths is None else f"; it {report.bandwidths}"
        yield f"NVMe ({report.io_backend}): {moved}{rates}"
        yield f"written to NVMe since the start: {report.nvme_write_bytes_total / 1e9:,.2f} GB"
    if report.experts.routed_bytes:
        routed, read = _megabytes(report.experts.routed_bytes), _megabytes(report.experts.read_bytes)
        there = f"{report.experts.hit_rate:.0%} were there"
        yield f"experts: tokens were sent to {routed}, {read} were read for it: {there}"
    if report.activations.kept_bytes:
        use = report.activations
        yield (
            f"activations: {_megabytes(use.kept_bytes)} kept, at most {_megabytes(use.host_bytes_max)} in host memory "
            f"and {_megabytes(use.nvme_bytes_max)} on NVMe; {_megabytes(use.read_bytes)} read, "
            f"{_megabytes(use.write_bytes)} written"
        )
    if report.to_device_bytes or report.to_host_bytes:
        to_device, to_host = _megabytes(report.to_device_bytes), _megabytes(report.to_host_bytes)
        yield f"link: {to_device} to the device, {to_host} to the host"
    if report.network_bytes:
        yield f"network: {_megabytes(report.network_bytes)} from other ranks"
    device = f", device memory {report.device_memory_bytes / _MIB:,.1f} MiB" if report.device_memory_bytes else ""
    yield f"host memory {report.host_memory_bytes / _MIB:,.1f} MiB{device}"
    if report.grad_norm is not None:
        scale = f", loss scale {report.loss_scale:g}" if report.loss_scale != 1 else ""
        yield f"gradient norm {report.grad_norm:.4g}{scale}"


def _listed(seconds: Mapping[str, float]) -> str:
    """Those that are worth a word, the longest first."""
    worth = sorted((item for item in seconds.items() if item[1] >= 5e-4), key=lambda item: -item[1])
    return ", ".join(f"{name} {_seconds(value)}" for name, value in worth)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
