"""The pipeline: tiles are read, updated and written, several at a time, so that disk and kernel work together.

It knows nothing of steps. Each tile belongs to a *task*, the update of one unit, which says where the weights and
gradients are and where the results go: a confirmed update (``offload.update.updater``) or a speculative one
(``offload.update.speculative``). Where a device computes, tiles may be sent there for their update while the CPU goes
on with others: see [Note: Which side updates a tile]."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.plan.buffers import tile_sizes
from offload.tiers.home import Home, StoredHome, TileHomes, Transfer
from offload.units import Tile
from offload.update.device_side import DeviceSide, Trip
from offload.update.host_side import HostSide, HostWork
from offload.update.state_prefetch import StatePrefetch
from offload.update.step import UnitUpdate
from offload.update.together import Together
from swapper import Lease, OffloadError

_LOOK_AHEAD = 64
"""Tiles at hand at most: those in buffers, and those between them that are used in place."""


class Task(Protocol):
    """The update of one unit, as the pipeline sees it. All calls come from the thread that updates."""

    update: UnitUpdate
    tiles: Sequence[TileHomes]
    grads: int | None
    """Address of the unit's gradients in host memory; None if each tile's are read."""

    def begins(self) -> None:
        """A tile is on its way: the weights will be asked for next."""

    def before_grads(self) -> None:
        """Wait until the gradients of the tiles can be read."""

    def states_at(self, states: Home) -> int:
        """Address to which the new states go of those that rest in host memory."""

    def weights_at_hand(self) -> bool:
        """``weights`` would not wait, and needs no place that a tile under update may hold."""

    def weights(self) -> tuple[int, int] | None:
        """Have the unit's weights in host memory; the address to which the new ones go, and that of those that they are
        made of. None: the task is void by now, and its tiles are passed over."""

    def write(self, states: StoredHome, address: int) -> Transfer:
        """Start writing the new states of a tile."""

    def finish(self) -> None:
        """All tiles are updated, or passed over: the weights go to their home, and waiting uses may go on."""


@dataclass(eq=False, slots=True)
class _TaskState:
    task: Task
    num_left: int
    """Tiles that are not done."""
    weights: tuple[int, int] | None = None
    """Addresses of the new ones and of the old, once they are taken."""
    void: bool = False
    """The tiles are passed over."""


@dataclass(eq=False, slots=True)
class _TileJob:
    """One tile on its way. ``buffer`` is None where states and gradients are used in place."""

    state: _TaskState
    homes: TileHomes
    buffer: Lease | None = None
    reads: list[Transfer] = field(default_factory=list)
    states: int = 0
    states_before: int = 0
    grads: int = 0
    trip: Trip | None = None
    """It is updated on a device."""
    work: HostWork | None = None
    """The CPU was given it."""

    @property
    def needs_buffer(self) -> bool:
        return self.homes.states.stored is not None or self.state.task.grads is None

    def is_read(self) -> bool:
        return not self.reads or all(read.done() for read in self.reads)

    def is_at_hand(self) -> bool:
        """``Pipeline._make_ready`` would not wait."""
        return self.is_read() and (self.state.weights is not None or self.state.task.weights_at_hand())

    def at(self, formats: Formats) -> TileBytes:
        if self.state.weights is None:
            raise RuntimeError(f"the weights of unit {self.state.task.update.unit.name} were not asked for")
        weights, before = (address + self.homes.tile.start * formats.weights for address in self.state.weights)
        return TileBytes(self.states, weights, self.grads, self.states_before, before)


class Pipeline:
    """Owns the tile buffers. ``run`` is called by one thread at a time."""

    def __init__(
        self,
        buffers: Sequence[Lease],
        rule: Rule,
        formats: Formats,
        host: HostSide,
        device: DeviceSide,
        copy: Callable[[int, int, int], None],
    ) -> None:
        """``copy`` copies to an address in host memory from another one so many bytes."""
        self._free = list(buffers)
        self.ahead = StatePrefetch(self._free)
        self._rule = rule
        self._formats = formats
        self._host = host
        self._device = device
        self._copy = copy
        self._writes: deque[tuple[Transfer, Lease]] = deque()
        self._sent: deque[_TileJob] = deque()
        """On the device, or on their way there or back."""
        self._given: deque[_TileJob] = deque()
        """The CPU has them, in order."""
        self._stopping = False

    def stop(self) -> None:
        """End ``run`` after the tile at hand. Units that were not updated stay as they were. Any thread."""
        self._stopping = True

    def run(self, tasks: Iterable[Task | Together]) -> None:
        """Update all tiles of all tasks, in order. Nothing is in flight in our buffers afterwards, on every way out."""
        coming = _Coming(_jobs(tasks))
        reading: deque[_TileJob | Together] = deque()
        try:
            self._read_ahead(coming, reading)
            while (reading or self._is_busy) and not self._stopping:
                is_read = bool(reading) and reading[0].is_read()
                self._end_some(wait=not is_read)
                if is_read or (reading and not self._is_busy):
                    self._do(reading)
                self._read_ahead(coming, reading)
        finally:
            self._drain(reading)

    @property
    def _is_busy(self) -> bool:
        """Tiles are under update."""
        return bool(self._sent or self._given)

    def _do(self, reading: deque[_TileJob | Together]) -> None:
        """Do the first job, or send it and others to the device."""
        first = reading[0]
        if isinstance(first, Together):
            self._host.update_together(first)
            reading.popleft()
            return
        self._make_ready(first)
        if first.state.void:
            self._pass_over(first)
            reading.popleft()
        elif not self._send(first, reading):
            reading.popleft()
            self._give(first)

    def _read_ahead(self, coming: _Coming, reading: deque[_TileJob | Together]) -> None:
        """Start reading as many tiles as there are free buffers; wait for a buffer only if nothing is on its way."""
        while len(reading) < _LOOK_AHEAD:
            if self._writes:
                self._reap(wait=False)
            job = coming.peek()
            if job is None:
                return
            if isinstance(job, Together):
                reading.append(coming.take())
                continue
            if job.needs_buffer and not self._find_buffer(job, wait=not (reading or self._is_busy)):
                return
            reading.append(coming.take())  # first: should it fail half-way, its reads are waited for
            self._begin(job)

    def _find_buffer(self, job: _TileJob, *, wait: bool) -> bool:
        """Give the job a buffer, the one that its states are in already if there is one; ``wait`` for it if there is no
        other way. False: there is none."""
        stored = job.homes.states.stored
        ahead = None if stored is None else self.ahead.take(stored)
        if ahead is not None:
            job.buffer, read = ahead
            job.reads.append(read)
            return True
        while not self._free:
            if self._writes and wait:
                self._reap(wait=True)
            elif not self.ahead.give_up() and not self._free:  # another thread may just have put some back
                if wait:
                    raise RuntimeError(f"unit {job.state.task.update.unit.name} needs a tile buffer, and there is none")
                return False
        job.buffer = self._free.pop()
        return True

    def _begin(self, job: _TileJob) -> None:
        """Find the tile's states and gradients, or start reading them."""
        task, homes = job.state.task, job.homes
        stored = homes.states.stored
        if stored is not None and job.buffer is not None:
            job.states = job.states_before = job.buffer.address
            if not job.reads:
                job.reads.append(stored.read(job.states))
        elif homes.states.address is not None:
            job.states, job.states_before = task.states_at(homes.states), homes.states.address
        else:
            raise RuntimeError(f"states of unit {task.update.unit.name} rest where the pipeline cannot bring them from")
        if task.grads is not None:
            job.grads = task.grads + homes.tile.start * self._formats.grads
        elif homes.grads is not None and job.buffer is not None:
            task.before_grads()
            job.grads = job.buffer.address + (stored.nbytes if stored is not None else 0)
            job.reads.append(homes.grads.read(job.grads))
        else:
            raise RuntimeError(f"gradients of unit {task.update.unit.name} rest nowhere")
        task.begins()

    def _make_ready(self, job: _TileJob) -> None:
        """Wait until everything that the tile's update needs is in host memory."""
        state = job.state
        if state.weights is None and not state.void:
            while self._is_busy and not state.task.weights_at_hand():  # the update pins one place at a time
                self._end_some(wait=True)
            state.weights = state.task.weights()
            state.void = state.weights is None
        for read in job.reads:
            read.wait()

    def _send(self, first: _TileJob, reading: deque[_TileJob | Together]) -> bool:
        """Send tiles that a device will have done before the CPU; True if the first one is gone, which is ready."""
        jobs = [job for job in reading if not isinstance(job, Together)]
        at_hand = itertools.takewhile(_TileJob.is_at_hand, jobs)
        given = sum(job.homes.tile.numel for job in self._given)
        for index in self._device.sooner((job.homes.tile for job in at_hand), given):
            job = jobs[index]
            self._make_ready(job)
            if job.state.void:
                continue  # its turn to be passed over comes
            job.trip = self._device.begin(job.state.task.update, job.homes.tile, job.at(self._formats))
            reading.remove(job)
            self._sent.append(job)
        return first.trip is not None

    def _end_some(self, *, wait: bool) -> None:
        """Finish the tiles that are updated on either side; ``wait`` for one if there is any, the CPU's rather."""
        while self._given:
            work = self._given[0].work
            if work is None or not (wait or work.is_over()):
                break
            self._host.end(work)
            self._finish(self._given.popleft())
            wait = False
        while self._sent:
            trip = self._sent[0].trip
            if trip is None or not (wait or trip.is_over()):
                break
            self._device.end(trip)
            self._finish(self._sent.popleft())
            wait = False

    def _give(self, job: _TileJob) -> None:
        """Have the CPU update a tile; wait for those before it that leave no place in its queue."""
        update, tile = job.state.task.update, job.homes.tile
        at = job.at(self._formats)
        if not (at.is_in_place or (self._rule.is_one_kernel and update.covers(tile))):
            at = self._copied(tile, at)
        job.work = self._host.begin(update, tile, at)
        if job.work is None:
            self._finish(job)
            return
        self._given.append(job)
        ahead = self._host.num_ahead if self._device.can_compare else 0
        while len(self._given) > ahead:
            self._end_some(wait=True)

    def _copied(self, tile: Tile, at: TileBytes) -> TileBytes:
        """Have the old states and weights where the new ones go: not all of them change."""
        states, weights, _ = tile_sizes(tile, self._formats)
        for target, source, nbytes in (
            (at.states, at.states_before, states),
            (at.weights, at.weights_before, weights),
        ):
            if target != source:
                self._copy(target, source, nbytes)
        return TileBytes.in_place(at.states, at.weights, at.grads)

    def _finish(self, job: _TileJob) -> None:
        """The tile is updated: its states go to their home, and after its last tile the unit."""
        stored, buffer = job.homes.states.stored, job.buffer
        if buffer is not None:
            if stored is None:
                self._free.append(buffer)
            else:
                self._writes.append((job.state.task.write(stored, job.states), buffer))
        self._count(job)

    def _pass_over(self, job: _TileJob) -> None:
        """The tile stays as it was."""
        if job.buffer is not None:
            self._free.append(job.buffer)
        self._count(job)

    def _count(self, job: _TileJob) -> None:
        job.state.num_left -= 1
        if job.state.num_left == 0:
            job.state.task.finish()

    def _reap(self, *, wait: bool) -> None:
        """Take back the buffers of writes that are done, in order; ``wait`` for the first one."""
        while self._writes and (wait or self._writes[0][0].done()):
            write, buffer = self._writes[0]
            write.wait()
            self._writes.popleft()
            self._free.append(buffer)
            wait = False

    def _drain(self, reading: deque[_TileJob | Together]) -> None:
        """Wait for all transfers in our buffers, and raise what the first of them failed with."""
        first: OffloadError | None = None
        with contextlib.suppress(Exception):  # the error that led here is the one that counts
            self._device.drain()
        for job in self._given:
            if job.work is not None:
                self._host.end(job.work)
        for job in (*(job for job in reading if not isinstance(job, Together)), *self._sent, *self._given):
            for read in job.reads:
                outcome = _outcome(read)
                first = first or outcome
            if job.buffer is not None:
                self._free.append(job.buffer)
        self._sent.clear()
        self._given.clear()
        for write, buffer in self._writes:
            outcome = _outcome(write)
            first = first or outcome
            self._free.append(buffer)
        self._writes.clear()
        if first is not None:
            raise first


class _Coming:
    """The jobs that are to come, with a look at the first one."""

    def __init__(self, jobs: Iterator[_TileJob | Together]) -> None:
        self._jobs = jobs
        self._first: _TileJob | Together | None = None

    def peek(self) -> _TileJob | Together | None:
        """The next job; None if there are no more, for now."""
        if self._first is None:
            self._first = next(self._jobs, None)
        return self._first

    def take(self) -> _TileJob | Together:
        """The job that ``peek`` gave."""
        first, self._first = self._first, None
        assert first is not None
        return first


def _jobs(tasks: Iterable[Task | Together]) -> Iterator[_TileJob | Together]:
    for task in tasks:
        if isinstance(task, Together):
            yield task
            continue
        state = _TaskState(task, len(task.tiles))
        for tile in task.tiles:
            yield _TileJob(state, tile)


def _outcome(transfer: Transfer) -> OffloadError | None:
    try:
        transfer.wait()
    except OffloadError as error:
        return error
    return None
