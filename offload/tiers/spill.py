"""Gradients that rest on NVMe: they are added up in a buffer, and spilled when the unit's backward is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from offload.memory import tensor_at
from offload.report.meter import Meter
from offload.tiers.gradients import HostGradients
from offload.tiers.home import StoredHome, TileHomes, Transfer
from offload.units import ParameterSpec, UnitSpec
from offload.waiting import Failure, Monitor
from swapper import Lease, OffloadError


class GradientBuffer:
    """One buffer that spilled gradients pass through. ``writes`` are those of the spill under way, if any."""

    def __init__(self, lease: Lease) -> None:
        self.address = lease.address
        self.pool: BufferPool | None = None
        self.owner: SpilledGradients | None = None
        self.writes: tuple[Transfer, ...] = ()
        self.lent = False
        """A speculative update reads it, or will: its bytes stay as they are until then. Guarded by the pool's
        monitor."""

    def end_loan(self) -> None:
        """The bytes are read no more. Any thread."""
        if self.pool is not None:
            self.pool.end_loan(self)


class BufferPool:
    """The buffers, which units take in turn."""

    def __init__(self, buffers: Sequence[GradientBuffer], failure: Failure, meter: Meter) -> None:
        self._buffers = list(buffers)
        for buffer in self._buffers:
            buffer.pool = self
        self._meter = meter
        self._returned = Monitor(failure)
        """Guards ``lent`` of the buffers, and their way from one owner to the next; all else of them belongs to the
        thread that adds gradients. After the caches in the order of locks."""

    def take(self, owner: SpilledGradients) -> GradientBuffer:
        """A buffer that may be overwritten: a free one, else the one whose spill began first.

        When all belong to units whose backward is under way, the oldest is spilled early and read back if need be.
        """
        buffer = next((buffer for buffer in self._buffers if buffer.owner is None), None)
        if buffer is not None:
            buffer.owner = owner
            return buffer
        with self._returned:
            spilled = [buffer for buffer in self._buffers if buffer.writes]
            buffer = next((b for b in spilled if not b.lent), spilled[0] if spilled else self._buffers[0])
            self._wait_for_loan(buffer)
            before, buffer.owner = buffer.owner, owner
        if before is not None:
            before.give_up_buffer()
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def lend(self, buffer: GradientBuffer, owner: SpilledGradients) -> bool:
        """No other unit gets the buffer until ``end_loan``. False: one has it already. Any thread."""
        with self._returned:
            if buffer.owner is not owner:
                return False
            buffer.lent = True
            return True

    def end_loan(self, buffer: GradientBuffer) -> None:
        """The buffer is read no more. Any thread."""
        with self._returned:
            buffer.lent = False
            self._returned.notify_all()

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for write in [write for buffer in self._buffers for write in buffer.writes]:
            with contextlib.suppress(OffloadError):
                write.wait()

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
        super().__init__(0, dtype)
        self.unit = unit
        self.buffer: GradientBuffer | None = None
        self._tiles = tiles
        self._pool = pool
        self._meter = meter
        self._is_spilled = False
        """The store holds what was gathered so far for the coming step."""
        self._is_changed = False
        """The buffer holds more than the store does."""

    def put(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self._is_changed = True
        return super().put(spec, gradient)

    def add(self, spec: ParameterSpec, gradient: torch.Tensor) -> float:
        self._is_changed = True
        return super().add(spec, gradient)

    def rescale_and_add(self, spec: ParameterSpec, factor: float, gradient: torch.Tensor, scale: float) -> float:
        self._is_changed = True
        return super().rescale_and_add(spec, factor, gradient, scale)

    def landing(self, spec: ParameterSpec) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        buffer = self.buffer
        if buffer is None or buffer.writes:
            return
        if self._is_changed:
            self._spill(buffer)
        elif not buffer.lent:  # it was only looked at
            self.buffer, buffer.owner = None, None

    def forget(self) -> None:
        self._is_spilled = False

    def lend(self) -> GradientBuffer | None:
        buffer = self.buffer  # which another unit may take meanwhile
        return buffer if buffer is not None and self._pool.lend(buffer, self) else None

    def wait_until_spilled(self) -> None:
        buffer = self.buffer  # which another unit may take meanwhile
        for write in () if buffer is None else buffer.writes:
            write.wait()

    def give_up_buffer(self) -> None:
        """The buffer is another unit's from now on: the store has, or gets, what lies in it."""
        buffer = self.buffer
        if buffer is not None:
            if self._is_changed:
                self._spill(buffer)
            self._wait_for_spill(buffer)
            self.buffer = None

    def leave(self) -> None:
        buffer = self.buffer
        if buffer is not None:
            self._wait_for_spill(buffer)
            self.buffer, buffer.owner = None, None

    def _address(self, spec: ParameterSpec) -> int:
        """Where the parameter's gradient is now, and may be changed."""
        buffer = self.buffer
        if buffer is None:
            buffer = self.buffer = self._pool.take(self)
            self._fill(buffer)
        elif buffer.writes:
            self._wait_for_spill(buffer)
        self._at = buffer.address
        return super()._address(spec)

    def _fill(self, buffer: GradientBuffer) -> None:
        """What was gathered before, or a clean buffer: padding must not hold another unit's gradients."""
        if not self._is_spilled:
            flat = tensor_at(buffer.address, self.unit.trainable_numel, self._dtype)
            for start, stop in self.unit.gaps:
                flat[start:stop] = 0
            return
        with self._meter.stall("read"):
            reads = [home.read(address, urgent=True) for home, address in self._parts(buffer)]
            for read in reads:
                read.wait()

    def _spill(self, buffer: GradientBuffer) -> None:
        buffer.writes = tuple(home.write(address) for home, address in self._parts(buffer))
        self._is_spilled = True
        self._is_changed = False

    def _wait_for_spill(self, buffer: GradientBuffer) -> None:
        with self._meter.stall("write"):
            for write in buffer.writes:
                write.wait()
        buffer.writes = ()

    def _parts(self, buffer: GradientBuffer) -> Iterator[tuple[StoredHome, int]]:
        """The home of each tile's gradients, and where they are in the buffer."""
        for tile in self._tiles:
            if tile.grads is not None:
                yield tile.grads, buffer.address + tile.tile.start * self._dtype.itemsize
