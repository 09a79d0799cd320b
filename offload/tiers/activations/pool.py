"""The pool of activations: host memory set aside for them, and what of them goes on to NVMe.

Last in, first out: a backward needs first what a forward has kept last. So what was kept first leaves the memory first,
is read back last, and what is kept last is never read. Nothing is written as long as half of the memory is free.

[Note: The way of an activation to NVMe] ``assembly/activations.py`` gives each unit the hooks of its mode, and where it
recomputes a ``RecomputedForward``, whose inputs are what its hooks see. What autograd saves comes to
``OffloadedTensors.pack``, which calls ``keep``: a copy in memory, and ``_write_oldest`` as soon as more than half of it
waits to be written. A place is a range of ``Scratch``, which no commit knows. When a node of backward asks,
``OffloadedTensors.unpack`` calls ``bring``: ``_fetch`` reads what has left, and ``_fetch_ahead`` what backward wants
next. A new kind of hook, or of mode, is a class with ``pack`` and ``unpack`` and a line of ``Activations.tie``.

[Note: The order of backward] Whoever keeps an activation says when a backward comes to it: the greater its order, the
sooner. Where several micro-batches are on their way together, all of them do the backward of one unit, the first one
first, before any does that of the unit before. So of one unit's the last micro-batch's leave first.

[Note: The end of a kept activation] A graph that is freed, with a backward or without, drops what it was given for its
tensors. That may happen in any thread and at any line, so a dropped one is put on a list and nothing else: the next
call of the pool gives its memory back.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

import torch

from offload.errors import ActivationError
from offload.report.meter import Meter
from offload.report.report import ActivationUse
from offload.tiers.activations.copies import Copies, Copying, bytes_of
from swapper import (
    PAGE_BYTES,
    Arena,
    OffloadError,
    Ranges,
    Scratch,
    ScratchRange,
    StorageError,
    Ticket,
    align,
    readable_bytes,
)

_NAME = "activations"
"""Of transfers, in the trace."""

_PIECE_BYTES = 1 << 20
"""A larger activation is kept in pieces of so many bytes: they go out and come in one after the other."""

_PIECES = 8
"""The memory has room for so many pieces: one that compute has, and others on their way."""


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes of an activation: in memory from ``offset`` on, on NVMe in ``place``, or both."""

    nbytes: int
    spills: bool
    order: tuple[int, int, int]
    """Grows with what backward comes to sooner: that of who kept it, then its place among the pool's pieces."""
    offset: int | None
    """In the pool's memory; None: it is on NVMe alone."""
    place: ScratchRange | None = None
    writing: Ticket | None = None
    """Its write, not known to be over."""
    reading: Ticket | None = None
    """The last read, not known to be over."""
    copying: Copying | None = None
    """The last copy between the memory and a device, not known to be over."""
    is_dropped: bool = False
    was_brought: bool = False
    """A backward has had it: it is not fetched ahead any more."""


class Kept:
    """An activation in the pool, from ``keep`` until nobody refers to it any more."""

    __slots__ = ("__weakref__", "_pool", "nbytes", "pieces")

    def __init__(self, pool: ActivationPool, nbytes: int) -> None:
        self._pool = pool
        self.nbytes = nbytes
        self.pieces: list[Piece] = []

    def renew(self, order: tuple[int, int]) -> None:
        """See ``ActivationPool.renew``."""
        self._pool.renew(self, order)

    def bring(self) -> torch.UntypedStorage:
        """A new storage with its bytes, where the model computes. Raises ``ActivationError``."""
        return self._pool.bring(self)

    def __del__(self) -> None:
        self._pool.dropped.append(self.pieces)  # see [Note: The end of a kept activation]


