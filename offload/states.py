"""Reading and changing a parameter's value from outside of the model's own order."""

from __future__ import annotations

import torch

import aio_ext
from offload.failure import Failure
from offload.layout import Formats
from offload.memory import tensor_at
from offload.residency import Weights
from offload.unit import StateTile, Unit
from offload.units import ParameterSpec
from swapper import Store


class ParameterLink:
    """Reads and writes one parameter for its handle."""

    def __init__(
        self,
        unit: Unit,
        spec: ParameterSpec,
        weights: Weights,
        store: Store | None,
        formats: Formats,
        failure: Failure,
    ) -> None:
        self.name = spec.name
        self._unit = unit
        self._spec = spec
        self._weights = weights
        self._store = store
        self._formats = formats
        self._failure = failure

    def read(self) -> torch.Tensor:
        """A copy of the value, once the last step's update has reached it."""
        with self._failure.guard(), self._weights.borrowed(self._unit) as address:
            return self._tensor(address).clone()

    def write(self, value: torch.Tensor) -> None:
        """Set the value. The fp32 master becomes exactly this; moments stay as they are."""
        with self._failure.guard(), self._weights.borrowed(self._unit, to_change=True) as address, torch.no_grad():
            self._tensor(address).copy_(value)
            if self._formats.master and self._spec.trainable:
                for tile in self._unit.tiles:
                    self._clear_master(tile)

    def _tensor(self, address: int) -> torch.Tensor:
        start = address + self._spec.offset * self._formats.weights
        return tensor_at(start, self._spec.numel, self._unit.dtype).view(self._spec.shape)

    def _clear_master(self, tile: StateTile) -> None:
        """Set to zero what the tile holds of this parameter's master beyond the weight."""
        start = max(self._spec.offset, tile.start) - tile.start
        stop = min(self._spec.offset + self._spec.numel, tile.stop) - tile.start
        if start >= stop:
            return
        numel = tile.stop - tile.start
        if tile.home is not None:
            tensor_at(tile.home.address, numel, torch.int16)[start:stop] = 0
            return
        assert self._store is not None and tile.extent is not None
        nbytes = numel * self._formats.master
        memory = aio_ext.Memory(nbytes)
        self._store.read(tile.extent, memory.address, nbytes, urgent=True).wait()
        tensor_at(memory.address, numel, torch.int16)[start:stop] = 0
        self._store.write(tile.extent, memory.address, nbytes, urgent=True).wait()
        memory.close()
