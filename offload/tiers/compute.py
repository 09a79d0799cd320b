"""Where the model computes: on weights as they lie in host memory, or on copies of them in a device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from offload.device.protocol import Device, Event
from offload.tiers.device_weights import DeviceWeights
from offload.tiers.gathered import GatheredWeights
from offload.tiers.host_weights import HostWeights
from offload.tiers.window import DeviceWindow, HostWindow
from offload.units import UnitSpec
from swapper import OffloadError


class Compute(Protocol):
    """``begin`` and ``end`` bracket each use of a unit by the model."""

    def begin(self, unit: UnitSpec, *, training: bool) -> None:
        """Put the unit's weights under its parameters, for the model's next work. ``training``: a step will follow."""

    def end(self, unit: UnitSpec) -> None:
        """The use is over."""

    def abandon(self, unit: UnitSpec) -> None:
        """``begin`` was interrupted: the unit is not in use."""

    def reset(self) -> None:
        """No unit is in use: end the uses that an exception or an interrupt has left."""

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        """The weights of these units are about to change in host memory: copies of them are void."""

    def end_step(self) -> None:
        """A step was frozen, and its updates have been announced."""

    def busy_seconds(self) -> float | None:
        """How long the device has worked on units since this was asked last. None: it is the training thread's time."""


class WholeWeights(Protocol):
    """Whole units, where this rank has shards of them."""

    def borrow(self, unit: UnitSpec, start: int, stop: int) -> AbstractContextManager[int]:
        """The address, in host memory, of these elements of the unit or of a copy of them, to be read."""


class ComputeOnHost:
    """The CPU computes on weights where they are."""

    def __init__(self, windows: Sequence[HostWindow], weights: HostWeights | GatheredWeights) -> None:
        self._windows = windows
        self._weights = weights

    def begin(self, unit: UnitSpec, *, training: bool) -> None:
        self._windows[unit.index].open(self._weights.acquire(unit))

    def end(self, unit: UnitSpec) -> None:
        self._windows[unit.index].close()
        self._weights.release(unit)

    def abandon(self, unit: UnitSpec) -> None:
        if self._weights.end_computing([unit]):
            self._windows[unit.index].close()

    def reset(self) -> None:
        for unit in self._weights.end_computing():
            self._windows[unit.index].close()

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        pass

    def end_step(self) -> None:
        pass

    def busy_seconds(self) -> float | None:
        return None


class ComputeOnRanks(ComputeOnHost):
    """The CPU computes on whole units, which are gathered from the shards of all ranks."""

    def __init__(self, windows: Sequence[HostWindow], weights: GatheredWeights) -> None:
        super().__init__(windows, weights)
        self._gathered = weights

    def begin(self, unit: UnitSpec, *, training: bool) -> None:
        self._windows[unit.index].open(self._gathered.acquire(unit, training=training))

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        self._gathered.outdate(units)

    def end_step(self) -> None:
        self._gathered.end_step()


class ComputeOnDevice:
    """A device computes: copies of weights come in on a stream of their own, except of units resident there."""

    def __init__(
        self,
        device: Device,
        windows: Sequence[DeviceWindow],
        parameters: Sequence[Sequence[nn.Parameter]],
        weights: DeviceWeights,
    ) -> None:
        """``parameters`` are those of each unit that are ordinary tensors."""
        self._device = device
        self._windows = windows
        self._parameters = parameters
        self._weights = weights
        self._depth = 0
        self._began: Event | None = None
        self._uses: list[tuple[Event, Event]] = []

    def begin(self, unit: UnitSpec, *, training: bool) -> None:
        self._weights.acquire(unit, training=training)
        if self._depth == 0:
            self._began = self._device.compute.record() if training else None
        self._depth += 1

    def end(self, unit: UnitSpec) -> None:
        window = self._windows[unit.index]
        parameters: Sequence[torch.Tensor] = self._parameters[unit.index]
        moved = not all(window.holds(parameter) for parameter in parameters)
        self._weights.release(unit)
        self._depth -= 1
        if moved:
            raise OffloadError(f"unit {unit.name}: its forward has moved its parameters to other memory of its own")
        if self._depth == 0 and self._began is not None:
            self._uses.append((self._began, self._device.compute.record()))

    def abandon(self, unit: UnitSpec) -> None:
        pass

    def reset(self) -> None:
        self._depth = 0

    def outdate(self, units: Sequence[UnitSpec]) -> None:
        self._weights.outdate(units)

    def end_step(self) -> None:
        self._weights.end_step()

    def busy_seconds(self) -> float | None:
        uses, self._uses = self._uses, []
        for _, end in uses:
            end.wait()
        return sum(end.seconds_since(begin) for begin, end in uses)
