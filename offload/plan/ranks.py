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
    """``placement`` is one of ``PLACEMENTS``. Whole units lie in ``places``, the gradients that a rank has made of them
    in ``buffers``, all in bytes; what comes from other ranks lands in ``landing_bytes``."""

    placement: str
    num_ranks: int
    places: tuple[int, ...]
    buffers: tuple[int, ...]
    landing_bytes: int
    compute_bytes: int
    """Beside that: the gradient of a whole parameter, as autograd has just made it, and of a shard in fp32."""

    @property
    def arena_bytes(self) -> int:
        """What is reserved at the start."""
        return sum(self.places) + sum(self.buffers) + self.landing_bytes

    @property
    def nbytes(self) -> int:
        """All host memory."""
        return self.arena_bytes + self.compute_bytes


def plan_ranks(units: Sequence[UnitSpec], formats: Formats, placement: str, num_ranks: int) -> RanksPlan:
    """The memory for these whole units: a place for each of them, or a few that fit any; the same of gradients."""
    nested, all_gradients = num_nested(units), placement == "states"
    weights = [align(unit.numel * formats.weights) for unit in units]
    width = (formats.grads if all_gradients else formats.weights) if formats.grads else 0
    gradients = [align(unit.trainable_numel * width) for unit in units if unit.trainable_numel * width]
    largest = max((spec.numel for unit in units for spec in unit.trainable), default=0) if width else 0
    few = placement == "weights"
    received = max(gradients, default=0)
    shard_bytes = received // max(width, 1) // num_ranks * 4
    return RanksPlan(
        placement,
        num_ranks,
        tuple([max(weights)] * min(nested + 2, len(units)) if few else weights),
        tuple(gradients if all_gradients else [max(gradients)] * min(nested + 1, len(gradients)) if gradients else ()),
        max(received, shard_bytes),  # replicas' sums of a shard land there, too
        shard_bytes + align(largest * formats.weights),
    )
