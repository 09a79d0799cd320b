"""Records that lie in files of other people's, which are read where they are and never written.

[Note: Aligned reads around unaligned bytes] A file has its tensors one after the other, at any byte; direct I/O asks
for whole blocks of the drive, of 512 bytes on most (``ReadOnlyFile.block_bytes``). Of each part the whole blocks within
go to a block of the part, and are moved by less than one when they have come; what is left at either end comes with the
block that it is in, to memory beside the record. So do small parts, such as the scales of an expert: blocks that are
neighbours in the file come in one request, and none comes twice among them. Nothing beyond the record is written.

[Note: A file that changes] The bytes of a part get their checksum when they are read for the first time, unless it was
known before, and are verified from then on. Until then, and beside, the file's size, inode and time of change must stay
what they were when its header was read. The descriptor stays open, so another file under the same name is not read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import aio_ext
from swapper.arena import PAGE_BYTES, Arena, Lease, align
from swapper.checksum import digest
from swapper.device import Transfer
from swapper.errors import StorageError, StorageTimeout, StoreMisuse, WeightsChanged, failed
from swapper.files import Descriptor, named
from swapper.ticket import Reads, Ticket

_SEED = 0
"""Parts of files belong to no store and no generation."""


@dataclass(frozen=True, eq=False)
class ReadOnlyFile:
    """A file that somebody holds open. ``header`` is a checksum of what it says of its content; ``status`` is what
    ``os.fstat`` said when that was read."""

    path: Path
    descriptor: int
    header: int
    status: os.stat_result

    @property
    def nbytes(self) -> int:
        return self.status.st_size

    @property
    def identity(self) -> tuple[str, int, int]:
        """Equal for copies of one file, and mostly for no other: name, bytes, checksum of the header."""
        return self.path.name, self.nbytes, self.header

    @cached_property
    def block_bytes(self) -> int:
        """Multiples of it are where a direct read may begin and end, in the file and in memory: a page at most."""
        return min(max(aio_ext.direct_io_alignment(self.descriptor)), PAGE_BYTES)

    @property
    def whole_bytes(self) -> int:
        """Bytes up to the end of its last whole block."""
        return self.nbytes - self.nbytes % self.block_bytes


@dataclass(frozen=True)
class FilePart:
    """``nbytes`` of a file, from ``start`` on, which are those from ``offset`` on of a record."""

    file: ReadOnlyFile
    start: int
    nbytes: int
    offset: int

    def within(self, begin: int, end: int) -> FilePart | None:
        """Return the share of this part in the bytes ``[begin, end)`` of the record; None if there is none."""
        first, last = max(self.offset, begin), min(self.offset + self.nbytes, end)
        if first >= last:
            return None
        return FilePart(self.file, self.start + first - self.offset, last - first, first - begin)


_DIRECT_BYTES = 16 << 10
"""A part with fewer bytes of whole blocks comes with its neighbours: copying it costs less than one more request."""


class _Piece(NamedTuple):
    """``nbytes`` of a file from ``start`` on, which are those from ``target`` on of the record."""

    start: int
    nbytes: int
    target: int


class _Blocks:
    """Neighbouring blocks of a file that the record has pieces of. They come to ``place`` in the memory beside it."""

    def __init__(self, file: ReadOnlyFile, start: int, place: int) -> None:
        self.file = file
        self.start = self.end = start
        self.place = place
        self._pieces: list[_Piece] = []

    @property
    def place_end(self) -> int:
        return self.place + self.end - self.start

    def add(self, piece: _Piece) -> None:
        """A piece whose first block is one of these, or the next one."""
        self.end = max(self.end, align(piece.start + piece.nbytes, self.file.block_bytes))
        self._pieces.append(piece)

    def requests(self, beside: int) -> Iterator[tuple[int, int, int]]:
        """Offset in the file, address and bytes of the read. What is behind the file's last whole block is left out."""
        nbytes = min(self.end, self.file.whole_bytes) - self.start
        if nbytes > 0:
            yield self.start, beside + self.place, nbytes

    def settle(self, address: int, beside: int, files: InPlaceFiles) -> None:
        """Bring the pieces to their places once the reads are over."""
        at, behind = beside + self.place - self.start, max(self.start, self.file.whole_bytes)
        if self.end > self.file.whole_bytes:
            files.read_tail(self.file, behind, at + behind, self.file.nbytes - behind)
        for piece in self._pieces:
            ctypes.memmove(address + piece.target, at + piece.start, piece.nbytes)
        files.let_go(self.file, self.start, self.end - self.start)


