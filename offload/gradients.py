"""Gradients on their way from autograd to their home: added up in RAM, spilled to NVMe when RAM is short of room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import kernels
from offload.dtypes import kernel_dtype
from offload.memory import tensor_at
from offload.report import Meter
from offload.unit import GradientBuffer, Unit
from offload.units import ParameterSpec
from swapper import OffloadError, Store


class Gradients:
    """Takes each gradient as it arrives; the sum of its squares is worked out while it is in cache."""

    def __init__(
        self, buffers: Sequence[GradientBuffer], store: Store | None, dtype: torch.dtype, meter: Meter
    ) -> None:
        self._buffers = list(buffers)
        self._store = store
        self._dtype = dtype
        self._meter = meter

    def add(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor) -> None:
        """Add ``gradient`` to what is there for the coming step; the first one is copied. Reads ``gradient`` only."""
        address = self._writable(unit) + spec.offset * self._dtype.itemsize
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        total = tensor_at(address, spec.numel, self._dtype).view(spec.shape)
        with torch.no_grad():
            if spec in unit.sum_squares:
                total.add_(gradient)
            else:
                total.copy_(gradient)
        unit.sum_squares[spec] = kernels.sum_squares(address, spec.numel, kernel_dtype(self._dtype))

    def close(self, unit: Unit) -> None:
        """The unit's backward is over: a spilled gradient goes to the store, its buffer becomes available."""
        buffer = unit.grad_buffer
        if buffer is not None and buffer.write is None:
            self._spill(unit, buffer)

    def wait_until_spilled(self, unit: Unit) -> None:
        """Block until the store holds what was gathered. Any thread."""
        buffer = unit.grad_buffer
        write = None if buffer is None else buffer.write
        if write is not None:
            write.wait()

    def forget(self, unit: Unit) -> None:
        """The gradients belong to a step now, or are not wanted: the next one begins a new sum."""
        unit.sum_squares = {}
        unit.grads_spilled = False

    def drain(self) -> None:
        """Wait for every transfer in flight, whatever becomes of it."""
        for buffer in self._buffers:
            if buffer.write is not None:
                try:
                    buffer.write.wait()
                except OffloadError:
                    continue

    def _writable(self, unit: Unit) -> int:
        """The address where the unit's gradients may be changed now."""
        if unit.grads_home is not None:
            return unit.grads_home.address
        buffer = unit.grad_buffer
        if buffer is None:
            buffer = self._take_buffer()
            buffer.unit, unit.grad_buffer = unit, buffer
            self._fill(unit, buffer)
        elif buffer.write is not None:
            with self._meter.stall("write"):
                buffer.write.wait()
            buffer.write = None
            if not unit.sum_squares:
                self._fill(unit, buffer)
        return buffer.lease.address

    def _fill(self, unit: Unit, buffer: GradientBuffer) -> None:
        """What was gathered before, or a clean buffer: padding must not hold another unit's gradients."""
        nbytes = unit.spec.trainable_numel * self._dtype.itemsize
        if not unit.grads_spilled:
            flat = tensor_at(buffer.lease.address, unit.spec.trainable_numel, self._dtype)
            for start, stop in unit.spec.gaps:
                flat[start:stop] = 0
            return
        assert self._store is not None and unit.grads_extent is not None
        with self._meter.stall("read"):
            self._store.read(unit.grads_extent, buffer.lease.address, nbytes, urgent=True).wait()

    def _take_buffer(self) -> GradientBuffer:
        """A buffer that may be overwritten: a free one, else the one whose spill began first.

        When all belong to units whose backward is under way, the oldest is spilled early and read back if need be.
        """
        idle = [b for b in self._buffers if b.unit is None]
        if idle:
            return idle[0]
        buffer = next((b for b in self._buffers if b.write is not None), self._buffers[0])
        unit = buffer.unit
        assert unit is not None
        if buffer.write is None:
            self._spill(unit, buffer)
        assert buffer.write is not None
        with self._meter.stall("write"):
            buffer.write.wait()
        unit.grad_buffer, buffer.unit, buffer.write = None, None, None
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _spill(self, unit: Unit, buffer: GradientBuffer) -> None:
        assert self._store is not None and unit.grads_extent is not None
        nbytes = unit.spec.trainable_numel * self._dtype.itemsize
        buffer.write = self._store.write(unit.grads_extent, buffer.lease.address, nbytes)
        unit.grads_spilled = True
