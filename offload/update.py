"""The update: one background thread runs the optimizer over tiles, unit by unit, in forward order.

[Note: Order of the update] Forward order, so that the next forward waits for each unit's own update and no longer than
that. Everything a step depends on (clip factor, learning rates, step numbers) is frozen before the first tile is
touched, so running under the next forward changes nothing in the result.

[Note: When compute waits for an early update] Where gradients are at home in RAM never: there are no more early updates
than leave compute its slots, and what is not updated early is updated under the next forward. Where gradients are
spilled a later update costs another read of them, so every unit is updated early, from the buffer that its gradients
came to, and compute waits for the slot and the buffer. Such an update needs nothing that compute holds, unless the
update of an earlier step is in its way.

Where a device computes, tiles may be sent there for their update while the CPU goes on with others: see
[Note: Which side updates a tile].
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.device_updates import DeviceUpdates, Trip
from offload.failure import Failure
from offload.gradients import Gradients
from offload.layout import Formats, Tile
from offload.report import Meter
from offload.residency import Weights
from offload.rule import Rule
from offload.speculation import Progress, Speculation
from offload.unit import Slot, StateTile, Unit
from swapper import Extent, Lease, OffloadError, Store, Ticket

_LOOK_AHEAD = 8
"""Tiles at hand among which those for a device are found."""


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of a unit that take the same step, ``frozen`` by the rule."""

    start: int
    stop: int
    frozen: Hashable


@dataclass(frozen=True)
class UnitUpdate:
    """What the step does to one unit."""

    unit: Unit
    segments: tuple[Segment, ...]

    def parts(self, tile: Tile) -> Iterator[Segment]:
        """The segments, as far as they lie in the tile."""
        for segment in self.segments:
            start, stop = max(segment.start, tile.start), min(segment.stop, tile.stop)
            if start < stop:
                yield Segment(start, stop, segment.frozen)


@dataclass(eq=False)
class _Task:
    """The update of one unit, under way."""

    update: UnitUpdate
    num_left: int
    """Tiles that are not done."""
    early: Speculation | None = None
    slot: Slot | None = None
    """That of an early update."""
    weights: int | None = None
    """Where they are, once they are taken."""


