"""One logical space over several paths, each as busy as it is fast.

[Note: How work is stolen]
The space is cut into chunks, and every chunk rests in one place of one path's file; a table in memory knows which. A
chunk that is rewritten as a whole need not go back to where it was: it may go to any free place anywhere, if the table
is changed once it is there. So whole-chunk writes wait in one line, and each path that has room takes the next one:
a path that is slower than expected takes fewer. Only near the end of the line do estimates matter: a path leaves a
chunk to the others if they would be through with everything before it were through with that chunk. Reads go where
the bytes are; since writes spread them by the speed that paths really have, so do reads of what was rewritten.

The old place stays untouched until the write has succeeded: a failed write leaves the chunk as it was.

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
from typing import TYPE_CHECKING, Literal

from ._core import core
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
    """Bytes of the file that may be used, from offset 0."""
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

    def _settle(self, bytes_done: int, error: QueueError | None, num_parts: int = 1) -> None:
        """Parts are over. Told by the callback thread alone."""
        self.bytes_done += bytes_done
        self.error = self.error or error
        self._parts_left -= num_parts
        if self._parts_left == 0:
            self._over.set()


@dataclass(frozen=True)
class _Place:
    """Place of a chunk: the ``index``-th piece of the file of a path."""

    path: int
    index: int


@dataclass(frozen=True)
class _Part:
    """Part of a request that one path transfers."""

    path: int
    offset: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class _ChunkWrite:
    chunk: int
    address: int
    urgent: bool
    ticket: StripedTicket
    lease: Lease | None
    """Keeps the memory while the write stands in line: no queue knows of it yet."""


class _Pace:
    """Seconds that a path takes for a chunk, by the last few that it finished, and how many it has in flight."""

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
        seconds = self._times[-1] - self._times[0]
        self.seconds_per_chunk = max(seconds / (len(self._times) - 1), 1e-9)  # a refusal may take no time at all


class StripedFile:
    """``nbytes`` of logical space over ``paths``. Reads and writes of any aligned range; all methods are thread-safe.

    chunk_bytes:      what moves between paths as a whole. Writes gain from striping when they cover whole chunks.
    chunks_in_flight: whole-chunk writes a path has at a time; enough to keep its queue at depth, and no more, since
                      what a slow path has taken it must finish.
    Raises:           ``ValueError`` if the paths together hold less than ``nbytes``. To move chunks, a path needs room
                      beyond its share; without any, chunks are rewritten where they are.
    The table lives in memory: :meth:`table` gives it to be kept, ``table`` takes it back.
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
        if chunk_bytes <= 0 or chunks_in_flight <= 0 or any(path.bytes_per_s <= 0 for path in self._paths):
            raise ValueError("chunk_bytes, chunks_in_flight and the bytes_per_s of each path must be > 0")
        self._num_chunks = -(-nbytes // chunk_bytes)
        self._chunks_in_flight_max = chunks_in_flight
        num_places = [path.capacity_bytes // chunk_bytes for path in self._paths]
        if sum(num_places) < self._num_chunks:
            raise ValueError(
                f"the paths hold {sum(num_places)} chunks of {chunk_bytes} bytes, {self._num_chunks} are needed"
            )
        self._place_of = self._spread(num_places) if table is None else [_Place(*entry) for entry in table]
        taken = set(self._place_of)
        inside = all(0 <= p.path < len(num_places) and 0 <= p.index < num_places[p.path] for p in taken)
        if len(self._place_of) != self._num_chunks or len(taken) != self._num_chunks or not inside:
            raise ValueError(f"the table does not name {self._num_chunks} different places on the paths")
        self._free = [
            [i for i in reversed(range(count)) if _Place(path, i) not in taken] for path, count in enumerate(num_places)
        ]
        self._line: deque[_ChunkWrite] = deque()
        self._paces = [_Pace(chunk_bytes / path.bytes_per_s) for path in self._paths]

    def _spread(self, num_places: list[int]) -> list[_Place]:
        """Chunks in turn to the path that is furthest behind its share, while it has room."""
        used = [0] * len(num_places)
        places = []
        for _ in range(self._num_chunks):
            behind = [
                (used[p] + 1) / path.bytes_per_s if used[p] < num_places[p] else float("inf")
                for p, path in enumerate(self._paths)
            ]
            path = behind.index(min(behind))
            places.append(_Place(path, used[path]))
            used[path] += 1
        return places

    def table(self) -> list[tuple[int, int]]:
        """Path and place of each chunk, as of the writes that are over."""
        return [(place.path, place.index) for place in self._place_of]

    def read(self, offset: int, address: int, nbytes: int, urgent: bool = False) -> StripedTicket:
        """Start reading ``nbytes`` at ``offset`` into memory at ``address``. Wait for writes of the range first.

        Raises what the queue of the first part raises; nothing is in flight then. A later part that is refused fails
        the ticket, which is done when the parts submitted before are over.
        """
        parts = [self._part(address, *piece) for piece in self._pieces(offset, nbytes)]
        ticket = StripedTicket(len(parts))
        self._submit("read", parts, urgent, ticket)
        return ticket

    def write(self, offset: int, address: int, nbytes: int, urgent: bool = False) -> StripedTicket:
        """Start writing ``nbytes`` at ``offset``: whole chunks wherever there is room first, the rest where it rests.

        Two writes of one chunk must not be in flight at a time. Refusals are those of :meth:`read`.
        """
        pieces = self._pieces(offset, nbytes)
        ticket = StripedTicket(len(pieces))
        whole = [
            _ChunkWrite(chunk, address + at, urgent, ticket, core.lease_containing(address + at, length))
            for chunk, _, length, at in pieces
            if length == self.chunk_bytes
        ]
        # The parts go first: when the first of them is refused, nothing is in flight.
        self._submit("write", [self._part(address, *p) for p in pieces if p[2] < self.chunk_bytes], urgent, ticket)
        notifier_of_thread().call_soon(partial(self._line_up, whole))
        return ticket

    def sync(self) -> StripedTicket:
        """Make durable what was written before on every path. The writes must be over. Refusals as in :meth:`read`."""
        ticket = StripedTicket(len(self._paths))
        self._submit("sync", [_Part(path, 0, 0, 0) for path in range(len(self._paths))], True, ticket)
        return ticket

    def _submit(
        self, operation: Literal["read", "write", "sync"], parts: Sequence[_Part], urgent: bool, ticket: StripedTicket
    ) -> None:
        """Hand the parts to their queues. A refusal of the first is raised; one of a later part fails the ticket."""
        notifier = notifier_of_thread()  # made before anything is in flight: that may fail, too
        for number, part in enumerate(parts):
            path = self._paths[part.path]
            try:
                if operation == "sync":
                    submitted = path.queue.sync(path.file)
                elif operation == "read":
                    submitted = path.queue.read(path.file, part.offset, part.address, part.nbytes, urgent)
                else:
                    submitted = path.queue.write(path.file, part.offset, part.address, part.nbytes, urgent)
            except Exception as refusal:
                if number == 0:
                    raise
                name = f"part {number + 1} of {len(parts)} (path {part.path})"
                error = _refused(refusal, operation, name, part.offset, part.nbytes)
                notifier.call_soon(partial(ticket._settle, 0, error, len(parts) - number))
                return
            submitted.add_done_callback(ticket._part_over)

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

    def _part(self, address: int, chunk: int, begin: int, length: int, at: int) -> _Part:
        place = self._place_of[chunk]
        return _Part(place.path, place.index * self.chunk_bytes + begin, address + at, length)

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

    def _take(self, path_index: int) -> tuple[_ChunkWrite, _Place] | None:
        pace = self._paces[path_index]
        if not self._line or pace.in_flight >= self._chunks_in_flight_max or self._others_are_sooner(pace):
            return None
        free = self._free[path_index]
        write = self._line[0]
        if free:
            place = _Place(path_index, free.pop())
        elif self._place_of[write.chunk].path == path_index or not any(self._free):
            place = self._place_of[write.chunk]  # no room to move it: rewritten where it is
        else:
            return None
        self._line.popleft()
        pace.start()
        return write, place

    def _others_are_sooner(self, mine: _Pace) -> bool:
        """True if the paths that are busy now would be through with everything before ``mine`` with one chunk more."""
        busy = [pace for pace in self._paces if pace is not mine and pace.in_flight > 0]
        if not busy:
            return False
        chunks = len(self._line) + sum(pace.in_flight for pace in busy)
        chunks_per_s = sum(1 / pace.seconds_per_chunk for pace in busy)
        return (mine.in_flight + 1) * mine.seconds_per_chunk > chunks / chunks_per_s

    def _start(self, write: _ChunkWrite, place: _Place) -> None:
        path = self._paths[place.path]
        offset = place.index * self.chunk_bytes

        def over(ticket: Ticket) -> None:
            self._over(write, place, ticket.bytes_done, ticket.error)
            self._fill()

        try:
            ticket = path.queue.write(path.file, offset, write.address, self.chunk_bytes, write.urgent)
        except Exception as refusal:
            name = f"chunk {write.chunk} (path {place.path})"
            self._over(write, place, 0, _refused(refusal, "write", name, offset, self.chunk_bytes))
        else:
            ticket.add_done_callback(over)

    def _over(self, write: _ChunkWrite, place: _Place, bytes_done: int, error: QueueError | None) -> None:
        """A chunk write is over: the chunk rests in its new place, or still in the old one."""
        self._paces[place.path].finish()
        before = self._place_of[write.chunk]
        if error is None:
            self._place_of[write.chunk] = place
        unused = before if error is None else place
        if before != place:
            self._free[unused.path].append(unused.index)
        write.ticket._settle(bytes_done, error)


def _refused(refusal: Exception, operation: str, name: str, offset: int, nbytes: int) -> QueueError:
    """The error of a part that its queue did not take, with the refusal as its cause."""
    error = QueueError(getattr(refusal, "errno", None) or errno.EINVAL, operation, name, offset, nbytes, 0, offset)
    error.__cause__ = refusal
    return error
