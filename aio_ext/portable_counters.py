"""What the portable queue counts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_LATENCIES_MAX = 4096
"""The last so many blocks stand for all in the percentiles."""


@dataclass
class DirectionCounters:
    bytes: int = 0
    requests: int = 0
    operations: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES_MAX))

    def add(self, nbytes: int, seconds: float) -> None:
        self.bytes += nbytes
        self.operations += 1
        self.latencies.append(seconds)

    def snapshot(self) -> dict[str, Any]:
        ordered = sorted(self.latencies) or [0.0]
        at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in _SHARES}
        return {"bytes": self.bytes, "requests": self.requests, "operations": self.operations, **at}


_SHARES = (("latency_p50_s", 0.5), ("latency_p90_s", 0.9), ("latency_p99_s", 0.99), ("latency_max_s", 1.0))


class Counters:
    def __init__(self, slots: int) -> None:
        self.read = DirectionCounters()
        self.write = DirectionCounters()
        self.syncs = self.failed_requests = self.retries = self.short_transfers = self.depth_max = 0
        self._slots = slots
        self._busy = self._starved = self._idle = self._depth_seconds = 0.0
        self._accounted = time.monotonic()
        self._state = (0, False)

    def of(self, operation: str) -> DirectionCounters:
        return self.read if operation == "read" else self.write

    def account(self, depth: int, pending: bool) -> None:
        """Charge the time since the last call to the state named then; the state is the given one from now on."""
        now = time.monotonic()
        passed, self._accounted = now - self._accounted, now
        (before, had_pending), self._state = self._state, (depth, pending)
        if before == 0 and not had_pending:
            self._idle += passed
            return
        self._busy += passed
        self._depth_seconds += passed * before
        if before < self._slots and not had_pending:
            self._starved += passed

    def snapshot(self) -> dict[str, Any]:
        self.account(*self._state)
        return {
            "read": self.read.snapshot(),
            "write": self.write.snapshot(),
            "syncs": self.syncs,
            "failed_requests": self.failed_requests,
            "retries": self.retries,
            "short_transfers": self.short_transfers,
            "depth_max": self.depth_max,
            "depth_mean": self._depth_seconds / self._busy if self._busy > 0 else 0.0,
            "busy_seconds": self._busy,
            "starved_seconds": self._starved,
            "idle_seconds": self._idle,
        }
