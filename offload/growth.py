"""The plan of a running engine: fixed, or grown once the first step has shown what activations leave of a device's
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.device.protocol import Device
from offload.errors import DeviceMemoryError
from offload.plan.plan import Plan
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.store import GradientStore
from offload.tiers.growth import Growth
from offload.units import UnitSpec
from offload.waiting import Failure


@dataclass(eq=False)
class FixedPlan:
    """Everything rests where it was planned to."""

    plan: Plan

    def step_taken(self) -> None:
        """A step was taken, and its updates run."""


@dataclass(eq=False)
class GrowingPlan(FixedPlan):
    """After the first step units move into the memory that is left, and copies of others."""

    device: Device
    growth: Growth
    units: Sequence[UnitSpec]
    """Of this rank."""
    gradients: GradientStore
    fence: UpdateFence
    failure: Failure
    units_moved: Callable[[], None]
    """Tells that units rest elsewhere than before."""
    promised_bytes: Callable[[], int]
    """Memory that activations will take more than they did."""
    has_grown: bool = False

    def step_taken(self) -> None:
        if self.has_grown:
            return
        self.has_grown = True
        plan, free_bytes = self.plan, self._free_bytes()
        grown = plan.grown(free_bytes)
        moving = [unit for unit in self.units if unit.index in grown.resident - plan.device.resident]
        if any(self.gradients.of(unit) for unit in moving):  # which no parameter group has: they stay
            grown, moving = plan.device.grown(free_bytes), []
        with self.failure:
            if moving:
                self.fence.wait_all()
            try:
                self.growth.grow(moving, grown)
            except DeviceMemoryError:  # there is room, in pieces that are too small
                grown = plan.device.grown(free_bytes)
                self.growth.grow((), grown)
        if moving:
            self.units_moved()
        self.plan = plan.with_device(grown)

    def _free_bytes(self) -> int:
        return max(self.device.memory_bytes() - self.device.peak_bytes() - self.promised_bytes(), 0)
