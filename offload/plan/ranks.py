"""The memory that a rank takes for whole units, beside what its plan has for its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.optim.formats import Formats
from offload.units import UnitSpec, num_nested
from swapper import align

PLACEMENTS = ("states", "gradients", "weights")
"""What ranks hold shards of: each includes those before it. The first ones move the fewest bytes, the last one takes
the least memory."""


@dataclass(frozen=True)
class RanksPlan:
    """``placement`` is one of ``PLACEMENTS``. Whole units lie in ``num_places``, the gradients that a rank has made of
    them in ``num_buffers``; what comes from other ranks lands in ``landing_bytes``."""

    placement: str
    num_ranks: int
    num_places: int
    place_bytes: int
    num_buffers: int
    buffer_bytes: int
    landing_bytes: int
    compute_bytes: int
    """Beside that: the gradient of a whole parameter, as autograd has just made it, and of a shard in fp32."""

    @property
    def arena_bytes(self) -> int:
        """What is reserved at the start."""
        return self.num_places * self.place_bytes + self.num_buffers * self.buffer_bytes + self.landing_bytes

    @property
    def nbytes(self) -> int:
        """All host memory."""
        return self.arena_bytes + self.compute_bytes


def plan_ranks(units: Sequence[UnitSpec], formats: Formats, placement: str, num_ranks: int) -> RanksPlan:
    """The memory for these whole units."""
    nested = num_nested(units)
    trainable = max(unit.trainable_numel for unit in units) if formats.grads else 0
    largest = max((spec.numel for unit in units for spec in unit.trainable), default=0) if formats.grads else 0
    all_gradients = placement == "states"
    width = formats.grads if all_gradients else formats.weights
    few = placement == "weights"
    return RanksPlan(
        placement,
        num_ranks,
        min(nested + 2, len(units)) if few else len(units),
        align(max(unit.numel for unit in units) * formats.weights),
        0 if not trainable else len(units) if all_gradients else min(nested + 1, len(units)),
        align(trainable * width),
        align(trainable * max(width, 4 // num_ranks)),  # also a shard's sums of other replicas, in fp32
        trainable // num_ranks * 4 + align(largest * formats.weights),
    )
