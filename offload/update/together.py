"""Updates of units whose records are all in host memory: tiles that come one after the other are one job of the
pipeline, as long as they are small. A job has one loan of cores, and tells the fence once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload import kernels
from offload.cores import GRAIN
from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.report.meter import Meter
from offload.tiers.home import TileHomes, UnitHomes
from offload.units import UnitSpec
from offload.update.step import UnitUpdate


class _Part(NamedTuple):
    """A tile, and the addresses of its unit's weights and gradients."""

    update: UnitUpdate
    tile: TileHomes
    weights: int
    grads: int


@dataclass(eq=False)
class Together:
    """A job of the pipeline: it needs no buffer and waits for nothing. Tiles of at most ``GRAIN`` elements in all, or a
    larger one alone."""

    done: Callable[[Sequence[UnitSpec]], None]
    """Called with the units that are updated."""
    numel: int = 0
    _parts: list[_Part] = field(default_factory=list)
    _units: list[UnitSpec] = field(default_factory=list)
    """Units whose last tile is among them."""

    def is_read(self) -> bool:
        return True

    def add(self, update: UnitUpdate, homes: UnitHomes, tile: TileHomes) -> bool:
        """Take a tile, after the others of its unit, which ``can_take``. True: the next one is one of another job."""
        weights, grads = homes.weights.address, homes.grads_address
        assert weights is not None and grads is not None
        self._parts.append(_Part(update, tile, weights, grads))
        self.numel += tile.tile.stop - tile.tile.start
        if tile is homes.tiles[-1]:
            self._units.append(update.unit)
        return self.numel >= GRAIN

    def apply(self, rule: Rule, formats: Formats, meter: Meter, cpu: kernels.OnHost) -> None:
        """Update them."""
        start = time.perf_counter()
        with cpu.lend(self.numel) as native:
            for update, homes, weights, grads in self._parts:
                tile, states = homes.tile, homes.states.address
                assert states is not None
                for first, last, frozen in update.segments:
                    begin, end = max(first, tile.start), min(last, tile.stop)
                    if begin < end:
                        at = weights + begin * formats.weights
                        of_part = TileBytes(states, at, grads + begin * formats.grads, states, at)
                        rule.apply(frozen, tile, begin, end, of_part, native)
                start = meter.end_update(update.unit.name, start)
        self.done(self._units)


def can_take(homes: UnitHomes) -> bool:
    """All records of the unit are in host memory."""
    return (
        homes.weights.address is not None
        and homes.grads_address is not None
        and None not in [tile.states.address for tile in homes.tiles]
    )
