"""What a step did: seconds, bytes, stalls, and how close it came to its bound."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from offload.trace import Span, Trace


@dataclass(frozen=True)
class Bandwidths:
    """Measured rates of the store, bytes per second; ``q`` bends the mixed envelope (1: reads and writes add up)."""

    read: float
    write: float
    q: float

    def seconds(self, read_bytes: int, write_bytes: int) -> float:
        """Least time for reading and writing this much: ``((R/Br)^q + (W/Bw)^q)^(1/q)``."""
        reading, writing = read_bytes / self.read, write_bytes / self.write
        if reading == 0 or writing == 0:
            return reading + writing
        return float((reading**self.q + writing**self.q) ** (1 / self.q))


@dataclass(frozen=True)
class Link:
    """Measured rates of the way between host memory and a device, bytes per second."""

    to_device: float
    to_host: float


@dataclass(frozen=True)
class Report:
    """The last step, from the end of one ``step()`` to the end of the next.

    Seconds are wall time. ``compute_seconds`` is what the training thread did not spend waiting for the engine, or on
    a device, how long it worked on units; ``nvme_seconds``, ``to_device_seconds`` and ``to_host_seconds`` are what the
    bytes take at the measured bandwidths. ``bound_seconds`` is the largest of them (``bound_by`` says which),
    ``efficiency`` its share of the step. ``stall_seconds`` names what the training thread waited for.
    """

    step: int
    seconds: float
    bound_seconds: float
    bound_by: str
    compute_seconds: float
    nvme_seconds: float
    to_device_seconds: float
    to_host_seconds: float
    update_seconds: float
    stall_seconds: dict[str, float]
    nvme_read_bytes: int
    nvme_write_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    host_memory_bytes: int
    device_memory_bytes: int
    memory: dict[str, dict[str, int]]
    io_backend: str | None
    grad_norm: float | None
    """Before clipping."""
    loss_scale: float
    """What the loss was multiplied by: 1 unless ``precision="fp16"``."""

    @property
    def efficiency(self) -> float:
        return self.bound_seconds / self.seconds if self.seconds else 1.0


@dataclass
class Meter:
    """Counts what one step spends. Stalls are counted on the training thread alone, updates on the update thread."""

    trace: Trace = field(default_factory=Trace)
    track: str = "waiting"

    started: float = field(default_factory=time.perf_counter)
    stalls: dict[str, float] = field(default_factory=dict)
    update_seconds: float = 0.0

    @contextlib.contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Count the time of the block as waiting for ``cause``."""
        span = self.trace.begin(self.track, f"for {cause}")
        try:
            yield
        finally:
            self.trace.end(span)
            self.stalls[cause] = self.stalls.get(cause, 0.0) + _seconds(span)

    def begin_update(self, name: str) -> Span:
        """Count the time from now on as updating ``name``."""
        return self.trace.begin("update", name)

    def end_update(self, span: Span) -> float:
        """Until now; that many seconds."""
        self.trace.end(span)
        seconds = _seconds(span)
        self.update_seconds += seconds
        return seconds

    def restart(self) -> tuple[float, dict[str, float], float]:
        """Seconds since the last restart, stalls by cause and update seconds in them."""
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        stalls, self.stalls = self.stalls, {}
        update_seconds, self.update_seconds = self.update_seconds, 0.0
        self.trace.end_step()
        return seconds, stalls, update_seconds


def _seconds(span: Span) -> float:
    assert span.stop is not None
    return span.stop - span.start
