"""The placement: a pure function from units and budgets to a tier for every record, decided once, before step 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product, zip_longest

import numpy as np

from offload.errors import BudgetError
from offload.optim.formats import DEFAULT_TILE_BYTES, Formats
from offload.plan.plan import Plan, Staging, TilesOf
from offload.plan.records import Integers, Records
from offload.units import UnitSpec, largest_numel, num_nested
from offload.units.spread import spread_rank
from swapper import readable_bytes

_TILES_A_UNIT = 4
"""Tiles smaller than the largest unit's weights divided by this save no memory worth the speed they cost."""

_LEAST_TILE_BYTES = 64 << 10

_NUM_TILE_BUFFERS = 6
"""Enough for the disk to read, the kernel to work and the disk to write at the same time, and some to even out."""

_GRAD_BUFFERS = (3, 2)
"""One is filled while another one is written, and read by a speculative update. With a third one compute goes on where
such an update takes longer than a unit's backward."""

_PREFIXES = 256
"""Lengths that are tried of what comes before gradients, at most."""


def make_plan(
    units: Sequence[UnitSpec],
    formats: Formats,
    tiles_of: TilesOf | None,
    host_bytes: int,
    nvme_bytes: int,
    tile_bytes: int | None = None,
    compute_bytes: int = 0,
    speculative: bool = False,
    num_backwards: int = 1,
    rereads: bool = False,
) -> Plan:
    """Give every kind of every unit a tier, within the budgets, by traffic saved per byte.

    Access is cyclic, so what is resident in RAM is fixed and spread evenly over the units, and the disk always has
    something to do. In a step of ``num_backwards`` = k micro-batches, a byte of weights saves 2k + 1 transfers (read
    for each forward and backward, written), one of states two, one of gradients 2k. With k = 1 states come before
    gradients: theirs are both after the verdict, where the disk has most to do if a step is clipped. ``speculative``
    tells that streamed units may be updated during backward: then units are resident with their weights and states
    together, which is what such an update moves, and the others have work for the disk in forward and in backward;
    ``rereads`` tells that such an update reads the weights anew, as where a device computes. A tied weight in pieces
    would go over the disk for each of its sites; it is always resident, and so are its gradients. ``tiles_of`` is None
    where nothing is trained. ``tile_bytes=None`` lets the tile shrink when memory is short. ``compute_bytes`` are taken
    beside all that.

    Buffers take memory that records could rest in, and small tiles are more transfers. So every staging that fits is
    filled, and the plan is the one whose step costs least (``Records.step_cost``). More memory never costs more.

    Raises ``BudgetError``, naming the least budget that works.
    """
    records = cache(lambda size: Records(units, formats, tiles_of, size, num_backwards, rereads))

    def empty(staging: Staging) -> _Placement:
        return _Placement(records(staging.tile_bytes), staging, compute_bytes)

    everything = empty(Staging(0, 0, 0, tile_bytes or DEFAULT_TILE_BYTES))
    everything.resident[:] = True
    if everything.total_bytes <= host_bytes:
        return everything.plan(host_bytes)
    if nvme_bytes == 0 and any(unit.stored_numel for unit in units):
        raise BudgetError(
            "host_memory is too small to hold everything and there is no nvme_path: "
            f"{readable_bytes(everything.total_bytes)} are needed, {readable_bytes(host_bytes)} are given. "
            "Give an nvme_path, or raise host_memory to {needed}.",
            everything.total_bytes,
        )
    stagings = _stagings(units, formats, tile_bytes, training=tiles_of is not None)
    placements = _that_fit(map(empty, stagings), host_bytes, everything.total_bytes)
    for placement in placements:
        placement.fill(host_bytes, by_unit=speculative, gradients_first=num_backwards > 1)
    plan = min(placements, key=lambda placement: placement.step_cost(speculative=speculative)).plan(host_bytes)
    needed = sum(plan.nvme_bytes.values())
    if needed > nvme_bytes:
        raise BudgetError(
            f"nvme_capacity is too small: {readable_bytes(needed)} must rest on NVMe where host memory is "
            f"{readable_bytes(host_bytes)}, {readable_bytes(nvme_bytes)} are given. "
            "Raise nvme_capacity to {needed}, or raise host_memory.",
            needed,
        )
    return plan


def _that_fit(placements: Iterable[_Placement], host_bytes: int, everything_bytes: int) -> list[_Placement]:
    """Those that leave nothing out, each with its large units resident. Raises ``BudgetError`` if there are none."""
    placements = list(placements)
    for placement in placements:
        placement.keep_large_units()
    least = min(placement.total_bytes for placement in placements)
    if least > host_bytes:
        least = min(least, everything_bytes)  # staging can take more than all of a small model
        raise BudgetError(
            f"host_memory is too small: the least that works for this model is {readable_bytes(least)}, "
            f"{readable_bytes(host_bytes)} are given. Raise host_memory to {{needed}}.",
            least,
        )
    return [placement for placement in placements if placement.total_bytes <= host_bytes]


