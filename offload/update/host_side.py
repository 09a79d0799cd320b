"""Updates of tiles by the CPU.

[Note: Why the CPU is given tiles ahead] Where a device computes, the optimizer has nearly all cores, and a tile takes
2 ms. Between two tiles the thread that updates brings others back from the device, sends some and prepares the next:
a tenth of the time beside an H200, with 16 cores, and each tile had all threads woken and waited for. So a queue has
tiles ahead, and its threads go from one to the next. Where the CPU computes the model a tile is updated at once: the
cores have other work meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offload import kernels
from offload.cores import CoreLoan
from offload.optim.formats import Formats
from offload.optim.rule import Rule, TileBytes
from offload.report.meter import Meter
from offload.units import Tile
from offload.update.step import UnitUpdate, apply
from offload.update.together import Together

_NUM_AHEAD = 2
"""Tiles that wait behind the one at hand: the thread that updates may come as late as these take."""


@dataclass(eq=False, slots=True)
class HostWork:
    """The update of a tile that the CPU was given."""

    name: str
    """The unit's."""
    tile: Tile
    loan: CoreLoan
    parts: list[kernels.Work] = field(default_factory=list)

    def is_over(self) -> bool:
        return all(part.done() for part in self.parts)


class HostSide:
    """All calls come from the thread that updates."""

    def __init__(
        self,
        rule: Rule,
        formats: Formats,
        meter: Meter,
        lend: Callable[[int], CoreLoan],
        took: Callable[[Tile, float], None],
        *,
        ahead: bool,
    ) -> None:
        """``lend`` lends cores for so many elements, and ``took`` hears how many seconds each tile took. ``ahead``:
        tiles are given ahead, if the rule can be run so."""
        self.at_once = kernels.OnHost(lend)
        """Runs kernels while the caller waits."""
        self._rule = rule
        self._formats = formats
        self._meter = meter
        self._lend = lend
        self._took = took
        self.moved_bytes = 0
        """Traffic in memory of all tiles, since the engine was made."""
        self._queue = kernels.Queue() if ahead and rule.is_one_kernel else None
        self.num_ahead = _NUM_AHEAD if self._queue is not None else 0
        """Tiles that may wait behind the one at hand."""

    def begin(self, update: UnitUpdate, tile: Tile, at: TileBytes) -> HostWork | None:
        """Update a tile. None: it is done; else nothing touches its memory until ``end``."""
        self.moved_bytes += self._formats.update_bytes(tile.nbytes, tile.numel)
        if self._queue is None:
            start = time.perf_counter()
            apply(self._rule, self._formats, update, tile, at, self.at_once)
            self._took(tile, self._meter.end_update(update.unit.name, start) - start)
            return None
        work = HostWork(update.unit.name, tile, self._lend(tile.numel))
        try:
            apply(self._rule, self._formats, update, tile, at, self._queue.by(work.loan.num_threads, work.parts))
        except BaseException:
            for part in work.parts:
                part.wait()
            raise
        return work

    def update_together(self, tiles: Together) -> None:
        """Update several small tiles, at once."""
        self.moved_bytes += self._formats.update_bytes(tiles.states_bytes, tiles.numel)
        tiles.apply(self._rule, self._formats, self._meter, self.at_once)

    def end(self, work: HostWork) -> None:
        """Wait until the tile is updated."""
        seconds = 0.0
        for part in work.parts:
            part.wait()
            seconds += part.seconds()
        stop = time.perf_counter() - (work.parts[-1].seconds_since() if work.parts else 0.0)
        self._meter.end_update(work.name, stop - seconds, stop)
        work.loan.end(seconds)
        self._took(work.tile, seconds)
