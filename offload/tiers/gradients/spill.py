"""Gradients that are stored on NVMe: they are added up in a buffer, and spilled when the unit's backward is over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from offload.interrupts import held_back
from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.host import HostGradients
from offload.tiers.home import StoredHome, TileHomes, Transfer
from offload.units import ParameterSpec, UnitSpec
from offload.unseen import own_work
from offload.waiting import Failure, Monitor
from swapper import Lease, OffloadError


class GradientBuffer:
    """One buffer that spilled gradients pass through."""

    def __init__(self, lease: Lease, pool: BufferPool) -> None:
        self.address = lease.address
        self.owner: SpilledGradients | None = None
        """Unit whose gradients it holds. Nothing else says so."""
        self.transfers: tuple[Transfer, ...] = ()
        """Between it and the store, not known to be over: once it has an owner, those of its spill."""
        self.lent = False
        """A speculative update reads it, or will: its bytes stay as they are until then. Guarded by the pool's
        monitor."""
        self._pool = pool

    def wait(self) -> None:
        """Wait until no transfer is under way."""
        for transfer in self.transfers:
            transfer.wait()
        self.transfers = ()

    def end_loan(self) -> None:
        """The bytes are read no more. Any thread."""
        self._pool.end_loan(self)


class BufferPool:
    """The buffers, which units take in turn."""

    def __init__(self, leases: Sequence[Lease], fence: UpdateFence, failure: Failure, meter: Meter) -> None:
        """``fence``: of the updates that have buffers on loan."""
        self._buffers = [GradientBuffer(lease, self) for lease in leases]
        self._fence = fence
        self._leaving: GradientBuffer | None = None
        """The one that another unit is about to take."""
        self._meter = meter
        self._returned = Monitor(failure)
        """Guards ``lent`` of the buffers, and their way from one owner to the next; all else of them belongs to the
        thread that adds gradients. After the caches in the order of locks."""

    def of(self, owner: SpilledGradients) -> GradientBuffer | None:
        """The one that holds its gradients. Any thread: another unit may take it meanwhile."""
        return next((buffer for buffer in self._buffers if buffer.owner is owner), None)

    def take(self, owner: SpilledGradients, fill: Callable[[GradientBuffer], None]) -> GradientBuffer:
        """A buffer for the gradients of ``owner``, which has ``fill`` put into it what it holds of them: a free one,
        else the one whose spill began first.

        When all belong to units whose backward is under way, the oldest is spilled early and read back if need be.
        """
        buffer = next((buffer for buffer in self._buffers if buffer.owner is None), None) or self._vacate()
        buffer.wait()  # an interrupt may have left reads under way
        fill(buffer)
        buffer.owner = owner
        return buffer

    def lend(self, owner: SpilledGradients) -> GradientBuffer | None:
        """Its buffer, which no other unit gets until ``end_loan``; None if one has it already. Any thread."""
        with self._returned:
            buffer = self.of(owner)
            if buffer is None or buffer is self._leaving:
                return None
            buffer.lent = True
            return buffer

    def end_loan(self, buffer: GradientBuffer) -> None:
        """The buffer is read no more. Any thread."""
        with self._returned:
            buffer.lent = False
            self._returned.notify_all()

    def give_back(self, buffer: GradientBuffer) -> None:
        """Its owner needs it no more, unless it is lent."""
        with self._returned:
            if not buffer.lent:
                buffer.owner = None

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for transfer in [transfer for buffer in self._buffers for transfer in buffer.transfers]:
            with contextlib.suppress(OffloadError):
                transfer.wait()

    def _vacate(self) -> GradientBuffer:
        """The buffer whose turn it is, once its owner's gradients are in the store."""
        with self._returned:
            spilled = [buffer for buffer in self._buffers if buffer.transfers]
            buffer = next((b for b in spilled if not b.lent), spilled[0] if spilled else self._buffers[0])
        if buffer.lent and buffer.owner is not None:  # an update that nobody waits for leaves places to compute
            self._fence.wait(buffer.owner.unit)
        with self._returned:
            self._wait_for_loan(buffer)
            self._leaving = buffer
        try:
            if buffer.owner is not None:
                buffer.owner.give_up_buffer()
        finally:
            self._leaving = None
        self._buffers = [*(other for other in self._buffers if other is not buffer), buffer]
        return buffer

    def _wait_for_loan(self, buffer: GradientBuffer) -> None:
        """Called with the monitor held."""
        if buffer.lent:
            owner = buffer.owner
            name = "a unit" if owner is None else f"unit {owner.unit.name}"
            with self._meter.stall("update"):
                self._returned.wait_until(lambda: not buffer.lent, lambda: f"the speculative update of {name}")