class _Reading:
    """The read of a part: see [Note: Aligned reads around unaligned bytes]."""

    def __init__(self, part: FilePart) -> None:
        begin, end = part.start, part.start + part.nbytes
        block = part.file.block_bytes
        first, last = align(begin, block), end - end % block
        self.part = part
        self._target = part.offset + first - begin
        """Place of the first whole block in the record."""
        self._landing = part.offset if part.offset % block == 0 else align(self._target, block)
        """The block of the record that it comes to. Where that is behind, the last one would end beyond the part."""
        last -= block if self._landing > self._target else 0
        self._direct_start, self._direct_bytes = first, last - first
        self.expected: int | None = None
        """Checksum of the bytes, once it is known."""
        if self._direct_bytes < _DIRECT_BYTES:
            self._direct_bytes, pieces = 0, [_Piece(begin, part.nbytes, part.offset)]
        else:
            behind = _Piece(last, end - last, part.offset + last - begin)
            pieces = [_Piece(begin, first - begin, part.offset), behind]
        self.pieces = [piece for piece in pieces if piece.nbytes]
        """Pieces that are read into memory beside the record."""

    def requests(self, address: int) -> Iterator[tuple[int, int, int]]:
        """Offset in the file, address and bytes of the read of whole blocks, if there is one."""
        if self._direct_bytes:
            yield self._direct_start, address + self._landing, self._direct_bytes

    def moves(self, address: int) -> Iterator[tuple[int, int, int]]:
        """Where whole blocks that have come belong, where they are and their bytes, if that is not the same."""
        if self._direct_bytes and self._landing != self._target:
            yield address + self._target, address + self._landing, self._direct_bytes

    def settle(self, files: InPlaceFiles) -> None:
        """Whole blocks are at their place."""
        if self._direct_bytes:
            files.let_go(self.part.file, self._direct_start, self._direct_bytes)


def _beside(readings: Sequence[_Reading]) -> list[_Blocks]:
    """The blocks that come to memory beside a record: pieces that are neighbours in a file come together, whatever
    parts they are of."""
    found: list[_Blocks] = []
    numbers = {file: number for number, file in enumerate(dict.fromkeys(reading.part.file for reading in readings))}
    pieces = [(reading.part.file, piece) for reading in readings for piece in reading.pieces]
    for file, piece in sorted(pieces, key=lambda item: (numbers[item[0]], item[1].start)):
        start = piece.start - piece.start % file.block_bytes
        if not found or found[-1].file is not file or start > found[-1].end:
            found.append(_Blocks(file, start, align(found[-1].place_end, file.block_bytes) if found else 0))
        found[-1].add(piece)
    return found


def part_checksum(address: int, nbytes: int) -> int:
    """The checksum of a part whose bytes are in memory at ``address``."""
    return digest(address, nbytes, _SEED)


class ReadBytes(NamedTuple):
    """Bytes that a read of some parts asks the drive for, and the memory beside the record that it takes."""

    nbytes: int
    edge_bytes: int

    @classmethod
    def of(cls, parts: Sequence[FilePart]) -> ReadBytes:
        """Add them up."""
        readings = [_Reading(part) for part in parts]
        beside = _beside(readings)
        wanted = [request for reading in readings for request in reading.requests(0)]
        wanted += [request for blocks in beside for request in blocks.requests(0)]
        return cls(sum(nbytes for _, _, nbytes in wanted), beside[-1].place_end if beside else 0)


