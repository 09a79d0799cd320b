"""Makes the places where gradients rest."""

from __future__ import annotations

import torch

from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.unit import UnitGradients
from offload.tiers.home import UnitHomes
from offload.units import UnitSpec


def resident_gradients(unit: UnitSpec, homes: UnitHomes, dtype: torch.dtype, squares: Squares) -> UnitGradients | None:
    """The gradients of a unit that have a home of their own; None if they are spilled, or there are none."""
    if homes.grads is not None and homes.grads.tensor is not None:
        return DeviceGradients(unit, homes.grads.tensor, squares)
    if homes.grads is not None and homes.grads.address is not None:
        return HostGradients(homes.grads.address, dtype)
    return None