class SpilledGradients(HostGradients):
    """The gradients of one unit: in a buffer during its backward, in the store afterwards, one extent for each tile."""

    spills = True

    def __init__(
        self, unit: UnitSpec, tiles: Sequence[TileHomes], pool: BufferPool, dtype: torch.dtype, meter: Meter
    ) -> None:
        super().__init__(0, dtype, self._changes)
        self.unit = unit
        self._tiles = tiles
        self._pool = pool
        self._meter = meter
        self._is_spilled = False
        """The store holds what was gathered so far for the coming step."""
        self._is_changed = False
        """The buffer holds more than the store does."""
        self._is_used_up = False
        """A step has used all that the store holds, which is there until others come."""
        self.keeps_used = False

    def _changes(self) -> None:
        if self._is_used_up:
            self.forget()
        self._is_changed = True

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        buffer = self._pool.of(self)
        if buffer is None or buffer.transfers:
            return
        if self._is_changed:
            self._spill(buffer)
        else:  # it was only looked at
            self._pool.give_back(buffer)

    def use_up(self, *, all_of_them: bool) -> None:
        self.keeps_used, self._is_used_up = True, all_of_them

    def forget(self) -> None:
        self._is_spilled = self._is_changed = self._is_used_up = self.keeps_used = False

    def lend(self) -> GradientBuffer | None:
        return self._pool.lend(self)

    def wait_until_spilled(self) -> None:
        buffer = self._pool.of(self)
        for write in () if buffer is None else buffer.transfers:
            write.wait()

    def give_up_buffer(self) -> None:
        """The buffer is another unit's from now on: the store has, or gets, what lies in it."""
        buffer = self._pool.of(self)
        if buffer is not None:
            if self._is_changed:
                self._spill(buffer)
            self._wait_for_spill(buffer)
            buffer.owner = None

    def leave(self) -> None:
        buffer = self._pool.of(self)
        if buffer is not None:
            self._wait_for_spill(buffer)
            buffer.owner = None

    def _address(self, spec: ParameterSpec) -> int:
        """Address where the parameter's gradient is now, and may be changed."""
        buffer = self._pool.of(self)
        if buffer is None:
            buffer = self._pool.take(self, self._fill)
        elif buffer.transfers:
            self._wait_for_spill(buffer)
        self._at = buffer.address
        return super()._address(spec)

    @own_work
    def _fill(self, buffer: GradientBuffer) -> None:
        """Fill with what was gathered before, or clean the buffer: padding must not hold another unit's gradients."""
        if not self._is_spilled:
            flat = tensor_at(buffer.address, self.unit.trainable_numel, self._dtype)
            for start, stop in self.unit.gaps:
                flat[start:stop] = 0
            return
        with self._meter.stall("read"):
            with held_back():
                buffer.transfers = tuple(home.read(address, urgent=True) for home, address in self._parts(buffer))
            buffer.wait()

    def _spill(self, buffer: GradientBuffer) -> None:
        """Begin to write. Waits, as every write does, while a commit has its turn at the store."""
        with held_back():
            buffer.transfers = tuple(home.write(address) for home, address in self._parts(buffer))
            self._is_spilled = True
            self._is_changed = False

    def _wait_for_spill(self, buffer: GradientBuffer) -> None:
        with self._meter.stall("write"):
            buffer.wait()

    def _parts(self, buffer: GradientBuffer) -> Iterator[tuple[StoredHome, int]]:
        """The home of each tile's gradients, and where they are in the buffer."""
        for tile in self._tiles:
            if tile.grads is not None:
                yield tile.grads, buffer.address + tile.tile.start * self._dtype.itemsize
