"""What device memory is for: weights around their use, and gradients on their way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import BudgetError
from offload.units import UnitSpec, num_nested

_MARGIN = 0.75
"""Of what the first step has left free, "auto" takes this much: activations are not the same in every step, and an
allocator cannot use every gap."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of device memory that the engine may hold. ``all_bytes``: the weights of all units."""

    weights_bytes: int
    gradients_bytes: int
    all_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes

    def grown(self, free_bytes: int) -> DevicePlan:
        """The plan with what a step has left free."""
        more = max(int(free_bytes * _MARGIN), 0)
        return replace(self, weights_bytes=min(self.weights_bytes + more, max(self.all_bytes, self.weights_bytes)))

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"device memory {self.total_bytes / mib:,.1f} MiB: {self.weights_bytes / mib:,.1f} of "
            f"{self.all_bytes / mib:,.1f} MiB of weights at a time, {self.gradients_bytes / mib:,.1f} MiB of gradients "
            "on their way out"
        )


def plan_device(units: Sequence[UnitSpec], width: int, training: bool, device_bytes: int | None) -> DevicePlan:
    """Divide ``device_bytes``; ``width`` is bytes per weight. None: take what lets transfers hide, and no more.

    Compute holds the unit at work and those around it; one or two more arrive meanwhile. The gradients of one unit
    are on their way while the next ones are made. Raises ``BudgetError``, naming the least that works.
    """
    largest = max(unit.numel for unit in units) * width
    everything = sum(unit.numel for unit in units) * width
    gradients = max(unit.trainable_numel for unit in units) * width if training else 0
    least = num_nested(units) * largest
    comfortable = min(least + 2 * largest, max(everything, least))
    if device_bytes is None:
        return DevicePlan(comfortable, gradients, everything)
    if device_bytes < least + gradients:
        raise BudgetError(
            f"device_memory is too small: the least that works for this model is {least + gradients:,} bytes, "
            f"{device_bytes:,} are given. Raise device_memory to {least + gradients}.",
            least + gradients,
        )
    return DevicePlan(min(device_bytes - gradients, max(everything, least)), gradients, everything)
