"""The memory of a simulated device, as torch's allocator divides it: a pool of freed memory for each stream.

What is freed goes to the pool of the stream under which it was allocated, and is lent to the next request under that
stream, at once. A request under another one takes fresh memory; where there is none, all pools are emptied first.
Sizes are bytes alone: nothing is in pieces that are too small.
"""

from __future__ import annotations

from collections import Counter

from offload.device.protocol import Shortages


class Pools:
    """Counts who has how much of ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self.most_reserved_bytes = 0
        """The most that was taken or in pools at a time."""
        self.shortages = Shortages(0, 0)
        self._pools: Counter[str] = Counter()

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken, with all pools emptied."""
        return self.capacity_bytes - self.taken_bytes

    def take(self, stream: str, nbytes: int) -> bool:
        """Lend this much to work of a stream. False: there is not as much, and nothing was lent."""
        fresh_bytes = nbytes - min(nbytes, self._pools[stream])
        if self.taken_bytes + self._pools.total() + fresh_bytes > self.capacity_bytes:
            fits = nbytes <= self.free_bytes
            self._pools.clear()
            self.shortages = Shortages(self.shortages.emptied + 1, self.shortages.failed + (not fits))
            if not fits:
                return False
            fresh_bytes = nbytes
        self._pools[stream] -= nbytes - fresh_bytes
        self.taken_bytes += nbytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.taken_bytes + self._pools.total())
        return True

    def give(self, stream: str, nbytes: int) -> None:
        """Take back what was lent to work of a stream."""
        self.taken_bytes -= nbytes
        self._pools[stream] += nbytes