class InPlaceRecord:
    """A record of ``nbytes`` that has these parts; what is between them is left as it is."""

    def __init__(self, name: str, parts: Sequence[FilePart], nbytes: int, files: InPlaceFiles) -> None:
        self.name = name
        self.nbytes = nbytes
        self._files = files
        self._readings = [_Reading(part) for part in parts]
        self._beside = _beside(self._readings)
        self.edge_bytes = self._beside[-1].place_end if self._beside else 0

    @property
    def checksums(self) -> Sequence[int | None]:
        """Of each part, as far as they are known."""
        return [reading.expected for reading in self._readings]

    def expect(self, checksums: Sequence[int | None]) -> None:
        """The parts must have these checksums, where they are known. Raises ``WeightsChanged`` if others were read."""
        for reading, value in zip(self._readings, checksums, strict=True):
            if value is not None and reading.expected not in (None, value):
                raise self._changed(reading, "it has other bytes than those that were trained with")
            reading.expected = reading.expected if value is None else value

    def read(self, address: int, *, urgent: bool = False) -> Ticket:
        """Start reading the record into memory at ``address``, which begins on a page."""
        files, beside = self._files, self._files.take_beside(self.edge_bytes)
        moved: list[int] = []
        """Moves of what has come. A second one would take what the first has put there."""

        def submit(urgent: bool) -> Transfer:
            moved.clear()
            parts = self._readings
            wanted = [(reading.part.file, *request) for reading in parts for request in reading.requests(address)]
            for blocks in self._beside:
                wanted += [(blocks.file, *request) for request in blocks.requests(beside.address)]
            return _Several([files.submit(*request, urgent=urgent) for request in wanted])

        def judge() -> WeightsChanged | None:
            if not moved:
                moves = [move for reading in self._readings for move in reading.moves(address)]
                moved.extend(starmap(ctypes.memmove, moves))  # in one step of the interpreter: Ctrl-C strikes none
            for reading in self._readings:
                reading.settle(files)
            for blocks in self._beside:
                blocks.settle(address, beside.address, files)
            for file in dict.fromkeys(reading.part.file for reading in self._readings):
                if (change := files.change_of(file)) is not None:
                    raise change
            return self._first_wrong(address)

        def end() -> None:
            files.give_beside(beside)

        return files.reads.begin(f"read of {self.name}", submit, judge, urgent=urgent, then=end)

    def require(self, address: int) -> None:
        """Raise ``WeightsChanged`` unless memory at ``address`` has the record's bytes, which are known."""
        for reading in self._readings:
            if reading.expected != self._digest(reading, address):
                raise WeightsChanged(
                    f"{self.name} were to be changed, and they are read in place from {named(reading.part.file.path)}, "
                    "which is never written.",
                    survives="The file has what it had. What was written to the weights in memory is lost.",
                    advice="To change frozen weights, load them into the model and make the engine without weights=.",
                )

    def _first_wrong(self, address: int) -> WeightsChanged | None:
        """Verify each part, or note its checksum if it is the first time."""
        for reading in self._readings:
            seen = self._digest(reading, address)
            if reading.expected is None:
                reading.expected = seen
            elif seen != reading.expected:
                return self._changed(reading, f"checksum {seen:016x}, expected {reading.expected:016x}")
        return None

    def _digest(self, reading: _Reading, address: int) -> int:
        return part_checksum(address + reading.part.offset, reading.part.nbytes)

    def _changed(self, reading: _Reading, how: str) -> WeightsChanged:
        part = reading.part
        where = f"[{part.start}, {part.start + part.nbytes})"
        return WeightsChanged(f"{self.name}: {named(part.file.path)} {where} is not what it was: {how}.")


