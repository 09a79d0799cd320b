"""Makes the places where gradients are stored."""

from __future__ import annotations

from functools import partial

import torch

from offload.report.meter import Meter
from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.host import HostGradients
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.gradients.norms import Squares
from offload.tiers.gradients.spill import BufferPool, SpilledGradients
from offload.tiers.gradients.unit import UnitGradients
from offload.tiers.home import UnitHomes
from offload.units import UnitSpec


def make_unit_gradients(
    unit: UnitSpec,
    homes: UnitHomes,
    pool: BufferPool,
    dtype: torch.dtype,
    squares: Squares,
    meter: Meter,
    last: LastGradients,
) -> UnitGradients:
    """The place of a unit's gradients: a home of their own, or buffers of the ``pool`` if they have none."""
    home = homes.grads
    if home is not None and home.tensor is not None:
        return DeviceGradients(unit, home.tensor, squares)
    if home is not None and home.address is not None:
        return HostGradients(home.address, dtype, partial(last.changes, unit))
    return SpilledGradients(unit, homes.tiles, pool, dtype, meter)
