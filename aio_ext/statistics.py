"""Frozen snapshots of what a queue has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DirectionStatistics:
    """One direction, reads or writes. Latencies are of blocks, from the first attempt to the result, in seconds."""

    bytes: int = 0
    requests: int = 0
    operations: int = 0
    """Blocks."""
    latency_p50_s: float = 0.0
    latency_p90_s: float = 0.0
    latency_p99_s: float = 0.0
    latency_max_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Everything a queue has counted since it was made."""

    read: DirectionStatistics = DirectionStatistics()
    write: DirectionStatistics = DirectionStatistics()
    syncs: int = 0
    failed_requests: int = 0
    retries: int = 0
    """Attempts repeated because the kernel was busy (``EAGAIN``, ``EINTR``) or moved less than a sector."""
    short_transfers: int = 0
    depth_mean: float = 0.0
    """Blocks in flight, averaged over the time in which there were any."""
    depth_max: int = 0
    busy_seconds: float = 0.0
    """Time with at least one block pending or in flight."""
    starved_seconds: float = 0.0
    """The part of it in which more could have been in flight, had more been asked for."""
    idle_seconds: float = 0.0
    """Time with nothing to do."""