class InPlaceFiles:
    """The files that records are read from, behind a queue of their own. Any thread may read."""

    def __init__(
        self, files: Sequence[ReadOnlyFile], *, backend: str = "auto", queue_depth: int = 32, block_bytes: int = 1 << 20
    ) -> None:
        """Raises ``WeightsChanged``, and ``StorageIOError`` if a file cannot be opened once more."""
        self.reads = _InPlaceReads(self)
        self.files = tuple(files)
        self._queue = aio_ext.Queue(backend=backend, depth=queue_depth, block_bytes=block_bytes)
        self._opened: dict[ReadOnlyFile, _Opened] = {}
        self._free_beside: list[Lease | aio_ext.Memory] = []
        """Memory for edges that no read has. Each change is one step of the interpreter, so there is no lock."""
        try:
            for file in self.files:
                self._opened[file] = _Opened(file, self._queue)
            for file in self.files:
                if (change := self.change_of(file)) is not None:
                    raise change
        except BaseException:
            self.close()
            raise

    def use(self, arena: Arena, edge_bytes: int, num_reads: int) -> None:
        """Tell the queue where the buffers are, and take memory for the edges of so many reads at a time."""
        self._queue.register_memory(arena.address, arena.nbytes)
        self._free_beside += [arena.lease(edge_bytes) for _ in range(num_reads) if edge_bytes]

    def statistics(self) -> aio_ext.Statistics:
        """Counts of the reads so far."""
        return self._queue.statistics()

    def change_of(self, file: ReadOnlyFile) -> WeightsChanged | None:
        """In what the file is not what it was when its header was read, if in anything."""
        now = os.fstat(self._opened[file].descriptor.number)
        for field, name in (("st_size", "bytes"), ("st_mtime_ns", "time of change in ns"), ("st_ino", "inode")):
            if getattr(now, field) != getattr(file.status, field):
                return WeightsChanged(
                    f"{named(file.path)} has changed while it is read in place: {name} {getattr(file.status, field)} "
                    f"then, {getattr(now, field)} now."
                )
        return None

    def submit(self, file: ReadOnlyFile, start: int, address: int, nbytes: int, *, urgent: bool) -> Transfer:
        """Start reading whole blocks."""
        try:
            return self._queue.read(self._opened[file].number, start, address, nbytes, urgent)
        except OSError as error:
            if error.errno is None:
                raise  # not the system's: a signal handler of the user's may raise a TimeoutError anywhere
            if error.errno == errno.ESHUTDOWN:
                raise StoreMisuse(f"read of {named(file.path)}: the engine is closed.") from None
            raise failed(f"read of {named(file.path)}", error) from error

    def read_tail(self, file: ReadOnlyFile, start: int, address: int, nbytes: int) -> None:
        """Read what is behind the file's last whole block, which direct I/O does not give."""
        memory = (ctypes.c_char * nbytes).from_address(address)
        if os.preadv(self._opened[file].descriptor.number, [memory], start) != nbytes:
            raise WeightsChanged(f"{named(file.path)} has been cut off while it is read in place.")

    def let_go(self, file: ReadOnlyFile, start: int, nbytes: int) -> None:
        """Have the page cache forget what was read."""
        os.posix_fadvise(self._opened[file].descriptor.number, start, nbytes, os.POSIX_FADV_DONTNEED)

    def take_beside(self, nbytes: int) -> Lease | aio_ext.Memory:
        """Memory for the edges of a read, which ``give_beside`` takes back. There is more of it than was reserved only
        if more is read at a time."""
        with contextlib.suppress(IndexError):
            return self._free_beside.pop()
        return aio_ext.Memory(max(nbytes, PAGE_BYTES))

    def give_beside(self, beside: Lease | aio_ext.Memory) -> None:
        """Nothing reads into them any more."""
        if isinstance(beside, Lease):
            self._free_beside.append(beside)
        else:
            beside.close()

    def close(self) -> None:
        """Wait for what is in flight, and close the files."""
        self.reads.finish(self._close_queue)
        for opened in self._opened.values():
            opened.descriptor.close()

    def _close_queue(self) -> None:
        try:
            self._queue.close()
        except TimeoutError as error:
            raise StorageTimeout(str(error)) from None


class _InPlaceReads(Reads):
    def __init__(self, files: InPlaceFiles) -> None:
        super().__init__("weights files that are read in place")
        self._files = files

    def failed(self, name: str, error: OSError) -> StorageError:
        """A file that was cut off is the reason why it could not be read."""
        changes = (self._files.change_of(file) for file in self._files.files)
        return next((change for change in changes if change is not None), super().failed(name, error))


class _Opened:
    """A file opened once more: past the page cache, where the file system can, for the queue, and as it is."""

    def __init__(self, file: ReadOnlyFile, queue: aio_ext.Queue) -> None:
        same = f"/proc/self/fd/{file.descriptor}"  # whatever has its name by now
        try:
            self.descriptor = Descriptor(os.open(same, os.O_RDONLY | os.O_CLOEXEC))
            try:
                direct = os.open(same, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = os.dup(self.descriptor.number)
            try:
                self.number = queue.register_file(direct)
            finally:
                os.close(direct)
        except OSError as error:
            raise failed(f"opening {named(file.path)} once more", error) from error


class _Several:
    """Several requests as one transfer."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    @property
    def error(self) -> OSError | None:
        return next((transfer.error for transfer in self._transfers if transfer.error is not None), None)

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.ExitStack() as waiting:  # all of them, also when the first one fails
            for transfer in self._transfers:
                waiting.callback(self._wait_for, transfer, deadline)

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        left = [None] * len(self._transfers)
        if not left:
            call(self)

        def over(_: object) -> None:
            left.pop()
            if not left:
                call(self)

        for transfer in self._transfers:
            transfer.add_done_callback(over)

    def __await__(self) -> Generator[object, None, None]:
        for transfer in self._transfers:
            yield from transfer.__await__()

    def _wait_for(self, transfer: Transfer, deadline: float | None) -> None:
        transfer.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
