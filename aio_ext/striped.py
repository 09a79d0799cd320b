"""One logical space over several paths, each as busy as it is fast.

[Note: How work is stolen]
The space is cut into chunks, and every chunk rests in one slot of one path's file; a table in memory knows which. A
chunk that is rewritten as a whole need not go back to where it was: it may go to any free slot anywhere, if the table
is changed once it is there. So whole-chunk writes wait in one line, and each path that has room takes the next one:
a path that is slower than expected takes fewer. Only near the end of the line do estimates matter: a path leaves a
chunk to the others if they would be through with everything before it were through with that chunk. Reads go where
the bytes are; since writes spread them by the speed that paths really have, so do reads of what was rewritten.

The old slot stays untouched until the write has succeeded: a failed write leaves the chunk as it was.

The line, the table and the counts belong to the thread of the package that makes callbacks, and so do the tickets;
callers hand their writes over to it, see [Note: Ctrl-C strikes anywhere].
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ._core import lease_containing
from .errors import QueueError
from .latch import Latch
from .notify import notifier_of_thread
from .queue import Queue
from .ticket import Ticket

if TYPE_CHECKING:
    from ._aio import Lease


@dataclass(frozen=True)
class StripePath:
    """A file on one device, with the queue that serves it."""

    queue: Queue
    file: int
    capacity_bytes: int
    """What of the file may be used, from offset 0."""
    bytes_per_s: float
    """Expected bandwidth: sets where chunks rest before they are first written. Only ratios matter."""


class StripedTicket:
    """The promise of a request on a striped space; see :class:`aio_ext.Ticket`."""

    def __init__(self, num_parts: int) -> None:
        self._over = Latch()
        self._parts_left = num_parts
        self.bytes_done = 0
        """Bytes transferred so far, in any order."""
        self.error: QueueError | None = None
        """The error of the part that failed first; offsets are those of the path's file, not of the space."""
        if num_parts == 0:
            self._over.set()

    def done(self) -> bool:
        """True once every part is over."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when all of it has succeeded. Raises :class:`QueueError`, or ``TimeoutError`` after ``timeout`` s."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"striped request: {self._parts_left} parts not over after {timeout} s")
        if self.error is not None:
            raise self.error

    def add_done_callback(self, call: Callable[[StripedTicket], object]) -> None:
        """Have ``call(ticket)`` made by a thread of the package once the request is over, as by a plain ticket."""
        call_soon = partial(notifier_of_thread().call_soon, partial(call, self))
        if not self._over.call_when_set(call_soon):
            call_soon()

    def __await__(self) -> Generator[object, None, None]:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not over.done():
                over.set_result(None)

        self.add_done_callback(lambda _: loop.call_soon_threadsafe(tell))
        yield from over
        if self.error is not None:
            raise self.error

    def _part_over(self, ticket: Ticket) -> None:
        self._settle(ticket.bytes_done, ticket.error)

    def _settle(self, bytes_done: int, error: QueueError | None) -> None:
        """One part is over. Told by the callback thread alone."""
        self.bytes_done += bytes_done
        self.error = self.error or error
        self._parts_left -= 1
        if self._parts_left == 0:
            self._over.set()


@dataclass(frozen=True)
class _Slot:
    path: int
    index: int


@dataclass(frozen=True)
class _ChunkWrite:
    chunk: int
    address: int
    urgent: bool
    ticket: StripedTicket
    lease: Lease | None
    """Keeps the memory while the write stands in line: no queue knows of it yet."""


class _Pace:
    """How long a path takes for a chunk, by the last few that it finished, and how many it has in flight."""

    def __init__(self, seconds_per_chunk: float) -> None:
        self.seconds_per_chunk = seconds_per_chunk
        self.in_flight = 0
        self._times: deque[float] = deque(maxlen=9)

    def start(self) -> None:
        if self.in_flight == 0:
            self._times.clear()
            self._times.append(time.monotonic())
        self.in_flight += 1

    def finish(self) -> None:
        self.in_flight -= 1
        self._times.append(time.monotonic())
        self.seconds_per_chunk = (self._times[-1] - self._times[0]) / (len(self._times) - 1)


class StripedFile:
    """``nbytes`` of logical space over ``paths``. Reads and writes of any aligned range; all methods are thread-safe.

    chunk_bytes:      what moves between paths as a whole. Writes gain from striping when they cover whole chunks.
    chunks_in_flight: whole-chunk writes a path has at a time; enough to keep its queue at depth, and no more, since
                      what a slow path has taken it must finish.
    Raises:           ``ValueError`` if the paths together hold less than ``nbytes``. To move chunks, a path needs room
                      beyond its share; without any, chunks are rewritten where they are.
    The table lives in memory: :meth:`table` gives it to whoever wants to keep it, ``table`` takes it back.
    """

    def __init__(
        self,
        paths: Sequence[StripePath],
        nbytes: int,
        chunk_bytes: int = 4 << 20,
        chunks_in_flight: int = 8,
        table: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.chunk_bytes = chunk_bytes
        self._paths = tuple(paths)
        self._num_chunks = -(-nbytes // chunk_bytes)
        self._chunks_in_flight_max = chunks_in_flight
        num_slots = [path.capacity_bytes // chunk_bytes for path in self._paths]
        if sum(num_slots) < self._num_chunks:
            raise ValueError(
                f"the paths hold {sum(num_slots)} chunks of {chunk_bytes} bytes, {self._num_chunks} are needed"
            )
        self._slot_of = self._spread(num_slots) if table is None else [_Slot(*entry) for entry in table]
        taken = set(self._slot_of)
        self._free = [
            [i for i in reversed(range(count)) if _Slot(path, i) not in taken] for path, count in enumerate(num_slots)
        ]
        self._line: deque[_ChunkWrite] = deque()
        self._paces = [_Pace(chunk_bytes / path.bytes_per_s) for path in self._paths]

    def _spread(self, num_slots: list[int]) -> list[_Slot]:
        """Chunks in turn to the path that is furthest behind its share, while it has slots."""
        used = [0] * len(num_slots)
        slots = []
        for _ in range(self._num_chunks):
            behind = [
                (used[p] + 1) / path.bytes_per_s if used[p] < num_slots[p] else float("inf")
                for p, path in enumerate(self._paths)
            ]
            path = behind.index(min(behind))
            slots.append(_Slot(path, used[path]))
            used[path] += 1
        return slots

    def table(self) -> list[tuple[int, int]]:
        """Path and slot of each chunk, as of the writes that are over."""
        return [(slot.path, slot.index) for slot in self._slot_of]

    def read(self, offset: int, address: int, nbytes: int, urgent: bool = False) -> StripedTicket:
        """Start reading ``nbytes`` at ``offset`` into memory at ``address``. Wait for writes of the range first."""
        pieces = self._pieces(offset, nbytes)
        ticket = StripedTicket(len(pieces))
        for chunk, begin, length, at in pieces:
            path, place = self._place(chunk, begin)
            path.queue.read(path.file, place, address + at, length, urgent).add_done_callback(ticket._part_over)
        return ticket

    def write(self, offset: int, address: int, nbytes: int, urgent: bool = False) -> StripedTicket:
        """Start writing ``nbytes`` at ``offset``: whole chunks wherever there is room first, the rest where it rests.

        Two writes of one chunk must not be in flight at a time.
        """
        pieces = self._pieces(offset, nbytes)
        ticket = StripedTicket(len(pieces))
        whole = [
            _ChunkWrite(chunk, address + at, urgent, ticket, lease_containing(address + at, length))
            for chunk, _, length, at in pieces
            if length == self.chunk_bytes
        ]
        notifier_of_thread().call_soon(partial(self._line_up, whole))
        for chunk, begin, length, at in pieces:
            if length < self.chunk_bytes:
                path, place = self._place(chunk, begin)
                path.queue.write(path.file, place, address + at, length, urgent).add_done_callback(ticket._part_over)
        return ticket

    def sync(self) -> StripedTicket:
        """Make durable what was written before on every path. The writes must be over."""
        ticket = StripedTicket(len(self._paths))
        for path in self._paths:
            path.queue.sync(path.file).add_done_callback(ticket._part_over)
        return ticket

    def _pieces(self, offset: int, nbytes: int) -> list[tuple[int, int, int, int]]:
        """``(chunk, begin in it, length, offset in the request)`` of each chunk that the range touches."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside the {self.nbytes} bytes of the space")
        pieces = []
        at = 0
        while at < nbytes:
            chunk, begin = divmod(offset + at, self.chunk_bytes)
            length = min(self.chunk_bytes - begin, nbytes - at)
            pieces.append((chunk, begin, length, at))
            at += length
        return pieces

    def _place(self, chunk: int, begin: int) -> tuple[StripePath, int]:
        slot = self._slot_of[chunk]
        return self._paths[slot.path], slot.index * self.chunk_bytes + begin

    # --- the callback thread ---

    def _line_up(self, writes: Sequence[_ChunkWrite]) -> None:
        for write in writes:
            self._line.appendleft(write) if write.urgent else self._line.append(write)
        self._fill()

    def _fill(self) -> None:
        """Have every path take chunk writes from the line while it has room for them."""
        for path_index in range(len(self._paths)):
            while (taken := self._take(path_index)) is not None:
                self._start(*taken)

    def _take(self, path_index: int) -> tuple[_ChunkWrite, _Slot] | None:
        pace = self._paces[path_index]
        if not self._line or pace.in_flight >= self._chunks_in_flight_max or self._others_are_sooner(pace):
            return None
        free = self._free[path_index]
        write = self._line[0]
        if free:
            slot = _Slot(path_index, free.pop())
        elif self._slot_of[write.chunk].path == path_index or not any(self._free):
            slot = self._slot_of[write.chunk]  # no room to move it: rewritten where it is
        else:
            return None
        self._line.popleft()
        pace.start()
        return write, slot

    def _others_are_sooner(self, mine: _Pace) -> bool:
        """True if the paths that are busy now would be through with everything before ``mine`` with one chunk more."""
        busy = [pace for pace in self._paces if pace is not mine and pace.in_flight > 0]
        if not busy:
            return False
        chunks = len(self._line) + sum(pace.in_flight for pace in busy)
        chunks_per_s = sum(1 / pace.seconds_per_chunk for pace in busy)
        return (mine.in_flight + 1) * mine.seconds_per_chunk > chunks / chunks_per_s

    def _start(self, write: _ChunkWrite, slot: _Slot) -> None:
        path = self._paths[slot.path]
        place = slot.index * self.chunk_bytes

        def over(ticket: Ticket) -> None:
            self._over(write, slot, ticket.bytes_done, ticket.error)
            self._fill()

        try:
            ticket = path.queue.write(path.file, place, write.address, self.chunk_bytes, write.urgent)
        except (OSError, ValueError) as refusal:
            number = getattr(refusal, "errno", None) or errno.EINVAL
            error = QueueError(number, "write", f"path {slot.path}", place, self.chunk_bytes, 0, place)
            self._over(write, slot, 0, error)
        else:
            ticket.add_done_callback(over)

    def _over(self, write: _ChunkWrite, slot: _Slot, bytes_done: int, error: QueueError | None) -> None:
        """A chunk write is over: the chunk rests in its new slot, or still in the old one."""
        self._paces[slot.path].finish()
        before = self._slot_of[write.chunk]
        if error is None:
            self._slot_of[write.chunk] = slot
        unused = before if error is None else slot
        if before != slot:
            self._free[unused.path].append(unused.index)
        write.ticket._settle(bytes_done, error)
