"""Sums of squares of gradients that rest in device memory: worked out there, and brought to the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.device import Device
from offload.kernels import SQUARES_BLOCK, SQUARES_LANES
from offload.report import Meter
from offload.units import ParameterSpec, UnitSpec
from swapper import align


def squares_bytes(units: Sequence[UnitSpec]) -> int:
    """Device memory that ``Squares`` takes for these units."""
    return sum(_parts(units))


class Squares:
    """The sums of squares of all trainable parameters of ``units``, each unit's gradients lying flat."""

    def __init__(self, device: Device, units: Sequence[UnitSpec], meter: Meter) -> None:
        self._device = device
        self._meter = meter
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        ranges_bytes, lanes_bytes, sums_bytes = _parts(units)
        device.allocate(self._storage, ranges_bytes + lanes_bytes + sums_bytes)
        rows = [row for unit in units for row in _rows(unit)]
        ranges = self._view(0, torch.int64, 3 * len(rows)).view(-1, 3)
        ranges.copy_(torch.tensor(rows, dtype=torch.int64).view(-1, 3))
        self._sums = self._view(ranges_bytes + lanes_bytes, torch.float64, len(rows))
        self._on_host = torch.zeros(len(rows), dtype=torch.float64)
        self._places: dict[UnitSpec, tuple[int, int]] = {}
        self._of_unit: dict[UnitSpec, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        start = 0
        for unit in units:
            stop = start + len(_trainable(unit))
            lanes = self._view(ranges_bytes, torch.float64, _num_blocks(unit) * SQUARES_LANES)
            self._places[unit] = start, stop
            self._of_unit[unit] = ranges[start:stop], lanes, self._sums[start:stop]
            start = stop

    def begin(self, unit: UnitSpec, gradients: torch.Tensor) -> None:
        """Have the unit's sums worked out, after what compute was given so far."""
        self._device.compute.sum_squares(gradients, *self._of_unit[unit])

    def fetch(self) -> None:
        """Wait for what was begun, and bring it to the host."""
        stream = self._device.to_host
        stream.wait(self._device.compute.record())
        stream.copy(self._on_host, self._sums)
        with self._meter.stall("norms"):
            stream.record().wait()

    def of(self, unit: UnitSpec) -> dict[ParameterSpec, float]:
        """What ``fetch`` has brought of a unit."""
        start, stop = self._places[unit]
        return dict(zip(_trainable(unit), self._on_host[start:stop].tolist(), strict=True))

    def close(self) -> None:
        """Free the device's memory."""
        self._device.free(self._storage)

    def _view(self, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(self._storage, offset // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


def _parts(units: Sequence[UnitSpec]) -> tuple[int, int, int]:
    """Bytes of the ranges, of the lanes (of one unit after the other), and of the sums."""
    num_ranges = sum(len(_trainable(unit)) for unit in units)
    num_lanes = max((_num_blocks(unit) for unit in units), default=0) * SQUARES_LANES
    return align(num_ranges * 24), align(num_lanes * 8), align(num_ranges * 8)


def _rows(unit: UnitSpec) -> list[tuple[int, int, int]]:
    """Start, length and first block of each trainable parameter."""
    rows, block = [], 0
    for spec in _trainable(unit):
        rows.append((spec.offset, spec.numel, block))
        block += _blocks_of(spec)
    return rows


def _trainable(unit: UnitSpec) -> list[ParameterSpec]:
    return [spec for spec in unit.parameters if spec.trainable]


def _blocks_of(spec: ParameterSpec) -> int:
    return -(-spec.numel // SQUARES_BLOCK)


def _num_blocks(unit: UnitSpec) -> int:
    return sum(_blocks_of(spec) for spec in _trainable(unit))
