"""Units that move to a device once the first step has shown what its activations leave free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload.device.protocol import Device
from offload.errors import DeviceMemoryError
from offload.optim.formats import Formats
from offload.plan.device import DevicePlan
from offload.tiers.bounce import Bounce
from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.transport import GradientTransport
from offload.tiers.home import DeviceHome, TileHomes, UnitHomes
from offload.tiers.weights.device import DeviceLevel
from offload.tiers.weights.host import HostLevel
from offload.tiers.window import DeviceWindow
from offload.units import Tile, UnitSpec
from swapper import align


@dataclass(eq=False)
class DeviceHomes:
    """Makes homes in a device's memory: a unit's weights in its window, gradients and states in one storage."""

    device: Device
    windows: Sequence[DeviceWindow]
    """One for each unit, closed."""
    formats: Formats
    grads_dtype: torch.dtype
    bounce: Bounce

    def __post_init__(self) -> None:
        self._made: list[tuple[DeviceWindow, torch.UntypedStorage]] = []

    def make(self, unit: UnitSpec, tiles: Sequence[Tile]) -> UnitHomes:
        """Homes for a unit, whose window is open from now on. Raises ``DeviceMemoryError``; nothing was taken then."""
        window, storage = self.windows[unit.index], torch.UntypedStorage(0, device=self.device.torch_device)
        grads_numel = unit.trainable_numel if self.formats.grads else 0
        starts = [align(grads_numel * self.grads_dtype.itemsize)]
        for tile in tiles:
            starts.append(starts[-1] + tile.nbytes)
        window.allocate()
        try:
            self.device.allocate(storage, align(starts[-1]))
        except DeviceMemoryError:
            window.close()
            raise
        self._made.append((window, storage))
        grads = self._view(storage, 0, self.grads_dtype, grads_numel)
        grads.zero_()  # the padding stays so
        states = [
            TileHomes(tile, self._home(self._view(storage, start, torch.uint8, tile.nbytes)))
            for tile, start in zip(tiles, starts, strict=False)
        ]
        return UnitHomes(self._home(window.target), self._home(grads), states)

    def undo(self, count: int) -> None:
        """Free what was made last for so many units."""
        for _ in range(count):
            window, storage = self._made.pop()
            self.device.free(storage)
            window.close()

    def close(self) -> None:
        """Free the device's memory."""
        self.undo(len(self._made))

    def _home(self, tensor: torch.Tensor) -> DeviceHome:
        return DeviceHome(self.device, tensor, self.bounce)

    def _view(self, storage: torch.UntypedStorage, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self.device.torch_device)
        return tensor.set_(storage, start // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


@dataclass(eq=False)
class Growth:
    """Moves units to the device, between steps."""

    homes: list[UnitHomes]
    device_homes: DeviceHomes
    host: HostLevel
    weights: DeviceLevel
    arrive: Callable[[UnitSpec], None]
    """Tells compute that a unit is resident."""
    gradients: GradientStore
    transport: GradientTransport
    squares: Squares

    def grow(self, units: Sequence[UnitSpec], plan: DevicePlan) -> None:
        """Make ``units`` resident on the device, and keep to ``plan`` from now on. Their updates are over, and they
        have no gradients.

        Raises ``DeviceMemoryError`` if there is no room for all of them. Only copies were dropped then.
        """
        for unit in units:
            self.weights.cache.drop(unit)
        for unit, homes in zip(units, self._reserve(units), strict=True):
            self._move(unit, homes)
        if units:
            self.squares.move(plan.resident)
        self.weights.carrier.max_bytes, self.transport.max_bytes = plan.weights_bytes, plan.gradients_bytes

    def _reserve(self, units: Sequence[UnitSpec]) -> list[UnitHomes]:
        made: list[UnitHomes] = []
        try:
            for unit in units:
                made.append(self.device_homes.make(unit, [tile.tile for tile in self.homes[unit.index].tiles]))
        except DeviceMemoryError:
            self.device_homes.undo(len(made))
            raise
        return made

    def _move(self, unit: UnitSpec, new: UnitHomes) -> None:
        old = self.homes[unit.index]
        with self.host.borrow(unit) as address:
            new.weights.bring(address)
        for tile, target in zip(old.tiles, new.tiles, strict=True):
            with tile.states.borrow(change=False) as address:
                target.states.bring(address)
        self.host.leave(unit)
        self.gradients.gradients_of(unit).leave()
        self.homes[unit.index] = new
        if new.grads is not None and new.grads.tensor is not None:
            self.gradients.move(unit, DeviceGradients(unit, new.grads.tensor, self.squares))
        self.arrive(unit)
