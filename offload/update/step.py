"""Step of a unit, frozen, and the one function that applies it to a tile, whatever runs it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload import kernels
from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.tiers.gradients.store import Gradient
from offload.tiers.home import TileHomes
from offload.units import Tile, UnitSpec


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of a unit that take the same step, ``frozen`` by the rule."""

    start: int
    stop: int
    frozen: Hashable


@dataclass(frozen=True, slots=True)
class UnitUpdate:
    """Step of one unit."""

    unit: UnitSpec
    segments: tuple[Segment, ...]
    gradients: tuple[Gradient, ...] = field(default=(), compare=False)
    """Gradients that it was frozen with. Another object stands in the place of one that has changed since."""

    def is_the_same(self, other: UnitUpdate) -> bool:
        """Both do the same to the unit, with the same gradients."""
        return self.segments == other.segments and (
            len(self.gradients) == len(other.gradients)
            and all(one is another for one, another in zip(self.gradients, other.gradients, strict=True))
        )

    def parts(self, tile: Tile) -> Iterator[Segment]:
        """The segments, as far as they lie in the tile."""
        for segment in self.segments:
            start, stop = max(segment.start, tile.start), min(segment.stop, tile.stop)
            if start < stop:
                yield Segment(start, stop, segment.frozen)

    def covers(self, tile: Tile) -> bool:
        """Every element of the tile takes a step."""
        return sum(part.stop - part.start for part in self.parts(tile)) == tile.numel

    def touched(self, tiles: Sequence[TileHomes]) -> Sequence[TileHomes]:
        """The tiles that some segment lies in."""
        if len(tiles) == 1:
            return tiles
        return [tile for tile in tiles if any(self.parts(tile.tile))]


def apply(
    rule: Rule,
    formats: Formats,
    update: UnitUpdate,
    tile: Tile,
    at: TileBytes,
    native: kernels.Native = kernels.on_host,
) -> None:
    """Run the optimizer over the parts of the tile that take a step, in the memory that ``native`` works on."""
    for first, last, frozen in update.segments:
        start, stop = max(first, tile.start), min(last, tile.stop)
        if start < stop:
            into, part = start - tile.start, at
            if into:
                of_weights, of_grads = into * formats.weights, into * formats.grads
                before = at.weights_before + of_weights
                part = TileBytes(at.states, at.weights + of_weights, at.grads + of_grads, at.states_before, before)
            rule.apply(frozen, tile, start, stop, part, native)
