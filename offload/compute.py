"""Where the model computes: on weights as they lie in host memory, or on copies of them in a device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch

from offload.device import Device, Event
from offload.device_gradients import DeviceGradients
from offload.device_homes import DeviceHomes
from offload.device_plan import DevicePlan
from offload.device_squares import Squares
from offload.device_updates import DeviceUpdates
from offload.device_weights import DeviceWeights
from offload.gradients import Gradients
from offload.residency import Weights
from offload.tiles import Tiles
from offload.unit import Unit
from offload.units import ParameterSpec
from offload.update import UnitUpdate
from offload.window import HostWindow
from swapper import OffloadError


class Compute(Protocol):
    """What the engine asks of it. ``begin`` and ``end`` bracket each use of a unit by the model."""

    def begin(self, unit: Unit, *, training: bool) -> None:
        """Put the unit's weights under its parameters, for what the model does next."""

    def end(self, unit: Unit) -> None:
        """The use is over."""

    def take_gradient(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        """Bring a complete gradient home."""

    def end_backward(self, unit: Unit) -> None:
        """The unit has all its gradients of this backward."""

    def settle(self) -> None:
        """Return when all gradients that were taken are home."""

    def forget_gradients(self, unit: Unit) -> None:
        """They belong to a step now, or are not wanted."""

    def outdate(self, units: Iterable[Unit]) -> None:
        """The weights of these units are about to change in host memory: nobody copies them any more."""

    def update(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        """Begin what of a step is done where the model computes; the updates that are left for the host."""

    def end_step(self) -> None:
        """A step was frozen, and its updates have been announced."""

    def moved_bytes(self) -> tuple[int, int]:
        """To the device and to the host, since the engine was made."""

    def busy_seconds(self) -> float | None:
        """How long the device has worked on units since this was asked last. None: it is the training thread's time."""


class HostCompute:
    """The CPU computes: weights are used where they are, gradients are added where they rest."""

    def __init__(self, weights: Weights, gradients: Gradients) -> None:
        self._weights = weights
        self._gradients = gradients

    def begin(self, unit: Unit, *, training: bool) -> None:
        cast(HostWindow, unit.window).open(self._weights.acquire(unit))

    def end(self, unit: Unit) -> None:
        unit.window.close()
        self._weights.release(unit)

    def take_gradient(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        self._gradients.add(unit, spec, gradient, scale)

    def end_backward(self, unit: Unit) -> None:
        self._gradients.close(unit)

    def settle(self) -> None:
        pass

    def forget_gradients(self, unit: Unit) -> None:
        self._gradients.forget(unit)

    def outdate(self, units: Iterable[Unit]) -> None:
        pass

    def update(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        return list(step)

    def end_step(self) -> None:
        pass

    def moved_bytes(self) -> tuple[int, int]:
        return 0, 0

    def busy_seconds(self) -> float | None:
        return None


class DeviceCompute:
    """A device computes: copies of weights go in, gradients come out, each on a stream of its own.

    Nothing goes in or out of units that are at home there (``homes``).
    """

    def __init__(
        self,
        device: Device,
        weights: DeviceWeights,
        gradients: Gradients,
        device_gradients: DeviceGradients,
        homes: DeviceHomes,
        squares: Squares | None,
        updates: DeviceUpdates | None,
    ) -> None:
        """``squares`` are those that the others have begun; None where the device works out none.

        ``updates`` are of what rests on the host; None where the device makes none.
        """
        self.weights = weights
        self._homes = homes
        self._squares = squares
        self._updates = updates
        self._device = device
        self._depth = 0
        self._began: Event | None = None
        self._uses: list[tuple[Event, Event]] = []
        self._gradients = gradients
        self._device_gradients = device_gradients

    def begin(self, unit: Unit, *, training: bool) -> None:
        self.weights.acquire(unit, training=training)
        if self._depth == 0:
            self._began = self._device.compute.record() if training else None
        self._depth += 1

    def end(self, unit: Unit) -> None:
        if not all(unit.window.holds(parameter) for parameter in unit.parameters):
            raise OffloadError(f"unit {unit.name}: its forward has moved its parameters to other memory of its own")
        self.weights.release(unit)
        self._depth -= 1
        if self._depth == 0 and self._began is not None:
            self._uses.append((self._began, self._device.compute.record()))

    def take_gradient(self, unit: Unit, spec: ParameterSpec, gradient: torch.Tensor, scale: float) -> None:
        if unit.on_device:
            self._homes.take(unit, spec, gradient, scale)
        else:
            self._device_gradients.take(unit, spec, gradient, scale)

    def end_backward(self, unit: Unit) -> None:
        if not unit.on_device:
            self._device_gradients.close(unit)

    def settle(self) -> None:
        self._homes.begin_squares()
        self._device_gradients.settle()
        if self._squares is not None:
            self._squares.settle()

    def forget_gradients(self, unit: Unit) -> None:
        if unit.on_device:
            self._homes.forget(unit)
        else:
            self._device_gradients.forget(unit)
            self._gradients.forget(unit)

    def outdate(self, units: Iterable[Unit]) -> None:
        self.weights.outdate(units)

    def update(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        for update in step:
            if update.unit.on_device:
                self._homes.update(update)
        return [update for update in step if not update.unit.on_device]

    def end_step(self) -> None:
        self.weights.end_step()

    def grow(self, units: Sequence[Unit], host: Weights, tiles: Tiles, plan: DevicePlan) -> None:
        """Between steps: bring ``units`` home to the device, and keep to ``plan`` from now on.

        Raises ``DeviceMemoryError`` if there is no room for all of them. Nothing has changed then.
        """
        for unit in units:
            self.weights.give_up(unit)
        self._homes.move_in(units, host, self._gradients, tiles)
        if units and self._squares is not None:
            self._squares.move(plan.homes)
        self.weights.max_bytes, self._device_gradients.max_bytes = plan.weights_bytes, plan.gradients_bytes

    def moved_bytes(self) -> tuple[int, int]:
        to_device, to_host = (0, 0) if self._updates is None else self._updates.copied_bytes
        return self.weights.copied_bytes + to_device, self._device_gradients.copied_bytes + to_host

    def busy_seconds(self) -> float | None:
        uses, self._uses = self._uses, []
        for _, end in uses:
            end.wait()
        return sum(end.seconds_since(begin) for begin, end in uses)