@dataclass(eq=False)
class _Piece:
    """One tile of one unit on its way through a buffer. ``buffer`` is None when all of it is at home in RAM."""

    task: _Task
    tile: StateTile
    buffer: Lease | None = None
    reads: list[Ticket] = field(default_factory=list)
    states: int = 0
    grads: int = 0
    trip: Trip | None = None
    """It is updated on a device."""

    def is_read(self) -> bool:
        return all(ticket.done() for ticket in self.reads)

    def is_at_hand(self) -> bool:
        """``Updater._make_ready`` would not wait."""
        return self.is_read() and (self.task.weights is not None or self.task.update.unit.weights_home is not None)


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
        max_early: int,
        device: DeviceUpdates | None,
    ) -> None:
        """``max_early`` slots can be spared for early updates; with a ``device`` there are none."""
        self._max_early = max_early
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
        self._device = device
        self._sent: deque[_Piece] = deque()
        """On the device, or on their way there or back."""
        self._stopping = False
        self._early: deque[Speculation] = deque()
        self._num_early = 0
        """Early updates promised, and not over."""
        self._num_steps = 0
        """Steps whose own updates are not over."""
        self._early_runs = False
        """Somebody will look at ``_early`` again."""
        self._progress = threading.Condition()
        """Guards speculations and the four above."""
        # An idle executor's thread holds no reference to us: an engine that nobody refers to can be collected.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="offload-update")

    def start(self, step: list[UnitUpdate]) -> None:
        """Begin a step's update. Returns at once; each unit is usable again when its own update is done."""
        with self._progress:
            self._num_steps += 1
        self._executor.submit(self._run_step, step)

    def promise(self, unit: Unit) -> bool:
        """Hold the weights of ``unit``, in use now, for an early update; False if it is to be updated in its turn.

        See [Note: When compute waits for an early update]. What is promised is either ``speculate`` or ``renounce``.
        """
        with self._progress:
            if self._num_early >= self._max_early and not self._may_wait(unit):
                return False
            self._num_early += 1
        self._weights.hold(unit)
        return True

    def renounce(self, unit: Unit) -> None:
        """The promised early update will not come."""
        self._weights.let_go(unit)
        with self._progress:
            self._num_early -= 1

    def speculate(self, update: UnitUpdate) -> None:
        """Begin a unit's update before the step is certain. See [Note: Why an early update harms nothing]."""
        update.unit.speculation = speculation = Speculation(update, self._touched(update))
        with self._progress:
            if self._may_wait(update.unit):
                speculation.loan = self._gradients.lend(update.unit)
            self._early.append(speculation)
            if not self._early_runs:
                self._early_runs = True
                self._executor.submit(self._run, self._early_pieces())

    def drop(self, unit: Unit) -> None:
        """Forget the unit's early update, whose premises are no longer true. It reads nothing of the unit any more."""
        speculation, unit.speculation = unit.speculation, None
        if speculation is None:
            return
        with self._progress:
            if self._take_back(speculation):
                return
            while speculation.progress is Progress.RUNNING:
                self._failure.check()
                self._progress.wait(1.0)

    def settle(self, step: list[UnitUpdate]) -> list[UnitUpdate]:
        """Confirm the early updates that are what the step is to be, and forget the others; the updates still to do."""
        remaining = []
        for update in step:
            speculation, update.unit.speculation = update.unit.speculation, None
            if speculation is None or not self._confirm(speculation, update):
                remaining.append(update)
        return remaining

    def _may_wait(self, unit: Unit) -> bool:
        """Compute may wait for an early update of ``unit`` where it finds no slot or no gradient buffer."""
        return unit.grads_home is None and self._num_steps == 0

    def _end_loan(self, speculation: Speculation) -> None:
        if speculation.loan is not None:
            self._gradients.end_loan(speculation.loan)

    def _take_back(self, speculation: Speculation) -> bool:
        """True if it had not begun; it never will."""
        if speculation not in self._early:
            return False
        self._early.remove(speculation)
        self._num_early -= 1
        self._end_loan(speculation)
        self._weights.let_go(speculation.update.unit)
        return True

    def _confirm(self, speculation: Speculation, update: UnitUpdate) -> bool:
        with self._progress:
            if self._take_back(speculation):
                return False
            if speculation.update.segments != update.segments:
                return False
            speculation.accepted = True
            if speculation.progress is Progress.DONE:
                self._exchange(speculation)
            return True

    def stop(self) -> None:
        """End the thread after the tile at hand. What was not updated stays as it was."""
        self._stopping = True
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run_step(self, step: list[UnitUpdate]) -> None:
        if self._device is not None:
            self._device.begin_step()
        self._run(self._pieces(step))
        with self._progress:
            self._num_steps -= 1

    def _run(self, coming: Iterator[_Piece]) -> None:
        try:
            self._failure.check()
            self._update(coming)
        except BaseException as error:
            self._failure.record(error)
            self._weights.wake()

    def _update(self, coming: Iterator[_Piece]) -> None:
        reading: deque[_Piece] = deque()
        try:
            self._read_ahead(coming, reading)
            while (reading or self._sent) and not self._stopping:
                is_read = bool(reading) and reading[0].is_read()
                self._bring_back(wait=not is_read)
                if is_read or (reading and not self._sent):
                    self._make_ready(reading[0])
                    if not self._send(reading):
                        self._apply(reading[0])
                        self._finish(reading.popleft())
                self._read_ahead(coming, reading)
        finally:
            self._drain(reading)

    def _pieces(self, step: list[UnitUpdate]) -> Iterator[_Piece]:
        for update in step:
            tiles = self._touched(update)
            task = _Task(update, len(tiles))
            for tile in tiles:
                yield _Piece(task, tile)

    def _early_pieces(self) -> Iterator[_Piece]:
        while True:
            with self._progress:
                if not self._early:
                    self._early_runs = False
                    return
                early = self._early.popleft()
                early.progress = Progress.RUNNING
            task = _Task(early.update, len(early.tiles), early)
            for tile in early.tiles:
                yield _Piece(task, tile)

    def _make_ready(self, piece: _Piece) -> None:
        """Wait until everything that the piece's update needs is in RAM."""
        task = piece.task
        if task.weights is None:
            self._take_weights(task)
        for ticket in piece.reads:
            ticket.wait()

    def _send(self, reading: deque[_Piece]) -> bool:
        """Send away what a device will have done before the CPU; True if the first piece is gone, which is ready."""
        device, first = self._device, reading[0]
        if device is None:
            return False
        num_elements = 0  # that the CPU is to do
        for piece in list(reading):
            if not piece.is_at_hand():
                break
            update, tile = piece.task.update, piece.tile.tile
            if not device.sooner(tile, num_elements + tile.numel):
                num_elements += tile.numel
                continue
            self._make_ready(piece)
            assert piece.task.weights is not None
            piece.trip = device.begin(update, tile, states=piece.states, weights=piece.task.weights, grads=piece.grads)
            reading.remove(piece)
            self._sent.append(piece)
        return first.trip is not None

    def _bring_back(self, *, wait: bool) -> None:
        """Finish the pieces that are back from the device; ``wait`` for the first one."""
        device = self._device
        while device is not None and self._sent:
            trip = self._sent[0].trip
            assert trip is not None
            if not (wait or trip.is_over()):
                return
            device.end(trip)
            self._finish(self._sent.popleft())
            wait = False

    def _finish(self, piece: _Piece) -> None:
        """The piece is updated: what must leave RAM does, and the unit goes on to whoever needs it after its last."""
        self._write(piece)
        piece.task.num_left -= 1
        if piece.task.num_left == 0:
            self._give_weights_back(piece.task)

    def _take_weights(self, task: _Task) -> None:
        unit = task.update.unit
        if task.early is not None:
            task.slot = self._weights.take_slot(unit)
            task.weights = task.slot.lease.address
            return
        while unit.weights_home is None and self._sent:  # the update pins one slot
            self._bring_back(wait=True)
        task.weights = self._weights.acquire_for_update(unit)

    def _give_weights_back(self, task: _Task) -> None:
        unit, early = task.update.unit, task.early
        if early is None:
            self._weights.end_update(unit)
            return
        assert task.slot is not None
        self._end_loan(early)
        with self._progress:
            self._weights.return_slot(task.slot, unit)
            early.progress = Progress.DONE
            self._num_early -= 1
            if early.accepted:
                self._exchange(early)
            self._progress.notify_all()

    def _exchange(self, early: Speculation) -> None:
        for tile in early.tiles:
            tile.extent, tile.shadow = tile.shadow, tile.extent
        self._weights.exchange(early.update.unit)

    def _touched(self, update: UnitUpdate) -> list[StateTile]:
        """The unit's tiles that some segment lies in."""
        if len(update.unit.tiles) == 1:
            return update.unit.tiles
        return [tile for tile in update.unit.tiles if any(update.parts(tile.tile))]

    def _read_ahead(self, coming: Iterator[_Piece], reading: deque[_Piece]) -> None:
        """Start reading as many pieces as there are free buffers; wait for a buffer only if nothing is on its way."""
        while len(reading) < max(self._num_buffers, 1 if self._device is None else _LOOK_AHEAD):
            self._reap(wait=not (self._free or reading or self._sent))
            if self._num_buffers and not self._free:
                return
            piece = next(coming, None)
            if piece is None:
                return
            self._begin(piece)
            reading.append(piece)

    def _begin(self, piece: _Piece) -> None:
        """Find the piece's states and gradients, or start reading them."""
        unit, tile, early = piece.task.update.unit, piece.tile, piece.task.early
        loan = early.loan if early is not None else None
        lease = unit.grads_home if loan is None else loan.lease
        if tile.home is None or lease is None:
            piece.buffer = self._free.pop()
        if tile.home is not None:
            piece.states = tile.home.address
        else:
            assert piece.buffer is not None and self._store is not None and tile.extent is not None
            piece.states = piece.buffer.address
            piece.reads.append(self._read(f"states of {unit.name}", tile.extent, piece.states))
        if lease is not None:
            piece.grads = lease.address + tile.start * self._formats.grads
        else:
            assert piece.buffer is not None and self._store is not None and tile.grads_extent is not None
            self._gradients.wait_until_spilled(unit)
            piece.grads = piece.buffer.address + (tile.extent.nbytes if tile.extent is not None else 0)
            piece.reads.append(self._read(f"gradients of {unit.name}", tile.grads_extent, piece.grads))
        if early is None:
            self._weights.try_fetch(unit)

    def _apply(self, piece: _Piece) -> None:
        """Run the kernel over the parts of the tile that take a step."""
        task, tile, formats = piece.task, piece.tile.tile, self._formats
        assert task.weights is not None
        span = self._meter.begin_update(task.update.unit.name)
        for part in task.update.parts(tile):
            self._rule.apply(
                part.frozen,
                tile,
                piece.states,
                part.start,
                part.stop,
                weight=task.weights + part.start * formats.weights,
                grad=piece.grads + (part.start - tile.start) * formats.grads,
            )
        seconds = self._meter.end_update(span)
        if self._device is not None:
            self._device.cpu_took(tile, seconds)

    def _write(self, piece: _Piece) -> None:
        """Send the new states back; the buffer is free once they have arrived."""
        if piece.buffer is None:
            return
        if piece.tile.home is not None:
            self._free.append(piece.buffer)
            return
        assert self._store is not None and piece.tile.extent is not None
        extent = piece.tile.extent if piece.task.early is None else piece.tile.shadow
        assert extent is not None
        ticket = self._store.write(extent, piece.states, extent.nbytes)
        write = self._meter.trace.transfer("write", f"states of {piece.task.update.unit.name}", extent.nbytes, ticket)
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
        if self._device is not None:
            with contextlib.suppress(Exception):  # whatever becomes of it
                self._device.drain()
        for piece in (*reading, *self._sent):
            for ticket in piece.reads:
                first = _outcome(ticket) or first
            if piece.buffer is not None:
                self._free.append(piece.buffer)
        self._sent.clear()
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