def _stagings(
    units: Sequence[UnitSpec], formats: Formats, tile_bytes: int | None, *, training: bool
) -> Iterator[Staging]:
    """Those to choose from.

    Compute holds one slot for each unit around the one at work, the update holds one, and one or two more let the next
    units arrive in time. Less memory would work too, but each unit would wait for the one before it. Tiles that are
    small against a slot save no memory worth their cost.
    """
    largest = largest_numel(units) * formats.weights
    small = max(min(largest // _TILES_A_UNIT, DEFAULT_TILE_BYTES) // _LEAST_TILE_BYTES, 1) * _LEAST_TILE_BYTES
    least_slots = num_nested(units) + (1 if training else 0)
    for slots in (least_slots + 2, least_slots + 1):
        halved = (DEFAULT_TILE_BYTES >> shift for shift in range(DEFAULT_TILE_BYTES.bit_length()))
        sizes = [tile_bytes] if tile_bytes else [*(size for size in halved if size > small), small]
        for size, num_grad_buffers in product(sizes, _GRAD_BUFFERS if training else _GRAD_BUFFERS[-1:]):
            yield Staging(slots, num_grad_buffers, _NUM_TILE_BUFFERS, size)


class _Placement:
    """A placement in the making: which records are ``resident`` in RAM, and what all of it costs."""

    def __init__(self, records: Records, staging: Staging, compute_bytes: int) -> None:
        self.resident = records.always_resident()
        self._records, self._staging, self._compute_bytes = records, staging, compute_bytes

    @property
    def total_bytes(self) -> int:
        """Host memory that it takes."""
        records = self._records
        resident_bytes = int(records.nbytes[self.resident].sum())
        return resident_bytes + records.staged(self.resident, self._staging).nbytes + self._compute_bytes

    def step_cost(self, *, speculative: bool) -> int:
        """Bytes that a step moves over NVMe, and what else counts for some."""
        return self._records.step_cost(self.resident, self._staging, speculative=speculative)

    def plan(self, host_budget_bytes: int) -> Plan:
        """The placement as it is."""
        records, resident = self._records, self.resident
        staging = records.staged(resident, self._staging)
        return records.plan(resident, staging, host_budget_bytes, self._compute_bytes)

    def keep_large_units(self) -> None:
        """Keep the units in RAM that make every buffer so large that without them all of it takes less memory."""
        records = self._records
        for size in sorted({unit.numel for unit in records.units}, reverse=True):
            before, resident = self.total_bytes, self.resident.copy()
            for kind in (records.weights, records.grads):
                self.resident[kind] |= records.numel == size
            if self.total_bytes >= before:
                self.resident = resident
                return

    def fill(self, host_bytes: int, *, by_unit: bool, gradients_first: bool) -> None:
        """Keep what saves most traffic per byte, as much as fits: all kinds of one unit after the other, or one kind of
        all units after the other. Gradients come last, unless they come before states; where a step costs less so,
        some of what comes before them leaves its room to them.

        Where nothing is trained, experts come last: the room that is left is slots for all of them.

        First the units that are small, with all that they have: what they save is transfers, and they take next to no
        room. Then the units that forward begins with, whose gradients come last: nothing else is left to do while they
        are updated. The others in an order that is spread evenly.
        """
        units, states_of = self._records.units, self._records.states_of
        first = units[0].whole
        is_first = [unit is units[0] or (unit.whole is not None and unit.whole is first) for unit in units]
        comes_by_use = [unit.experts is not None and not self._records.formats.grads for unit in units]
        small = {index for index in self._records.small_units() if not comes_by_use[index]}
        by_turn = sorted(range(len(units)), key=lambda index: (not is_first[index], spread_rank(index)))
        spread = [index for index in by_turn if index not in small]
        grads = [len(units) + index for index in spread]
        if by_unit:
            of_gradients = [[record] for record in grads] if gradients_first else [[]] * len(spread)
            kinds = ([i, *of_unit, *states_of(i)] for i, of_unit in zip(spread, of_gradients, strict=True))
            order = list(chain.from_iterable(kinds))
        else:
            weights = [index for index in spread if not comes_by_use[index]]
            rows = zip_longest(*(states_of(index) for index in spread))
            states = [record for row in rows for record in row if record is not None]
            order = [*weights, *(grads if gradients_first else []), *states]
        of_small = ([index, len(units) + index, *states_of(index)] for index in by_turn if index in small)
        order = [*chain.from_iterable(of_small), *order]
        self._keep_best(self._away(order), self._away([] if gradients_first else grads), host_bytes, by_unit=by_unit)
        staging = self._records.staged(self.resident, self._staging)
        if any(comes_by_use) and staging.slot_bytes:
            room = host_bytes - self.total_bytes
            self._staging = replace(self._staging, num_slots=self._staging.num_slots + room // staging.slot_bytes)

    def _away(self, order: Sequence[int]) -> Integers:
        """Those of these records that are not resident so far."""
        records = np.array(order, np.int64)
        return records[~self.resident[records]]

    def _keep_best(self, order: Integers, grads: Integers, host_bytes: int, *, by_unit: bool) -> None:
        """Keep a prefix of ``order`` and then one of ``grads``, both as long as fits, or the shorter prefix of
        ``order`` with which a step costs least. So a placement of a smaller budget is always among those to choose
        from."""
        fits = self._keep(order, host_bytes)
        best, least = self.resident.copy(), self.step_cost(speculative=by_unit)
        for count in reversed(range(0, fits + 1, -(-len(order) // _PREFIXES) or 1)):
            self.resident[order[count:]] = False
            self.resident[grads] = True
            if self.step_cost(speculative=by_unit) >= least:  # nor would a shorter one cost less
                break
            self._keep(grads, host_bytes)
            cost = self.step_cost(speculative=by_unit)
            if cost < least:
                best, least = self.resident.copy(), cost
        self.resident = best

    def _keep(self, records: Integers, host_bytes: int) -> int:
        """Keep the longest prefix of ``records`` that fits, and return its length."""

        def keep(count: int) -> None:
            self.resident[records[:count]] = True
            self.resident[records[count:]] = False

        fits, too_many = 0, len(records) + 1
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            keep(count)
            if self.total_bytes <= host_bytes:
                fits = count
            else:
                too_many = count
        keep(fits)
        return fits
