"""The choice of a placement: every staging is filled, and what costs least is played; the shortest step is taken."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import product

from offload.config import LEAST_TILE_BYTES
from offload.errors import BudgetError
from offload.optim.formats import DEFAULT_TILE_BYTES, RAM_TILE_BYTES, Formats
from offload.plan.filling import Placement
from offload.plan.judge import Conditions, Judge
from offload.plan.plan import Plan, Staging, TilesOf
from offload.plan.records import Records
from offload.plan.routing import EVERYWHERE, Routing
from offload.units import UnitSpec, largest_numel, num_nested
from swapper import readable_bytes

_TILES_A_UNIT = 4
"""Tiles smaller than the largest unit's weights divided by this save no memory worth the speed they cost."""

_NUM_TILE_BUFFERS = 6
"""Enough for the disk to read, the kernel to work and the disk to write at the same time, and some to even out."""

_NUM_LARGE_TILE_BUFFERS = 3
"""Also tried where tiles are larger than asked for, since they hold whole parameters: one for each of the three."""

_GRAD_BUFFERS = (3, 2)
"""One is filled while another one is written, and read by a speculative update. With a third one compute goes on where
such an update takes longer than a unit's backward."""

RUNGS = 8
"""Smaller budgets whose placements are also played, evenly from the least to all: see ``Placements.by_playing``."""

_SHORT_LIST = 2
"""Placements of an order of filling that are played, those of the least cost."""


