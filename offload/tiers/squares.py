"""Sums of squares of gradients, worked out where autograd makes them, and brought to the host.

Gradients that rest on the device are added up there first, unit by unit, and their sums come in one copy a step; one
that leaves is looked at before it goes, and the sums of a unit follow its gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

import aio_ext
from offload.device.protocol import Device, Event
from offload.kernels import SQUARES_LANES
from offload.memory import tensor_at
from offload.plan.buffers import SquaresGroup, num_blocks, squares_groups, squares_parts, squares_rows
from offload.report.meter import Meter
from offload.units import ParameterSpec, UnitSpec
from swapper import PAGE_BYTES, align


@dataclass(frozen=True)
class SentSums:
    """Sums on their way to the host. ``views`` of the memory on either side live as long as it does."""

    arrived: Event
    places: dict[ParameterSpec, int]
    views: tuple[torch.Tensor, torch.Tensor]

    def read(self) -> dict[ParameterSpec, float]:
        """The sums, once they have arrived. Any thread."""
        values = self.views[0].tolist()
        return {spec: values[place] for spec, place in self.places.items()}


class Squares:
    """Sums for all trainable parameters. All calls come from one thread at a time."""

    def __init__(self, device: Device, units: Sequence[UnitSpec], resident: Collection[int], meter: Meter) -> None:
        self._device = device
        self._units = units
        self._meter = meter
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self._begun: set[ParameterSpec] = set()
        num_trainable = sum(len(unit.trainable) for unit in units)
        self._landing = aio_ext.Memory(max(align(8 * num_trainable), PAGE_BYTES))
        device.pin(self._landing.address, self._landing.nbytes)
        self._on_host = tensor_at(self._landing.address, num_trainable, torch.float64)
        self._lay_out(resident)

    def move(self, resident: Collection[int]) -> None:
        """Other units are resident there from now on. Nothing is begun."""
        self._device.free(self._storage)
        self._lay_out(resident)

    def _lay_out(self, resident: Collection[int]) -> None:
        device = self._device
        groups = squares_groups(self._units, resident)
        rows = [row for group in groups for row in squares_rows(group)]
        ranges_bytes, lanes_bytes, sums_bytes = squares_parts(groups)
        device.allocate(self._storage, ranges_bytes + lanes_bytes + sums_bytes)
        ranges = self._view(0, torch.int64, 3 * len(rows)).view(len(rows), 3)
        ranges.copy_(torch.tensor(rows, dtype=torch.int64).view(len(rows), 3))
        self._sums = self._view(ranges_bytes + lanes_bytes, torch.float64, len(rows))
        self._kernel_arguments: dict[SquaresGroup, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._places: dict[ParameterSpec, int] = {}
        for group in groups:
            start = len(self._places)
            self._places.update({spec: start + index for index, spec in enumerate(group)})
            stop = len(self._places)
            lanes = self._view(ranges_bytes, torch.float64, num_blocks(group) * SQUARES_LANES)
            self._kernel_arguments[group] = ranges[start:stop], lanes, self._sums[start:stop]

    def begin(self, specs: SquaresGroup, gradients: torch.Tensor) -> None:
        """Have the sums of these parameters worked out from flat ``gradients``, after what compute was given so far."""
        self._device.compute.sum_squares(gradients, *self._kernel_arguments[specs])
        self._begun.update(specs)

    def forget(self, spec: ParameterSpec) -> None:
        """What was begun for it holds no more."""
        self._begun.discard(spec)

    def send(self, specs: Collection[ParameterSpec]) -> SentSums | None:
        """Have those of these parameters' sums that were begun brought to the host, all in one copy; None if there are
        none."""
        places = {spec: self._places[spec] for spec in specs if spec in self._begun}
        if not places:
            return None
        self._begun.difference_update(places)
        start, stop = min(places.values()), max(places.values()) + 1
        on_host, sums = self._on_host[start:stop], self._sums[start:stop]
        stream = self._device.to_host
        stream.wait(self._device.compute.record())
        stream.copy(on_host, sums)
        return SentSums(stream.record(), {spec: place - start for spec, place in places.items()}, (on_host, sums))

    def collect(self) -> dict[ParameterSpec, float]:
        """Wait for the sums that were begun and not sent, and return them. All that was sent has been read."""
        sent = self.send(self._begun)
        if sent is None:
            return {}
        with self._meter.stall("norms"):
            sent.arrived.wait()
        return sent.read()

    def close(self) -> None:
        """Free the device's memory, and what the host has for it."""
        self._device.free(self._storage)
        self._device.unpin(self._landing.address)
        self._landing.close()

    def _view(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(self._storage, offset // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]
