"""Units that are at home in device memory: weights, masters, moments and gradients rest there, and never leave.

Gradients are added up there, and the step's update runs there, both in the order of compute: nobody waits for a copy.
What comes to the host is one number a parameter, the sum of its squares (``Squares``). Whoever looks at weights,
states or gradients from outside gets a copy in host memory; what he changes there goes back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from offload.device import Device
from offload.device_squares import Squares
from offload.errors import DeviceMemoryError
from offload.gradients import Gradients, plain
from offload.kernel_rule import KernelRule
from offload.layout import Formats, Tile
from offload.memory import tensor_at
from offload.residency import Weights
from offload.unit import Gradient, StateTile, Unit
from offload.units import ParameterSpec
from offload.update import UnitUpdate
from offload.window import DeviceWindow
from swapper import align

if TYPE_CHECKING:
    from offload.tiles import Tiles


class _Home:
    """What rests in device memory of one unit beside its weights, which lie in its window."""

    def __init__(self, unit: Unit, tiles: Sequence[Tile], device: Device, formats: Formats, dtype: torch.dtype) -> None:
        self._device = device
        self._storage = torch.UntypedStorage(0, device=device.torch_device)
        numel = unit.spec.trainable_numel
        grads_bytes = align(numel * formats.grads)
        starts = [grads_bytes]
        for tile in tiles:
            starts.append(starts[-1] + tile.nbytes)
        device.allocate(self._storage, align(starts[-1]))
        self.grads = self._view(0, dtype, numel if formats.grads else 0)
        self.grads.zero_()  # the padding stays so
        self.states = [self._view(start, torch.uint8, tile.nbytes) for start, tile in zip(starts, tiles, strict=False)]
        self.changed = False
        """Gradients have come since their squares were added up."""

    def close(self) -> None:
        self._device.free(self._storage)

    def _view(self, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return tensor.set_(self._storage, start // dtype.itemsize, (numel,))  # type: ignore[call-overload,no-any-return]


class DeviceHomes:
    """The units ``units``. All calls come from one thread at a time, and all work goes to the stream that computes."""

    def __init__(
        self,
        units: Sequence[Unit],
        device: Device,
        rule: KernelRule | None,
        formats: Formats,
        dtypes: tuple[torch.dtype, torch.dtype],
        squares: Squares | None,
    ) -> None:
        """``dtypes`` are those of gradients as autograd makes them, and as they rest. Without training no ``rule``."""
        self._device = device
        self._rule = rule
        self._formats = formats
        self._dtype, self._home_dtype = dtypes
        self._homes: dict[Unit, _Home] = {}
        for unit in units:
            self._homes[unit] = home = _Home(
                unit, [tile for tile, _ in unit.plan.tiles], device, formats, self._home_dtype
            )
            for tile, states in zip(unit.tiles, home.states, strict=True):
                tile.on_device = states
        self._squares = squares

    def move_in(self, units: Sequence[Unit], weights: Weights, gradients: Gradients, tiles: Tiles) -> None:
        """Bring units home whose update is over, which have no gradients and no copies here, from where they rest.

        Raises ``DeviceMemoryError`` if there is no room for all of them. Nothing has changed then.
        """
        homes: dict[Unit, _Home] = {}
        windows: list[DeviceWindow] = []
        try:
            for unit in units:
                assert isinstance(unit.window, DeviceWindow)
                unit.window.allocate()
                windows.append(unit.window)
                layout = [tile for tile, _ in unit.plan.tiles]
                homes[unit] = _Home(unit, layout, self._device, self._formats, self._home_dtype)
        except DeviceMemoryError:
            for window in windows:
                window.close()
            for home in homes.values():
                home.close()
            raise
        self._homes.update(homes)
        for (unit, home), window in zip(homes.items(), windows, strict=True):
            with weights.borrowed(unit) as address:
                self._bring(window.target, address)
            for tile, states in zip(unit.tiles, home.states, strict=True):
                with tiles.opened(tile, to_change=False) as address:
                    self._bring(states, address)
                tile.on_device = states
                tile.home = tile.extent = tile.grads_extent = None
            weights.give_up(unit)
            gradients.give_up(unit)
            unit.plan = unit.plan.moved()

    def take(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times a complete gradient to what is there for the coming step."""
        self._add(unit, spec, gradient.to(self._dtype), scale)

    def begin_squares(self) -> None:
        """Have the squares of all gradients that have come added up."""
        for unit, home in self._homes.items():
            if home.changed:
                assert self._squares is not None
                self._squares.begin(unit, unit.spec.trainable, home.grads)
                home.changed = False

    def update(self, update: UnitUpdate) -> None:
        """Take a unit's step, after what compute was given so far and before what it is given next."""
        unit, rule, formats = update.unit, self._rule, self._formats
        assert isinstance(unit.window, DeviceWindow) and rule is not None
        weights, grads = unit.window.target.data_ptr(), self._homes[unit].grads.data_ptr()
        kernel = self._device.compute.kernel
        for tile in unit.tiles:
            assert tile.on_device is not None
            for part in update.parts(tile.tile):
                rule.apply(
                    part.frozen,
                    tile.tile,
                    tile.on_device.data_ptr(),
                    part.start,
                    part.stop,
                    weight=weights + part.start * formats.weights,
                    grad=grads + part.start * formats.grads,
                    native=kernel,
                )

    def forget(self, unit: Unit) -> None:
        """The unit's gradients belong to a step now, or are not wanted."""
        unit.gradients = {}
        self._homes[unit].changed = False

    # What is seen from outside of the model's own order.

    def read(self, unit: Unit, spec: ParameterSpec) -> torch.Tensor:
        """A copy of the gradient, which must be there."""
        return (self._gradient(unit, spec) * unit.gradients[spec].scale).cpu()

    def write(self, unit: Unit, spec: ParameterSpec, value: torch.Tensor) -> None:
        """Put ``value`` in the place of the gradient, if there was one."""
        unit.gradients.pop(spec, None)
        self._add(unit, spec, value.to(self._device.torch_device), 1.0)

    @contextlib.contextmanager
    def weights(self, unit: Unit, start: int, stop: int, *, to_change: bool) -> Iterator[int]:
        """The address of a copy of the unit's weights ``[start, stop)``. What is changed goes back at the end."""
        assert isinstance(unit.window, DeviceWindow)
        with self._borrowed(unit.window.target[start:stop], to_change) as address:
            yield address

    @contextlib.contextmanager
    def states(self, tile: StateTile, *, to_change: bool) -> Iterator[int]:
        """The address of a copy of the tile. What is changed goes back at the end."""
        assert tile.on_device is not None
        with self._borrowed(tile.on_device, to_change) as address:
            yield address

    def close(self) -> None:
        """Free the device's memory."""
        for unit, home in self._homes.items():
            unit.window.close()
            home.close()

    @contextlib.contextmanager
    def _borrowed(self, tensor: torch.Tensor, to_change: bool) -> Iterator[int]:
        device = self._device
        host = torch.empty_like(tensor, device="cpu")
        device.to_host.wait(device.compute.record())
        device.to_host.copy(host, tensor)
        device.to_host.record().wait()
        yield host.data_ptr()
        if to_change:
            device.to_device.wait(device.compute.record())
            device.to_device.copy(tensor, host)
            device.to_device.record().wait()

    def _bring(self, target: torch.Tensor, address: int) -> None:
        """Copy what is at an address in host memory."""
        source = tensor_at(address, target.numel(), target.dtype)
        self._device.to_device.wait(self._device.compute.record())
        self._device.to_device.copy(target, source)
        self._device.to_device.record().wait()

    def _add(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        total, gradient, before = self._gradient(unit, spec), plain(gradient), unit.gradients.get(spec)
        if before is None:
            total.copy_(gradient)
        elif before.scale == scale:
            total.add_(gradient)
        else:
            total.mul_(before.scale).add_(gradient, alpha=scale)
            scale = 1.0
        unit.gradients[spec] = Gradient(math.nan, scale)  # ``Squares`` will know the sum
        self._homes[unit].changed = True

    def _gradient(self, unit: Unit, spec: ParameterSpec) -> torch.Tensor:
        return self._homes[unit].grads[spec.offset : spec.offset + spec.numel].view(spec.shape)