class Placements:
    """All placements of some units, to choose from at any budget. What was filled and played is kept for the next one.

    The arguments are those of ``make_plan``."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        formats: Formats,
        tiles_of: TilesOf | None,
        tile_bytes: int | None = None,
        compute_bytes: int = 0,
        speculative: bool = False,
        num_backwards: int = 1,
        rereads: bool = False,
        conditions: Conditions | None = None,
        routing: Routing = EVERYWHERE,
    ) -> None:
        self._records = cache(lambda size: Records(units, formats, tiles_of, size, num_backwards, rereads, routing))
        self._compute_bytes, self._speculative = compute_bytes, speculative
        self._num_backwards, self._conditions = num_backwards, conditions
        stagings = list(_stagings(units, formats, tile_bytes, training=tiles_of is not None))
        large = [staging for staging in stagings if self._records(staging.tile_bytes).has_large_tiles]
        self._stagings = [*stagings, *(replace(each, num_tile_buffers=_NUM_LARGE_TILE_BUFFERS) for each in large)]
        tile_in_ram = RAM_TILE_BYTES if rereads else DEFAULT_TILE_BYTES
        self.everything = self._empty(Staging(0, 0, 0, tile_bytes or tile_in_ram))
        self.everything.resident[:] = True
        self._short_list = cache(self._find_short_list)
        self._seconds: dict[Hashable, float] = {}
        """Of steps that were played."""

    def choose(self, host_bytes: int) -> Placement:
        """The best one that fits. Raises ``BudgetError`` if there is none."""
        return self.by_cost(host_bytes) if self.judge is None else self.by_playing(host_bytes, self.judge)

    @cached_property
    def judge(self) -> Judge | None:
        """The one who plays steps. None: it is not known what for, or it is not worth it."""
        if self._conditions is None or not self.everything.trains:
            return None
        nothing = self._plan(self._empty(self._stagings[0]))
        judge = Judge(self._conditions, self._num_backwards, nothing)
        return judge if judge.is_worth_it else None

    def by_cost(self, host_bytes: int) -> Placement:
        """The placement whose step costs least. Raises ``BudgetError`` if none fits."""
        return self._filled(host_bytes, self._that_fit(host_bytes), by_unit=self._speculative)[0]

    def by_playing(self, host_bytes: int, judge: Judge) -> Placement:
        """The placement whose step takes least when it is played. Raises ``BudgetError`` if none fits.

        Those that are played have the least cost of their order of filling, at this budget and at each smaller one of a
        ladder, whose rungs do not depend on the budget. So no budget is slower than a rung below it. A rung on which
        the drive or compute alone takes longer than the best step ends the descent, since those below it move more.
        """
        best, least = None, math.inf
        for budget in (host_bytes, *self._rungs_below(host_bytes)):
            found = [one for one in self._short_list(budget) if judge.least_seconds(self._plan(one)) < least]
            if not found:
                break
            for placement in found:
                seconds = self.played(placement, judge)
                if seconds < least:
                    best, least = placement, seconds
        assert best is not None
        return best

    def played(self, placement: Placement, judge: Judge) -> float:
        """Seconds of its step."""
        if placement.key not in self._seconds:
            self._seconds[placement.key] = judge.seconds(self._plan(placement))
        return self._seconds[placement.key]

    @cached_property
    def rungs(self) -> list[int]:
        """Budgets that are looked at for larger ones, too, the least first."""
        least, everything = self._least_bytes, self.everything.total_bytes
        return [least + (everything - least) * rung // RUNGS for rung in range(RUNGS)]

    def _rungs_below(self, host_bytes: int) -> list[int]:
        """The largest first."""
        return [rung for rung in reversed(self.rungs) if rung < host_bytes]

    def _find_short_list(self, host_bytes: int) -> list[Placement]:
        """Placements that cost least of those that are filled in the order of the rule; and with the same staging,
        filled in the other order."""
        found = self._filled(host_bytes, self._that_fit(host_bytes), by_unit=self._speculative)[:_SHORT_LIST]
        if self._speculative:
            found += self._filled(host_bytes, [placement.start for placement in found], by_unit=False)
        return list({placement.key: placement for placement in found}.values())

    def _filled(self, host_bytes: int, starts: Sequence[Placement], *, by_unit: bool) -> list[Placement]:
        """Fill them, and put those of the least cost first."""
        speculative, gradients_first = self._speculative, self._num_backwards > 1
        options = {"by_unit": by_unit, "speculative": speculative, "gradients_first": gradients_first}
        placements = [start.filled(host_bytes, **options) for start in starts]
        return sorted(placements, key=lambda placement: placement.step_cost(speculative=speculative))

    def _that_fit(self, host_bytes: int) -> list[Placement]:
        """Placements that leave nothing out, each with its large units resident. Raises ``BudgetError`` if there are
        none."""
        if self._least_bytes > host_bytes:
            least = min(self._least_bytes, self.everything.total_bytes)  # staging can take more than a small model
            raise BudgetError(
                f"host_memory is too small: the least that works for this model is {readable_bytes(least)}, "
                f"{readable_bytes(host_bytes)} are given. Raise host_memory to {{needed}}.",
                least,
            )
        return [start for start in self._starts if start.total_bytes <= host_bytes]

    @cached_property
    def _least_bytes(self) -> int:
        return min(start.total_bytes for start in self._starts)

    @cached_property
    def _starts(self) -> list[Placement]:
        """For each staging the placement with nothing resident but what must be, and large units. Of tiles of several
        sizes that cut all units alike, as those of a small model do, the largest stand for all."""
        distinct: dict[Hashable, Staging] = {}
        for staging in self._stagings:
            cut = self._records(staging.tile_bytes).cut
            distinct.setdefault((replace(staging, tile_bytes=0), cut), staging)
        starts = [*map(self._empty, distinct.values())]
        for start in starts:
            start.keep_large_units()
        return starts

    def _empty(self, staging: Staging) -> Placement:
        return Placement(self._records(staging.tile_bytes), staging, self._compute_bytes)

    def _plan(self, placement: Placement) -> Plan:
        return replace(placement.plan(0), speculative=self._speculative)


def _stagings(
    units: Sequence[UnitSpec], formats: Formats, tile_bytes: int | None, *, training: bool
) -> Iterator[Staging]:
    """Those to choose from.

    Compute holds one slot for each unit around the one at work, the update holds one, and one or two more let the next
    units arrive in time. Less memory would work too, but each unit would wait for the one before it. Tiles that are
    small against a slot save no memory worth their cost.
    """
    largest = largest_numel(units) * formats.weights
    small = max(min(largest // _TILES_A_UNIT, DEFAULT_TILE_BYTES) // LEAST_TILE_BYTES, 1) * LEAST_TILE_BYTES
    least_slots = num_nested(units) + (1 if training else 0)
    for slots in (least_slots + 2, least_slots + 1):
        halved = (DEFAULT_TILE_BYTES >> shift for shift in range(DEFAULT_TILE_BYTES.bit_length()))
        sizes = [tile_bytes] if tile_bytes else [*(size for size in halved if size > small), small]
        for size, num_grad_buffers in product(sizes, _GRAD_BUFFERS if training else _GRAD_BUFFERS[-1:]):
            yield Staging(slots, num_grad_buffers, _NUM_TILE_BUFFERS, size)
