"""The update: one background thread runs the optimizer over tiles, unit by unit, in forward order.

[Note: Order of the update] Forward order, so that the next forward waits for each unit's own update and no longer than
that. Everything a step depends on (clip factor, learning rates, step numbers) is frozen before the first tile is
touched, so running under the next forward changes nothing in the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from offload.failure import Failure
from offload.gradients import Gradients
from offload.layout import Formats
from offload.report import Meter
from offload.residency import Weights
from offload.rule import Rule
from offload.unit import StateTile, Unit
from swapper import Extent, Lease, OffloadError, Store, Ticket


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of a unit that take the same step, ``frozen`` by the rule."""

    start: int
    stop: int
    frozen: Hashable


@dataclass(frozen=True)
class UnitUpdate:
    """What the step does to one unit."""

    unit: Unit
    segments: tuple[Segment, ...]


@dataclass
class _Piece:
    """One tile of one unit on its way through a buffer. ``buffer`` is None when all of it is at home in RAM."""

    update: UnitUpdate
    tile: StateTile
    first_of_unit: bool
    last_of_unit: bool
    buffer: Lease | None = None
    reads: list[Ticket] = field(default_factory=list)
    states: int = 0
    grads: int = 0


class Updater:
    """Owns the update thread and the tile buffers. ``start`` hands it a step; ``stop`` ends the thread."""

    def __init__(
        self,
        buffers: Sequence[Lease],
        store: Store | None,
        rule: Rule,
        formats: Formats,
        weights: Weights,
        gradients: Gradients,
        failure: Failure,
        meter: Meter,
    ) -> None:
        self._free = list(buffers)
        self._num_buffers = len(self._free)
        self._writes: deque[tuple[Ticket, Lease]] = deque()
        self._store = store
        self._rule = rule
        self._formats = formats
        self._weights = weights
        self._gradients = gradients
        self._failure = failure
        self._meter = meter
        self._stopping = False
        # An idle executor's thread holds no reference to us: an engine that nobody refers to can be collected.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="offload-update")

    def start(self, step: list[UnitUpdate]) -> None:
        """Begin a step's update. Returns at once; each unit is usable again when its own update is done."""
        self._executor.submit(self._run, step)

    def stop(self) -> None:
        """End the thread after the tile at hand. What was not updated stays as it was."""
        self._stopping = True
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, step: list[UnitUpdate]) -> None:
        try:
            self._failure.check()
            self._update(step)
        except BaseException as error:
            self._failure.record(error)
            self._weights.wake()

    def _update(self, step: list[UnitUpdate]) -> None:
        coming = self._pieces(step)
        reading: deque[_Piece] = deque()
        try:
            self._read_ahead(coming, reading)
            while reading and not self._stopping:
                piece = reading[0]
                unit = piece.update.unit
                if piece.first_of_unit:
                    self._weights.acquire_for_update(unit)
                for ticket in piece.reads:
                    ticket.wait()
                with self._meter.update(unit.name):
                    self._apply(piece)
                reading.popleft()
                self._write(piece)
                if piece.last_of_unit:
                    self._weights.end_update(unit)
                self._read_ahead(coming, reading)
        finally:
            self._drain(reading)

    def _pieces(self, step: list[UnitUpdate]) -> Iterator[_Piece]:
        for update in step:
            tiles = self._touched(update)
            for tile in tiles:
                yield _Piece(update, tile, first_of_unit=tile is tiles[0], last_of_unit=tile is tiles[-1])

    def _touched(self, update: UnitUpdate) -> list[StateTile]:
        """The unit's tiles that some segment lies in."""
        return [
            tile
            for tile in update.unit.tiles
            if any(segment.start < tile.stop and tile.start < segment.stop for segment in update.segments)
        ]

    def _read_ahead(self, coming: Iterator[_Piece], reading: deque[_Piece]) -> None:
        """Start reading as many pieces as there are free buffers; wait for a buffer only if nothing is on its way."""
        while len(reading) < max(self._num_buffers, 1):
            self._reap(wait=not self._free and not reading)
            if self._num_buffers and not self._free:
                return
            piece = next(coming, None)
            if piece is None:
                return
            self._begin(piece)
            reading.append(piece)

    def _begin(self, piece: _Piece) -> None:
        """Find the piece's states and gradients, or start reading them."""
        unit, tile = piece.update.unit, piece.tile
        if tile.home is None or unit.grads_home is None:
            piece.buffer = self._free.pop()
        if tile.home is not None:
            piece.states = tile.home.address
        else:
            assert piece.buffer is not None and self._store is not None and tile.extent is not None
            piece.states = piece.buffer.address
            piece.reads.append(self._read(f"states of {unit.name}", tile.extent, piece.states))
        if unit.grads_home is not None:
            piece.grads = unit.grads_home.address + tile.start * self._formats.grads
        else:
            assert piece.buffer is not None and self._store is not None and tile.grads_extent is not None
            self._gradients.wait_until_spilled(unit)
            piece.grads = piece.buffer.address + (tile.extent.nbytes if tile.extent is not None else 0)
            piece.reads.append(self._read(f"gradients of {unit.name}", tile.grads_extent, piece.grads))
        self._weights.try_fetch(unit)

    def _apply(self, piece: _Piece) -> None:
        """Run the kernel over the parts of the tile that take a step."""
        unit, tile, formats = piece.update.unit, piece.tile, self._formats
        for segment in piece.update.segments:
            start, stop = max(segment.start, tile.start), min(segment.stop, tile.stop)
            if start < stop:
                self._rule.apply(
                    segment.frozen,
                    tile.tile,
                    piece.states,
                    start,
                    stop,
                    weight=unit.address + start * formats.weights,
                    grad=piece.grads + (start - tile.start) * formats.grads,
                )

    def _write(self, piece: _Piece) -> None:
        """Send the new states back; the buffer is free once they have arrived."""
        if piece.buffer is None:
            return
        if piece.tile.home is not None:
            self._free.append(piece.buffer)
            return
        assert self._store is not None and piece.tile.extent is not None
        extent = piece.tile.extent
        ticket = self._store.write(extent, piece.states, extent.nbytes)
        write = self._meter.trace.transfer("write", f"states of {piece.update.unit.name}", extent.nbytes, ticket)
        piece.tile.write = write
        self._writes.append((write, piece.buffer))

    def _read(self, name: str, extent: Extent, address: int) -> Ticket:
        assert self._store is not None
        ticket = self._store.read(extent, address, extent.nbytes)
        return self._meter.trace.transfer("read", name, extent.nbytes, ticket)

    def _reap(self, *, wait: bool) -> None:
        """Take back the buffers of writes that are done, in order; ``wait`` for the first one."""
        while self._writes and (wait or self._writes[0][0].done()):
            ticket, buffer = self._writes[0]
            ticket.wait()
            self._writes.popleft()
            self._free.append(buffer)
            wait = False

    def _drain(self, reading: deque[_Piece]) -> None:
        """On every way out: no transfer is left in flight in our buffers."""
        first: OffloadError | None = None
        for piece in reading:
            for ticket in piece.reads:
                first = _outcome(ticket) or first
            if piece.buffer is not None:
                self._free.append(piece.buffer)
        for ticket, buffer in self._writes:
            first = _outcome(ticket) or first
            self._free.append(buffer)
        self._writes.clear()
        if first is not None:
            raise first


def _outcome(ticket: Ticket) -> OffloadError | None:
    try:
        ticket.wait()
    except OffloadError as error:
        return error
    return None
