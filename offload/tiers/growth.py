"""Units that move to a device once the first step has shown what its activations leave free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class DeviceHomes:
    """Makes homes in a device's memory: a unit's weights in its window, gradients and states in one storage."""

    def __init__(
        self,
        device: Device,
        windows: Sequence[DeviceWindow],
        formats: Formats,
        grads_dtype: torch.dtype,
        bounce: Bounce,
    ) -> None:
        """``windows``: one for each unit, closed."""
        self._device = device
        self._windows = windows
        self._formats = formats
        self._dtype = grads_dtype
        self._made: list[tuple[DeviceWindow, torch.UntypedStorage]] = []
        self._bounce = bounce

    def make(self, unit: UnitSpec, tiles: Sequence[Tile]) -> UnitHomes:
        """Homes for a unit, whose window is open from now on. Raises ``DeviceMemoryError``; nothing was taken then."""
        window, storage = self._windows[unit.index], torch.UntypedStorage(0, device=self._device.torch_device)
        grads_numel = unit.trainable_numel if self._formats.grads else 0
        starts = [align(grads_numel * self._dtype.itemsize)]
        for tile in tiles:
            starts.append(starts[-1] + tile.nbytes)
        window.allocate()
        try:
            self._device.allocate(storage, align(starts[-1]))
        except DeviceMemoryError:
            window.close()
            raise
        self._made.append((window, storage))
        grads = self._view(storage, 0, self._dtype, grads_numel)
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
            self._device.free(storage)
            window.close()

    def close(self) -> None:
        """Free the device's memory."""
        self.undo(len(self._made))

    def _home(self, tensor: torch.Tensor) -> DeviceHome:
        return DeviceHome(self._device, tensor, self._bounce)

    def _view(self, storage: torch.UntypedStorage, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(storage, start // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


class Growth:
    """Moves units to the device, between steps."""

    def __init__(
        self,
        homes: list[UnitHomes],
        device_homes: DeviceHomes,
        host: HostLevel,
        weights: DeviceLevel,
        arrive: Callable[[UnitSpec], None],
        gradients: GradientStore,
        transport: GradientTransport,
        squares: Squares,
    ) -> None:
        """``arrive`` tells compute that a unit is resident."""
        self._homes = homes
        self._device_homes = device_homes
        self._host = host
        self._weights = weights
        self._arrive = arrive
        self._gradients = gradients
        self._transport = transport
        self._squares = squares

    def grow(self, units: Sequence[UnitSpec], plan: DevicePlan) -> None:
        """Make ``units`` resident on the device, and keep to ``plan`` from now on. Their updates are over, and they
        have no gradients.

        Raises ``DeviceMemoryError`` if there is no room for all of them. Only copies were dropped then.
        """
        for unit in units:
            self._weights.cache.drop(unit)
        for unit, homes in zip(units, self._reserve(units), strict=True):
            self._move(unit, homes)
        if units:
            self._squares.move(plan.resident)
        self._weights.carrier.max_bytes, self._transport.max_bytes = plan.weights_bytes, plan.gradients_bytes

    def _reserve(self, units: Sequence[UnitSpec]) -> list[UnitHomes]:
        made: list[UnitHomes] = []
        try:
            for unit in units:
                made.append(self._device_homes.make(unit, [tile.tile for tile in self._homes[unit.index].tiles]))
        except DeviceMemoryError:
            self._device_homes.undo(len(made))
            raise
        return made

    def _move(self, unit: UnitSpec, new: UnitHomes) -> None:
        old = self._homes[unit.index]
        with self._host.borrow(unit) as address:
            new.weights.bring(address)
        for tile, target in zip(old.tiles, new.tiles, strict=True):
            with tile.states.borrow(change=False) as address:
                target.states.bring(address)
        self._host.leave(unit)
        self._gradients.gradients_of(unit).leave()
        self._homes[unit.index] = new
        if new.grads is not None and new.grads.tensor is not None:
            self._gradients.move(unit, DeviceGradients(unit, new.grads.tensor, self._squares))
        self._arrive(unit)
