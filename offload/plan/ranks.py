"""The memory that a rank takes for whole units, beside what its plan has for its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.optim.formats import Formats
from offload.units import UnitSpec, largest_numel, largest_trainable_numel, num_nested
from swapper import align

PLACEMENTS = ("states", "gradients", "weights")
"""Parts of the state that ranks hold shards of: each includes those before it. The first ones move the fewest bytes,
the last one takes the least memory."""


NUM_SHARDS_ON_DEVICE = 2
"""Shards that a device has on their way between its host and other devices: one comes while one is gathered."""


@dataclass(frozen=True)
class RanksPlan:
    """``placement`` is one of ``PLACEMENTS``. Whole units lie in ``places``, of which compute needs ``least_bytes`` at
    a time, and all of them take ``all_bytes``; the gradients that a rank has made of them lie in ``buffers``; what
    comes from other ranks lands in ``landing_bytes``. All of that is in a ``device``'s memory where one computes.
    ``shard_bytes`` are those of the largest shard's weights, ``sum_bytes`` of its gradient in fp32.

    ``ONE_RANK`` is that of a single rank, whose units are whole and which takes nothing."""

    placement: str | None = None
    num_ranks: int = 1
    device: bool = False
    places: tuple[int, ...] = ()
    least_bytes: int = 0
    all_bytes: int = 0
    buffers: tuple[int, ...] = ()
    landing_bytes: int = 0
    shard_bytes: int = 0
    sum_bytes: int = 0
    gradient_bytes: int = 0
    """The gradient of a whole parameter, as autograd has just made it."""
    least_buffers: int = 0
    """With so many, the gradients of a unit are made when those before them have gone."""

    @property
    def gathers(self) -> bool:
        """Compute takes whole units that are gathered from shards."""
        return bool(self.places)

    def tight(self) -> RanksPlan:
        """The same with as little memory as works."""
        return replace(self, buffers=self.buffers[: self.least_buffers])

    @property
    def arena_bytes(self) -> int:
        """Host memory that is reserved at the start."""
        return 0 if self.device else sum(self.places) + sum(self.buffers) + self.landing_bytes + self.sum_bytes

    @property
    def nbytes(self) -> int:
        """All host memory."""
        return 0 if self.device else self.arena_bytes + self.gradient_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory beside the places of whole units."""
        if not self.device:
            return 0
        passing = NUM_SHARDS_ON_DEVICE * self.shard_bytes + sum(self.buffers) + self.landing_bytes
        return passing + self.sum_bytes


ONE_RANK = RanksPlan()


def plans_of_ranks(
    units: Sequence[UnitSpec], formats: Formats, shard: str, num_ranks: int, num_shards: int, *, device: bool
) -> list[RanksPlan]:
    """The plans to try, in order: of one of ``PLACEMENTS``, or of all for "auto". Of ``num_ranks``, so many hold the
    shards of one copy."""
    if num_ranks == 1:
        return [ONE_RANK]
    placements = PLACEMENTS if shard == "auto" else (shard,)
    return [plan_ranks(units, formats, placement, num_shards, device=device) for placement in placements]


def plan_ranks(
    units: Sequence[UnitSpec], formats: Formats, placement: str, num_ranks: int, *, device: bool = False
) -> RanksPlan:
    """The memory for these whole units: a place for each of them, or a few that fit any; the same of gradients. On a
    ``device`` there are as many places as it has room for."""
    nested, all_gradients = num_nested(units), placement == "states"
    weights = [align(unit.numel * formats.weights) for unit in units]
    width = (formats.grads if all_gradients else formats.weights) if formats.grads else 0
    gradients = [align(unit.trainable_numel * width) for unit in units if unit.trainable_numel * width]
    most, most_trained = align(largest_numel(units) * formats.weights), align(largest_trainable_numel(units) * width)
    largest = max((spec.numel // unit.count for unit in units for spec in unit.trainable), default=0) if width else 0
    few = placement == "weights" or device
    received = most_trained
    sum_bytes = align(received // max(width, 1) // num_ranks * 4)
    return RanksPlan(
        placement,
        num_ranks,
        device,
        tuple([most] * min(nested + 2, len(units)) if few else weights),
        nested * most,
        sum(weights),
        tuple(gradients if all_gradients else [most_trained] * min(nested + 1, len(gradients))),
        max(received, sum_bytes),  # replicas' sums of a shard land there, too
        align(largest_numel(units) // num_ranks * formats.weights),
        sum_bytes,
        align(largest * formats.weights),
        len(gradients) if all_gradients else min(nested, len(gradients)),
    )
