"""Updates of units whose records are all in host memory: tiles that come one after the other are one job of the
pipeline, as long as they are small. A job has one loan of cores, and tells the fence once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from offload import kernels
from offload.cores import GRAIN
from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.report.meter import Meter
from offload.tiers.home import TileHomes, UnitHomes
from offload.units import Tile, UnitSpec
from offload.update.step import UnitUpdate, apply

_states_at: Callable[[TileHomes], int | None] = attrgetter("states.address")


@dataclass(eq=False)
class Together:
    """A job of the pipeline: it needs no buffer and waits for nothing. Tiles of at most ``GRAIN`` elements in all, or a
    larger one alone."""

    done: Callable[[Sequence[UnitSpec]], None]
    """Called with the units that are updated."""
    numel: int = 0
    states_bytes: int = 0
    _parts: list[tuple[UnitUpdate, Tile, int, int, int]] = field(default_factory=list)
    """Tiles, and the addresses of the states of each, and of its unit's weights and gradients."""
    _units: list[UnitSpec] = field(default_factory=list)
    """Units whose last tile is among them."""

    def is_read(self) -> bool:
        return True

    def add(self, update: UnitUpdate, homes: UnitHomes, tile: TileHomes) -> bool:
        """Take a tile, after the others of its unit, which ``can_take``. True: the next one is one of another job."""
        states, weights, grads, part = tile.states.address, homes.weights.address, homes.grads, tile.tile
        assert states is not None and weights is not None and grads is not None and grads.address is not None
        self._parts.append((update, part, states, weights, grads.address))
        self.numel += part.stop - part.start
        self.states_bytes += part.nbytes
        if tile is homes.tiles[-1]:
            self._units.append(update.unit)
        return self.numel >= GRAIN

    def apply(self, rule: Rule, formats: Formats, meter: Meter, cpu: kernels.OnHost) -> None:
        """Update them."""
        start = time.perf_counter()
        with cpu.lend(self.numel) as native:
            for update, tile, states, weights, grads in self._parts:
                at = weights + tile.start * formats.weights
                of_tile = TileBytes(states, at, grads + tile.start * formats.grads, states, at)
                apply(rule, formats, update, tile, of_tile, native)
                start = meter.end_update(update.unit.name, start)
        self.done(self._units)


def can_take(homes: UnitHomes) -> bool:
    """All records of the unit are in host memory."""
    return (
        homes.weights.address is not None
        and homes.grads is not None
        and homes.grads.address is not None
        and None not in map(_states_at, homes.tiles)
    )
