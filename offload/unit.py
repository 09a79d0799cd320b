"""What the engine knows of a unit while it runs: one record, whose fields each have one writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from offload.plan import UnitPlan
from offload.units import ParameterSpec, UnitSpec
from offload.window import Window
from swapper import Extent, Lease, Ticket


class Residency(Enum):
    """Where a unit's weights are on their way between the store and compute.

    - ``ABSENT``: only the store holds them.
    - ``FETCHING``: a slot is reserved and the read is in flight.
    - ``RESIDENT``: the bytes at ``address`` are valid.
    """

    ABSENT = auto()
    FETCHING = auto()
    RESIDENT = auto()


@dataclass
class Slot:
    """One buffer that weights pass through. ``write`` is the write-back in flight, if any."""

    lease: Lease
    unit: Unit | None = None
    write: Ticket | None = None


@dataclass
class GradientBuffer:
    """One buffer that spilled gradients pass through. ``write`` is the spill in flight, if any."""

    lease: Lease
    unit: Unit | None = None
    write: Ticket | None = None


@dataclass
class StateTile:
    """One tile of optimizer states: at ``home`` in RAM, or in ``extent``."""

    start: int
    stop: int
    home: Lease | None
    extent: Extent | None


@dataclass(eq=False)
class Unit:
    """A unit of the model. Guarded by the engine's lock: ``residency`` to ``updating``."""

    plan: UnitPlan
    window: Window
    parameters: list[nn.Parameter]
    """Views of the window's flat tensor: what the model computes with."""

    weights_home: Lease | None = None
    weights_extent: Extent | None = None
    grads_home: Lease | None = None
    grads_extent: Extent | None = None
    tiles: list[StateTile] = field(default_factory=list)

    residency: Residency = Residency.ABSENT
    slot: Slot | None = None
    fetch: Ticket | None = None
    pins: int = 0
    """Users that need the weights to stay where they are."""
    updating: bool = False
    """The last step's update is not done: the weights in the store are the old ones."""

    forward_depth: int = 0
    """Modules of this unit whose forward is running."""
    forward_start: int = 0
    """Serial number of the moment when the outermost of them began."""
    in_backward: bool = False

    sum_squares: dict[ParameterSpec, float] = field(default_factory=dict)
    """Of each parameter that has a gradient for the coming step: the sum of its squares."""
    grad_buffer: GradientBuffer | None = None
    grads_spilled: bool = False
    """The store holds what was gathered so far for the coming step."""

    @property
    def spec(self) -> UnitSpec:
        return self.plan.unit

    @property
    def name(self) -> str:
        return self.plan.unit.name

    @property
    def address(self) -> int:
        """Where the weights are. Only while they are pinned, or at home in RAM."""
        if self.weights_home is not None:
            return self.weights_home.address
        assert self.slot is not None
        return self.slot.lease.address

    @property
    def weight_bytes(self) -> int:
        return self.spec.numel * self.window.flat.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.window.flat.dtype
