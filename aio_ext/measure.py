"""Speed of a queue at a constant depth."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from .memory import Memory
from .queue import Queue
from .ticket import Ticket

Mode = Literal["read", "write", "mixed", "update"]
"""Mode of what is moved. "mixed": reads and writes that know nothing of each other, as two programs would make them.
"update": each tile is read, and when it is there it is written from the same buffer, as the engine's update does."""

READS, WRITES = 7, 6
"""Bytes read to bytes written at once: what the engine moves with everything on NVMe (14 and 12 a parameter)."""

REQUEST_BYTES = 8 << 20
"""Bytes that are asked for at a time, a tile of the engine: a Python thread must be woken for each request."""

NUM_BUFFERS = 6
"""Number of tiles that the engine has in memory at a time, and so the most that its update has in flight."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement."""

    read_bytes: int
    write_bytes: int
    seconds: float
    cpu_seconds: float
    """User and system time of the process while it ran."""
    depth_mean: float

    @property
    def bytes_per_s(self) -> float:
        return (self.read_bytes + self.write_bytes) / self.seconds

    @property
    def gib_per_s(self) -> float:
        return self.bytes_per_s / (1 << 30)

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.cpu_seconds / ((self.read_bytes + self.write_bytes) / (1 << 30))


class Range:
    """A file of a queue and the memory that it is read to and written from, all of it in turn.

    The size of the memory decides whether blocks are found in the processor's cache, so compare only what goes around
    equally large memories. Any size does from one block on: requests that wait behind those in flight may share memory
    with them, since nobody looks at the bytes.
    """

    def __init__(self, queue: Queue, file: int, nbytes: int, memory: Memory, depth: int, block_bytes: int) -> None:
        if min(memory.nbytes, nbytes) < block_bytes:
            raise ValueError(
                f"a block has {block_bytes} bytes, there are {memory.nbytes} of memory and {nbytes} of the file"
            )
        self._queue = queue
        self._file = file
        self._nbytes = nbytes
        self._memory = memory
        self._request_bytes = min(REQUEST_BYTES, nbytes, memory.nbytes) // block_bytes * block_bytes or block_bytes
        self._num_places = memory.nbytes // self._request_bytes
        # Two tiles always wait behind what is in flight, so that the queue's depth is what limits.
        self._requests_in_flight = -(-(depth * block_bytes + 2 * REQUEST_BYTES) // self._request_bytes)

    def measure(self, mode: Mode, nbytes: int) -> Sample:
        """Move about ``nbytes`` from the start of the file on, around its end if need be.

        Effects: all but "read" overwrite the file with what the memory holds.
        Raises:  :class:`QueueError` if a request fails.
        """
        num_requests = -(-nbytes // self._request_bytes)
        if mode == "update":
            return self._sample(lambda: self._update(-(-num_requests * READS // (READS + WRITES))))
        return self._sample(lambda: self._stream(mode, num_requests))

    def _stream(self, mode: Literal["read", "write", "mixed"], num_requests: int) -> None:
        in_flight: deque[Ticket] = deque()
        kinds = _mixed() if mode == "mixed" else repeat(mode)
        at = {"read": 0, "write": 0 if mode == "write" else self._nbytes // 2}
        for number in range(num_requests):
            if len(in_flight) == self._requests_in_flight:
                in_flight.popleft().wait(300)
            kind = next(kinds)
            in_flight.append(self._submit(kind, self._offset(at[kind]), self._place(number), self._request_bytes))
            at[kind] += self._request_bytes
        while in_flight:
            in_flight.popleft().wait(300)

    def _update(self, num_tiles: int) -> None:
        """Read tiles into every free buffer; write each from its buffer to its second place, half the file away.

        Of ``READS`` tiles ``WRITES`` are written. The others stand for what an update only reads. No buffer is in two
        requests at a time.
        """
        free = deque(self._place(number) for number in range(self._num_places))
        reading: deque[tuple[int, int, Ticket]] = deque()
        writing: deque[tuple[int, Ticket]] = deque()
        begun = 0
        while begun < num_tiles or reading:
            while free and begun < num_tiles:
                address = free.popleft()
                read = self._submit("read", self._offset(begun * self._request_bytes), address, self._request_bytes)
                reading.append((begun, address, read))
                begun += 1
            if reading:
                tile, address, read = reading.popleft()
                read.wait(300)
                if tile % READS < WRITES:
                    place = self._offset(tile * self._request_bytes + self._nbytes // 2)
                    writing.append((address, self._submit("write", place, address, self._request_bytes)))
                else:
                    free.append(address)
            while writing and (writing[0][1].done() or not (free or reading)):
                address, write = writing.popleft()
                write.wait(300)
                free.append(address)
        for _, write in writing:
            write.wait(300)

    def _offset(self, at: int) -> int:
        """Offset of the request that begins ``at`` bytes behind the start of the file, which has no end."""
        return at // self._request_bytes % (self._nbytes // self._request_bytes) * self._request_bytes

    def _place(self, number: int) -> int:
        return self._memory.address + number % self._num_places * self._request_bytes

    def move(self, kind: Literal["read", "write"], sizes: Sequence[int]) -> Sample:
        """Ask for requests of these sizes at once, one behind the other, around the ends of the file and the memory."""
        return self._sample(lambda: self._move(kind, sizes))

    def _move(self, kind: Literal["read", "write"], sizes: Sequence[int]) -> None:
        offset = place = 0
        in_flight = []
        for size in sizes:
            offset = 0 if offset + size > self._nbytes else offset
            place = 0 if place + size > self._memory.nbytes else place
            in_flight.append(self._submit(kind, offset, self._memory.address + place, size))
            offset, place = offset + size, place + size
        for ticket in in_flight:
            ticket.wait(300)

    def _submit(self, kind: Literal["read", "write"], offset: int, address: int, nbytes: int) -> Ticket:
        submit = self._queue.read if kind == "read" else self._queue.write
        return submit(self._file, offset, address, nbytes)

    def _sample(self, work: Callable[[], None]) -> Sample:
        """The counts of the queue's work within ``work``."""
        before, start, cpu = self._queue.statistics(), time.perf_counter(), time.process_time()
        work()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        after = self._queue.statistics()
        busy = after.busy_seconds - before.busy_seconds
        depth = after.depth_mean * after.busy_seconds - before.depth_mean * before.busy_seconds
        return Sample(
            read_bytes=after.read.bytes - before.read.bytes,
            write_bytes=after.write.bytes - before.write.bytes,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            depth_mean=depth / busy if busy > 0 else 0.0,
        )


def mixed_q(read_seconds: float, write_seconds: float, both_seconds: float) -> float:
    """The q at which ``(read^q + write^q)^(1/q) = both``, kept in [1, 16]: 1 for half duplex, large for full duplex."""
    if read_seconds <= 0 or write_seconds <= 0:
        return 1.0
    low, high = 1.0, 16.0
    for _ in range(40):
        q = (low + high) / 2
        longer, shorter = max(read_seconds, write_seconds), min(read_seconds, write_seconds)
        if longer * (1 + (shorter / longer) ** q) ** (1 / q) > both_seconds:
            low = q
        else:
            high = q
    return (low + high) / 2


def _mixed() -> Iterator[Literal["read", "write"]]:
    """Reads and writes, spread evenly."""
    due = 0
    while True:
        due += READS
        if due >= READS + WRITES:
            due -= READS + WRITES
            yield "read"
        else:
            yield "write"
