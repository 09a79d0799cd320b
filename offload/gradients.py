"""Gradients on their way from autograd to their home: added up in RAM, spilled to NVMe when RAM is short of room."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from offload import kernels
from offload.dtypes import kernel_dtype
from offload.failure import Failure
from offload.memory import tensor_at
from offload.report import Meter
from offload.residency import WAIT_TIMEOUT_S
from offload.unit import Gradient, GradientBuffer, Unit
from offload.units import ParameterSpec
from swapper import Extent, OffloadError, Store, Ticket


class Gradients:
    """Takes each gradient as it arrives; the sum of its squares is worked out while it is in cache."""

    def __init__(
        self,
        buffers: Sequence[GradientBuffer],
        store: Store | None,
        dtype: torch.dtype,
        failure: Failure,
        meter: Meter,
    ) -> None:
        self._buffers = list(buffers)
        self._store = store
        self._dtype = dtype
        self._kernel_dtype = kernel_dtype(dtype)
        self._failure = failure
        self._meter = meter
        self._returned = threading.Condition()

    def add(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times ``gradient`` to what is there for the coming step; the first one is copied.

        Reads ``gradient`` only. The scale is applied by the update, unless gradients with different ones meet.
        """
        address = self._address(unit, spec)
        gradient = plain(gradient)
        before = unit.gradients.get(spec)
        if before is not None and before.scale != scale:
            total = self._tensor(unit, spec)
            total.mul_(before.scale).add_(gradient, alpha=scale)
            unit.gradients[spec] = Gradient(self._sum_squares(total), 1.0)
            return
        bring = kernels.convert if before is None else kernels.accumulate
        sum_squares = bring(
            spec.numel,
            address,
            self._kernel_dtype,
            gradient.data_ptr(),
            kernel_dtype(gradient.dtype),
            torch.get_num_threads(),
        )
        unit.gradients[spec] = Gradient(sum_squares, scale)

    def home(self, unit: Unit, spec: ParameterSpec, dtype: torch.dtype) -> torch.Tensor | None:
        """Where the first gradient of a step may be put by others, flat: its home in RAM. None if it has to be added.

        Who puts it there says so: ``arrived``.
        """
        if unit.grads_home is None or dtype != self._dtype or spec in unit.gradients:
            return None
        return self._tensor(unit, spec).view(-1)

    def arrived(self, unit: Unit, spec: ParameterSpec, scale: float, *, squared: bool) -> None:
        """``home`` holds the gradient, to be multiplied by ``scale``; if ``squared``, others find its squares."""
        sum_squares = math.nan if squared else self._sum_squares(self._tensor(unit, spec))
        unit.gradients[spec] = Gradient(sum_squares, scale)

    def read(self, unit: Unit, spec: ParameterSpec) -> torch.Tensor:
        """A copy of the gradient, which must be there."""
        gradient = self._tensor(unit, spec) * unit.gradients[spec].scale
        self._close_outside(unit)
        return gradient

    def write(self, unit: Unit, spec: ParameterSpec, value: torch.Tensor) -> None:
        """Put ``value`` in the place of the gradient, if there was one."""
        unit.gradients.pop(spec, None)
        self.add(unit, spec, value.to("cpu", torch.float32))  # it may be anything that torch would copy
        self._close_outside(unit)

    def _close_outside(self, unit: Unit) -> None:
        if not unit.in_backward:
            self.close(unit)

    def close(self, unit: Unit) -> None:
        """The unit's backward is over: a spilled gradient goes to the store, its buffer becomes available."""
        buffer = unit.grad_buffer
        if buffer is not None and not buffer.writes:
            self._spill(unit, buffer)

    def lend(self, unit: Unit) -> GradientBuffer | None:
        """The unit's buffer, if it has one, to be read until ``end_loan``: nobody else gets it meanwhile."""
        buffer = unit.grad_buffer
        if buffer is not None:
            buffer.lent = True
        return buffer

    def end_loan(self, buffer: GradientBuffer) -> None:
        """Nobody reads the buffer any more. Any thread."""
        with self._returned:
            buffer.lent = False
            self._returned.notify_all()

    def wait_until_spilled(self, unit: Unit) -> None:
        """Block until the store holds what was gathered. Any thread."""
        buffer = unit.grad_buffer  # which another unit may take meanwhile
        for write in () if buffer is None else buffer.writes:
            write.wait()

    def forget(self, unit: Unit) -> None:
        """The gradients belong to a step now, or are not wanted: the next one begins a new sum."""
        unit.gradients = {}
        unit.grads_spilled = False

    def give_up(self, unit: Unit) -> None:
        """The unit's gradients are at home elsewhere from now on. There are none now."""
        buffer = unit.grad_buffer
        if buffer is not None:
            self._wait_for_spill(buffer)
            unit.grad_buffer, buffer.unit = None, None
        unit.grads_home = None

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for write in [write for buffer in self._buffers for write in buffer.writes]:
            with contextlib.suppress(OffloadError):
                write.wait()

    def _tensor(self, unit: Unit, spec: ParameterSpec) -> torch.Tensor:
        """The parameter's gradient, where it may be changed now."""
        return tensor_at(self._address(unit, spec), spec.numel, self._dtype).view(spec.shape)

    def _address(self, unit: Unit, spec: ParameterSpec) -> int:
        """Where that is."""
        return self._writable(unit) + spec.offset * self._dtype.itemsize

    def _sum_squares(self, gradient: torch.Tensor) -> float:
        if gradient.numel() == 0:
            return 0.0
        return kernels.sum_squares(gradient.data_ptr(), gradient.numel(), self._kernel_dtype)

    def _writable(self, unit: Unit) -> int:
        """The address where the unit's gradients may be changed now."""
        if unit.grads_home is not None:
            return unit.grads_home.address
        buffer = unit.grad_buffer
        if buffer is None:
            buffer = self._take_buffer()
            buffer.unit, unit.grad_buffer = unit, buffer
            self._fill(unit, buffer)
        elif buffer.writes:
            self._wait_for_spill(buffer)
        return buffer.lease.address

    def _fill(self, unit: Unit, buffer: GradientBuffer) -> None:
        """What was gathered before, or a clean buffer: padding must not hold another unit's gradients."""
        if not unit.grads_spilled:
            flat = tensor_at(buffer.lease.address, unit.spec.trainable_numel, self._dtype)
            for start, stop in unit.spec.gaps:
                flat[start:stop] = 0
            return
        assert self._store is not None
        with self._meter.stall("read"):
            reads = [
                self._traced("read", unit, extent, self._store.read(extent, address, extent.nbytes, urgent=True))
                for extent, address in self._pieces(unit, buffer)
            ]
            for read in reads:
                read.wait()

    def _take_buffer(self) -> GradientBuffer:
        """A buffer that may be overwritten: a free one, else the one whose spill began first.

        When all belong to units whose backward is under way, the oldest is spilled early and read back if need be.
        """
        idle = [b for b in self._buffers if b.unit is None]
        if idle:
            return idle[0]
        spilled = [b for b in self._buffers if b.writes]
        buffer = next((b for b in spilled if not b.lent), spilled[0] if spilled else self._buffers[0])
        self._wait_for_loan(buffer)
        unit = buffer.unit
        assert unit is not None
        if not buffer.writes:
            self._spill(unit, buffer)
        self._wait_for_spill(buffer)
        unit.grad_buffer, buffer.unit = None, None
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _spill(self, unit: Unit, buffer: GradientBuffer) -> None:
        assert self._store is not None
        buffer.writes = tuple(
            self._traced("write", unit, extent, self._store.write(extent, address, extent.nbytes))
            for extent, address in self._pieces(unit, buffer)
        )
        unit.grads_spilled = True

    def _traced(self, track: str, unit: Unit, extent: Extent, ticket: Ticket) -> Ticket:
        return self._meter.trace.transfer(track, f"gradients of {unit.name}", extent.nbytes, ticket)

    def _wait_for_loan(self, buffer: GradientBuffer) -> None:
        if not buffer.lent:
            return
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        with self._meter.stall("update"), self._returned:
            while buffer.lent:
                self._failure.check()
                if time.monotonic() > deadline:
                    assert buffer.unit is not None
                    raise OffloadError(
                        f"the update of unit {buffer.unit.name} is not done after {WAIT_TIMEOUT_S:.0f} s"
                    )
                self._returned.wait(1.0)

    def _wait_for_spill(self, buffer: GradientBuffer) -> None:
        with self._meter.stall("write"):
            for write in buffer.writes:
                write.wait()
        buffer.writes = ()

    def _pieces(self, unit: Unit, buffer: GradientBuffer) -> Iterator[tuple[Extent, int]]:
        """The extents of the unit's gradients, one for each tile, and where each is in the buffer."""
        for tile in unit.tiles:
            assert tile.grads_extent is not None
            yield tile.grads_extent, buffer.lease.address + tile.start * self._dtype.itemsize


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a kernel can read it."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return gradient.contiguous()