@dataclass(eq=False)
class ActivationPool:
    """See the module's docstring. The thread that computes makes all calls.

    ``scratch`` is the space on NVMe; None: there is none, and nothing may spill.
    """

    memory: Arena
    scratch: Scratch | None
    copies: Copies
    meter: Meter
    dropped: deque[list[Piece]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._ranges = Ranges(self.memory.nbytes)
        self._piece_bytes = min(_PIECE_BYTES, max(self.memory.nbytes // _PIECES // PAGE_BYTES, 1) * PAGE_BYTES)
        self._num_pieces = 0
        self._unwritten: list[Piece] = []
        """In memory alone, and to be written. This and the next two: in their order, so that backward comes to the
        first one last."""
        self._in_memory: list[Piece] = []
        """In memory and on NVMe, or on their way there."""
        self._away: list[Piece] = []
        """On NVMe alone."""
        self._leaving: list[Piece] = []
        """Dropped, while a transfer or a copy is under way."""
        self._excess_bytes = 0
        """Bytes that had no room in the present step."""
        self.use = ActivationUse()

    def keep(
        self, storage: torch.UntypedStorage, start: int, nbytes: int, order: tuple[int, int] = (0, 0), *, spills: bool
    ) -> Kept | None:
        """Take a copy of so many bytes of a storage. None: there is no room, and they must not spill.

        ``order`` says when a backward wants them: see [Note: The order of backward]. Of equal ones the last comes
        first.
        Raises ``ActivationError`` if what spills cannot be written. Nothing was kept then.
        """
        self._collect()
        if not self._ranges.taken_bytes:
            self._excess_bytes = 0  # of a graph that is gone
        kept = Kept(self, nbytes)
        for begin in range(0, nbytes, self._piece_bytes):
            size = min(nbytes - begin, self._piece_bytes)
            offset = self._room(size) if spills else self._ranges.take(size)
            if offset is None:
                self._excess_bytes += align(nbytes)
                return None
            self._num_pieces += 1
            piece = Piece(size, spills, (*order, self._num_pieces), offset)
            kept.pieces.append(piece)
            source = bytes_of(storage, start + begin, size)
            piece.copying = self.copies.out(self.memory.address + offset, source)
            if spills:
                insort(self._unwritten, piece, key=_order)
        self.use.kept_bytes += nbytes
        self.use.host_bytes_max = max(self.use.host_bytes_max, self._ranges.taken_bytes)
        while 2 * self._unwritten_bytes > self._ranges.nbytes:
            if not (_is_copied(self._unwritten[0]) or self._is_short()):
                break  # a device is still at it
            self._write_oldest()
        return kept

    def renew(self, kept: Kept, order: tuple[int, int]) -> None:
        """It was saved again, or will be brought again: that comes as soon as ``order`` says."""
        for piece in kept.pieces:
            self._num_pieces += 1
            for pieces in (self._unwritten, self._in_memory, self._away):
                index = bisect_left(pieces, piece.order, key=_order)
                if pieces[index : index + 1] == [piece]:
                    del pieces[index]
            piece.order, piece.was_brought = (*order, self._num_pieces), False
            if piece.spills:
                insort(self._list_of(piece), piece, key=_order)

    def _list_of(self, piece: Piece) -> list[Piece]:
        if piece.place is None:
            return self._unwritten
        return self._away if piece.offset is None else self._in_memory

    def bring(self, kept: Kept) -> torch.UntypedStorage:
        """See ``Kept.bring``."""
        self._collect()
        self.check()
        flat = torch.empty(kept.nbytes, dtype=torch.uint8, device=self.copies.device)
        begin = kept.nbytes
        for piece in reversed(kept.pieces):  # the last one left last, and was read ahead first
            begin -= piece.nbytes
            piece.was_brought = True
            self._fetch(piece)
            assert piece.offset is not None
            target = bytes_of(flat.untyped_storage(), begin, piece.nbytes)
            self._wait_for_copy(piece)
            piece.copying = self.copies.back(target, self.memory.address + piece.offset)
            self._leave_if_written(piece)
            self._fetch_ahead()
        return flat.untyped_storage()

    def check(self) -> None:
        """Raise ``ActivationError`` if there was no room for what does not spill, now that all of it was counted."""
        if self._excess_bytes:
            excess_bytes, self._excess_bytes = self._excess_bytes, 0
            raise self._too_little(excess_bytes)

    def take_use(self) -> ActivationUse:
        """Bytes that were moved and taken since the last call."""
        use, self.use = self.use, ActivationUse()
        return use

    @property
    def taken_bytes(self) -> int:
        """Bytes of the memory that are taken now, by activations that somebody still wants."""
        self._collect()
        leaving = sum(align(piece.nbytes) for piece in self._leaving if piece.offset is not None)
        return self._ranges.taken_bytes - leaving

    @property
    def nvme_bytes(self) -> int:
        """The same on NVMe."""
        if self.scratch is None:
            return 0
        self._collect()
        leaving = sum(piece.place.nbytes for piece in self._leaving if piece.place is not None)
        return self.scratch.taken_bytes - leaving

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        self._collect()
        for piece in [*self._unwritten, *self._in_memory, *self._leaving]:
            with contextlib.suppress(OffloadError):
                _wait(piece)

    # Memory.

    def _room(self, nbytes: int) -> int:
        """An offset for so many bytes: the oldest pieces make room."""
        while (offset := self._ranges.take(nbytes)) is None:
            if not self._in_memory:
                if not self._unwritten:
                    offset = self._wait_for_leaving(nbytes)
                    break
                self._write_oldest()
                continue
            self._evict(self._in_memory.pop(0))
        return offset

    def _wait_for_leaving(self, nbytes: int) -> int:
        """All that is taken is being left, or is of activations that do not spill."""
        with self.meter.stall("activations"):
            for piece in self._leaving:
                with contextlib.suppress(StorageError):
                    _wait(piece)
        self._collect()
        offset = self._ranges.take(nbytes)
        if offset is None:
            raise self._too_little(nbytes)
        return offset

    def _evict(self, piece: Piece) -> None:
        """Have a piece on NVMe alone."""
        if piece.is_dropped or piece.offset is None:
            return
        try:
            self._wait_for_all(piece)
        except StorageError as error:
            raise _failed("written to", piece, error) from error
        self._free(piece)
        if not piece.was_brought:
            insort(self._away, piece, key=_order)

    def _free(self, piece: Piece) -> None:
        if piece.offset is not None:
            self._ranges.give_back(piece.offset, piece.nbytes)
            piece.offset = None

    @property
    def _unwritten_bytes(self) -> int:
        return sum(align(piece.nbytes) for piece in self._unwritten)

    def _is_short(self) -> bool:
        return 4 * self._unwritten_bytes > 3 * self._ranges.nbytes

    def _collect(self) -> None:
        """Give back what was dropped. See [Note: The end of a kept activation]."""
        while self.dropped:
            for piece in self.dropped.popleft():
                piece.is_dropped = True
                self._leaving.append(piece)
        if self._leaving:
            self._leaving = [piece for piece in self._leaving if not self._left(piece)]
            for pieces in (self._unwritten, self._in_memory, self._away):
                while pieces and pieces[-1].is_dropped:
                    pieces.pop()

    def _left(self, piece: Piece) -> bool:
        """Nothing looks at the piece's memory and place any more, and they were given back."""
        if not _is_over(piece):
            return False
        self._free(piece)
        if piece.place is not None and self.scratch is not None:
            self.scratch.give_back(piece.place)
            piece.place = None
        return True

    # NVMe.

    def _write_oldest(self) -> None:
        piece = self._unwritten.pop(0)
        if piece.is_dropped:
            return
        assert self.scratch is not None
        assert piece.offset is not None
        self._wait_for_copy(piece)
        try:
            piece.place = self.scratch.take(piece.nbytes)
            ticket = self.scratch.write(piece.place, self.memory.address + piece.offset)
        except StorageError as error:
            raise _failed("written to", piece, error) from error
        piece.writing = self.meter.trace.transfer("write", _NAME, piece.nbytes, ticket)
        self.use.write_bytes += piece.place.nbytes
        self.use.nvme_bytes_max = max(self.use.nvme_bytes_max, self.scratch.taken_bytes)
        insort(self._in_memory, piece, key=_order)

    def _read(self, piece: Piece, offset: int, *, urgent: bool) -> None:
        assert self.scratch is not None
        assert piece.place is not None
        try:
            ticket = self.scratch.read(piece.place, self.memory.address + offset, urgent=urgent)
        except StorageError:
            self._ranges.give_back(offset, piece.nbytes)
            raise
        piece.offset, piece.reading = offset, self.meter.trace.transfer("read", _NAME, piece.nbytes, ticket)
        self.use.read_bytes += piece.place.nbytes

    def _fetch(self, piece: Piece) -> None:
        """Have the piece in memory: it may be there, with its write under way or not, on its way, or away."""
        try:
            if piece.offset is None:
                self._read(piece, self._room(piece.nbytes), urgent=True)
                insort(self._in_memory, piece, key=_order)
            if piece.reading is not None:
                with contextlib.nullcontext() if piece.reading.done() else self.meter.stall("activations"):
                    piece.reading.wait()
                piece.reading = None
        except StorageError as error:
            if piece.reading is not None and piece.reading.done():
                piece.reading = None
                self._free(piece)
            raise _failed("read from", piece, error) from error

    def _fetch_ahead(self) -> None:
        """Read what backward will want next, as far as there is room."""
        while self._away:
            piece = self._away[-1]
            if piece.is_dropped or piece.was_brought or piece.offset is not None:
                self._away.pop()
                continue
            offset = self._ranges.take(piece.nbytes)
            if offset is None:
                return
            try:
                self._read(piece, offset, urgent=False)
            except StorageError:  # whoever needs it tries again, and is told
                return
            self._away.pop()
            insort(self._in_memory, piece, key=_order)

    def _leave_if_written(self, piece: Piece) -> None:
        """Compute has a copy. What is on NVMe is read again, should another backward want it."""
        if piece.place is not None and piece.copying is None and (piece.writing is None or piece.writing.done()):
            with contextlib.suppress(StorageError):  # then it stays
                _wait(piece)
                self._free(piece)

    def _wait_for_copy(self, piece: Piece) -> None:
        if not _is_copied(piece):
            with self.meter.stall("activations"):
                _wait_for_copy(piece)

    def _wait_for_all(self, piece: Piece) -> None:
        with contextlib.nullcontext() if _is_over(piece) else self.meter.stall("activations"):
            _wait(piece)

    def _too_little(self, more_bytes: int) -> ActivationError:
        needed = self._ranges.taken_bytes + align(more_bytes)
        return ActivationError(
            f"activation_memory is too small for the activations of this step: {readable_bytes(self._ranges.nbytes)} "
            f"are given, {readable_bytes(needed)} are needed.",
            advice=f'Raise activation_memory to {needed}, or take activations="nvme".',
            needed_bytes=needed,
        )


def _order(piece: Piece) -> tuple[int, int, int]:
    return piece.order


def _is_copied(piece: Piece) -> bool:
    """No copy between the memory and a device is under way."""
    if piece.copying is not None and piece.copying.event.done():
        piece.copying = None
    return piece.copying is None


def _is_over(piece: Piece) -> bool:
    """Nothing is under way between the piece and anything else."""
    return _is_copied(piece) and all(ticket is None or ticket.done() for ticket in (piece.writing, piece.reading))


def _wait_for_copy(piece: Piece) -> None:
    if piece.copying is not None:
        piece.copying.event.wait()
        piece.copying = None


def _wait(piece: Piece) -> None:
    """Wait for all that is under way. Raises ``StorageError`` if the write or a read has failed."""
    _wait_for_copy(piece)
    for ticket in (piece.writing, piece.reading):
        if ticket is not None:
            ticket.wait()
    piece.writing = piece.reading = None


def _failed(what: str, piece: Piece, error: StorageError) -> ActivationError:
    return ActivationError(f"an activation ({readable_bytes(piece.nbytes)}) could not be {what} NVMe: {error.args[0]}")
