"""Counts what one step spends: stalls of the training thread, seconds of the optimizer, and the trace of both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from offload.report.trace import Trace


@dataclass
class Meter:
    """Counts what one step spends. Stalls are counted on the training thread alone, updates on the update thread."""

    trace: Trace = field(default_factory=Trace)
    track: str = "waiting"

    started: float = field(default_factory=time.perf_counter)
    stalls: dict[str, float] = field(default_factory=dict)
    update_seconds: float = 0.0
    num_waits: int = 0
    """Waits under way: of the training thread, which counts stalls."""

    @contextlib.contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Count the time of the block as waiting for ``cause``."""
        span = self.trace.begin(self.track, f"for {cause}")
        self.num_waits += 1
        try:
            yield
        finally:
            self.num_waits -= 1
            self.trace.end(span)
            self.stalls[cause] = self.stalls.get(cause, 0.0) + span.seconds

    def end_update(self, name: str, start: float, stop: float | None = None) -> float:
        """Count the time from ``start`` to ``stop``, which is now by default, as updating ``name``; the latter."""
        stop = self.trace.over("update", name, start, stop)
        self.update_seconds += stop - start
        return stop

    def so_far(self) -> tuple[float, float]:
        """Seconds since the last restart, and those of them that were stalls."""
        return time.perf_counter() - self.started, sum(self.stalls.values())

    def idle_seconds(self) -> float:
        """Seconds since the last restart."""
        return time.perf_counter() - self.started

    def restart(self) -> tuple[float, dict[str, float], float]:
        """Seconds since the last restart, stalls by cause and update seconds in them."""
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        stalls, self.stalls = self.stalls, {}
        update_seconds, self.update_seconds = self.update_seconds, 0.0
        self.trace.end_step()
        return seconds, stalls, update_seconds
