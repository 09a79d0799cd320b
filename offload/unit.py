"""What the engine knows of a unit while it runs: one record, whose fields each have one writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from offload.layout import Tile
from offload.plan import Tier, UnitPlan
from offload.speculation import Speculation
from offload.trace import Span
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
    taken: bool = False
    """An early update works in it: it is nobody's."""


@dataclass
class GradientBuffer:
    """One buffer that spilled gradients pass through. ``writes`` are those of the spill under way, if any."""

    lease: Lease
    unit: Unit | None = None
    writes: tuple[Ticket, ...] = ()
    lent: bool = False
    """An early update reads it, or will: its bytes stay as they are until then."""


@dataclass
class StateTile:
    """One tile of optimizer states: at ``home`` in RAM, in ``extent``, or ``on_device``.

    ``grads_extent`` is for the gradients of the same elements, if they are spilled.
    """

    tile: Tile
    home: Lease | None
    extent: Extent | None
    grads_extent: Extent | None
    shadow: Extent | None = None
    """Where an early update puts the new states, if there may be one."""
    on_device: torch.Tensor | None = None
    """Its bytes, if it is at home in a device's memory."""
    write: Ticket | None = None
    """The last write of the states, which may be in flight: whoever reads them out of turn waits for it."""

    @property
    def start(self) -> int:
        return self.tile.start

    @property
    def stop(self) -> int:
        return self.tile.stop


@dataclass
class Gradient:
    """What is known of a parameter's gradient for the coming step while its elements rest elsewhere."""

    sum_squares: float
    """Of the elements as they rest, before they are multiplied by ``scale``."""
    scale: float
    """What the elements are still to be multiplied by: loss scaling and clipping cost no pass over them."""

    @property
    def norm_squared(self) -> float:
        return self.sum_squares * self.scale * self.scale


@dataclass(eq=False)
class Unit:
    """A unit of the model. Guarded by the engine's lock: ``residency`` to ``updating``."""

    plan: UnitPlan
    window: Window
    parameters: list[nn.Parameter]
    """Views of the window's flat tensor: what the model computes with."""

    weights_home: Lease | None = None
    weights_extent: Extent | None = None
    weights_shadow: Extent | None = None
    """Where an early update puts the new weights. None: the unit has no early updates."""
    shadow_write: Ticket | None = None
    """The last write to ``weights_shadow``."""
    weights_write: Ticket | None = None
    """The write that ``weights_extent`` got while it was the shadow: a fetch waits for it."""
    grads_home: Lease | None = None
    tiles: list[StateTile] = field(default_factory=list)

    residency: Residency = Residency.ABSENT
    slot: Slot | None = None
    fetch: Ticket | None = None
    pins: int = 0
    """Users that need the weights to stay where they are."""
    updating: bool = False
    """The last step's update is not done: the weights in the store are the old ones."""

    use: Span | None = None
    """The present use of it by compute."""
    forward_depth: int = 0
    """Modules of this unit whose forward is running."""
    forward_start: int = 0
    """Serial number of the moment when the outermost of them began."""
    forward_sequence: int = 0
    """Autograd's number of the first node that it may have made."""
    in_backward: bool = False

    gradients: dict[ParameterSpec, Gradient] = field(default_factory=dict)
    """Of each parameter that has one for the coming step."""
    num_arrived: int = 0
    """Gradients that have come in the present backward."""
    num_expected: int = 0
    """Gradients that will come in it, if it is like the last one."""
    promised: bool = False
    """Its slot is held for an early update, which begins when backward is done with it."""
    speculation: Speculation | None = None
    """The early update for the coming step, if one has been asked for."""
    grad_buffer: GradientBuffer | None = None
    grads_spilled: bool = False
    """The store holds what was gathered so far for the coming step."""

    def __post_init__(self) -> None:
        # Plain attributes: they are asked for several times in each use.
        self.spec: UnitSpec = self.plan.unit
        self.name: str = self.plan.unit.name

    @property
    def address(self) -> int:
        """Where the weights are. Only while they are pinned, or at home in RAM."""
        if self.weights_home is not None:
            return self.weights_home.address
        assert self.slot is not None
        return self.slot.lease.address

    @property
    def on_device(self) -> bool:
        """All of it is at home in a device's memory: see ``DeviceHomes``."""
        return self.plan.weights is Tier.DEVICE

    @property
    def weight_bytes(self) -> int:
        return self.spec.numel * self.window.flat.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.window.flat.dtype
