"""Sums of squares of gradients, worked out where autograd makes them, and brought to the host in one copy a step.

Gradients that rest on the device are added up there first, unit by unit; one that leaves is looked at before it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from offload.device import Device
from offload.kernels import SQUARES_BLOCK, SQUARES_LANES
from offload.report import Meter
from offload.units import ParameterSpec, UnitSpec
from swapper import align

if TYPE_CHECKING:
    from offload.unit import Unit

_Group = tuple[ParameterSpec, ...]
"""Parameters whose gradients lie in one piece of memory, each as far from the first as in its unit."""


def squares_bytes(units: Sequence[UnitSpec], homes: Collection[int]) -> int:
    """Device memory that ``Squares`` takes for these units, of which ``homes`` are at home there."""
    return sum(_parts(_groups(units, homes)))


class Squares:
    """Sums for all trainable parameters. All calls come from one thread at a time."""

    def __init__(self, device: Device, units: Sequence[UnitSpec], homes: Collection[int], meter: Meter) -> None:
        self._device = device
        self._units = units
        self._meter = meter
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        self._begun: dict[ParameterSpec, Unit] = {}
        self._lay_out(homes)

    def move(self, homes: Collection[int]) -> None:
        """Other units are at home there from now on. Nothing is begun."""
        self._device.free(self._storage)
        self._lay_out(homes)

    def _lay_out(self, homes: Collection[int]) -> None:
        device = self._device
        groups = _groups(self._units, homes)
        rows = [row for group in groups for row in _rows(group)]
        ranges_bytes, lanes_bytes, sums_bytes = _parts(groups)
        device.allocate(self._storage, ranges_bytes + lanes_bytes + sums_bytes)
        ranges = self._view(0, torch.int64, 3 * len(rows)).view(len(rows), 3)
        ranges.copy_(torch.tensor(rows, dtype=torch.int64).view(len(rows), 3))
        self._sums = self._view(ranges_bytes + lanes_bytes, torch.float64, len(rows))
        self._on_host = torch.zeros(len(rows), dtype=torch.float64)
        self._kernel_arguments: dict[_Group, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._places: dict[ParameterSpec, int] = {}
        for group in groups:
            start = len(self._places)
            self._places.update({spec: start + index for index, spec in enumerate(group)})
            stop = len(self._places)
            lanes = self._view(ranges_bytes, torch.float64, _num_blocks(group) * SQUARES_LANES)
            self._kernel_arguments[group] = ranges[start:stop], lanes, self._sums[start:stop]

    def begin(self, unit: Unit, specs: _Group, gradients: torch.Tensor) -> None:
        """Have the sums of these parameters worked out from flat ``gradients``, after what compute was given so far.

        ``settle`` puts them where ``unit`` keeps what is known of them.
        """
        self._device.compute.sum_squares(gradients, *self._kernel_arguments[specs])
        self._begun.update(dict.fromkeys(specs, unit))

    def forget(self, spec: ParameterSpec) -> None:
        """What was begun for it holds no more."""
        self._begun.pop(spec, None)

    def settle(self) -> None:
        """Wait for what was begun, and put it in its place."""
        if not self._begun:
            return
        stream = self._device.to_host
        stream.wait(self._device.compute.record())
        stream.copy(self._on_host, self._sums)
        with self._meter.stall("norms"):
            stream.record().wait()
        sums = self._read()
        for spec, unit in self._begun.items():
            if spec in unit.gradients:
                unit.gradients[spec].sum_squares = sums[self._places[spec]]
        self._begun = {}

    def close(self) -> None:
        """Free the device's memory."""
        self._device.free(self._storage)

    def _read(self) -> list[float]:
        return self._on_host.tolist()  # type: ignore[no-any-return]

    def _view(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(self._storage, offset // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


def _groups(units: Sequence[UnitSpec], homes: Collection[int]) -> list[_Group]:
    groups: list[_Group] = []
    for unit in units:
        if unit.index in homes:
            groups.append(unit.trainable)
        else:
            groups += [(spec,) for spec in unit.trainable]
    return groups


def _parts(groups: Sequence[_Group]) -> tuple[int, int, int]:
    """Bytes of the ranges, of the lanes (which are one group's after the other's), and of the sums."""
    num_ranges = sum(len(group) for group in groups)
    num_lanes = max((_num_blocks(group) for group in groups), default=0) * SQUARES_LANES
    return align(num_ranges * 24), align(num_lanes * 8), align(num_ranges * 8)


def _rows(group: _Group) -> list[tuple[int, int, int]]:
    """Start, length and first block of each parameter."""
    rows, block = [], 0
    for spec in group:
        rows.append((spec.offset - group[0].offset, spec.numel, block))
        block += _blocks_of(spec)
    return rows


def _blocks_of(spec: ParameterSpec) -> int:
    return -(-spec.numel // SQUARES_BLOCK)


def _num_blocks(group: _Group) -> int:
    return sum(_blocks_of(spec) for spec in group)
