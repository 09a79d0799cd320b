"""A placement in the making: records that are stored in RAM, by traffic saved per byte, and what all of it costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

import numpy as np

from offload.plan.plan import Plan, Staging
from offload.plan.records import Integers, Records
from offload.units.spread import spread_rank

_PREFIXES = 64
"""Lengths that are tried of what comes before gradients, at most."""


class Placement:
    """A placement in the making: which records are ``resident`` in RAM, and what all of it costs."""

    def __init__(self, records: Records, staging: Staging, compute_bytes: int) -> None:
        self.resident = records.always_resident()
        self._records, self._staging, self._compute_bytes = records, staging, compute_bytes
        self.start = self
        """The same before it was filled."""

    @property
    def total_bytes(self) -> int:
        """Host memory that it takes."""
        records = self._records
        resident_bytes = int(np.add.reduce(records.nbytes[self.resident]))
        return resident_bytes + records.staged(self.resident, self._staging).nbytes + self._compute_bytes

    def step_cost(self, *, speculative: bool) -> int:
        """Bytes that a step moves over NVMe, and what else counts for some."""
        return self._records.step_cost(self.resident, self._staging, speculative=speculative)

    @property
    def trains(self) -> bool:
        """There are states to update."""
        return self._records.formats.grads > 0

    @property
    def key(self) -> Hashable:
        """Placements are the same if this is."""
        return self._records.staged(self.resident, self._staging), self.resident.tobytes()

    def plan(self, host_budget_bytes: int) -> Plan:
        """The placement as it is."""
        records, resident = self._records, self.resident
        staging = records.staged(resident, self._staging)
        return records.plan(resident, staging, host_budget_bytes, self._compute_bytes)

    def keep_large_units(self) -> None:
        """Keep the units in RAM that make every buffer so large that without them all of it takes less memory."""
        records, least = self._records, self.total_bytes
        for size in sorted({unit.numel for unit in records.units}, reverse=True):
            resident = self.resident.copy()
            for kind in (records.weights, records.grads):
                self.resident[kind] |= records.numel == size
            if (total_bytes := self.total_bytes) >= least:
                self.resident = resident
                return
            least = total_bytes

    def filled(self, host_bytes: int, *, by_unit: bool, speculative: bool, gradients_first: bool) -> Placement:
        """The same, filled."""
        placement = Placement(self._records, self._staging, self._compute_bytes)
        placement.resident, placement.start = self.resident.copy(), self
        placement.fill(host_bytes, by_unit=by_unit, speculative=speculative, gradients_first=gradients_first)
        return placement

    def fill(self, host_bytes: int, *, by_unit: bool, speculative: bool, gradients_first: bool) -> None:
        """Keep what saves most traffic per byte, as much as fits: all kinds of one unit after the other, or one kind of
        all units after the other. ``speculative`` as in ``make_plan``. Gradients come last, unless they come before
        states; where a step costs less so, some of what comes before them leaves its room to them.

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
        self._keep_best(
            self._away(order), self._away([] if gradients_first else grads), host_bytes, speculative=speculative
        )
        staging = self._records.staged(self.resident, self._staging)
        if any(comes_by_use) and staging.slot_bytes:
            room = host_bytes - self.total_bytes
            self._staging = replace(self._staging, num_slots=self._staging.num_slots + room // staging.slot_bytes)

    def _away(self, order: Sequence[int]) -> Integers:
        """Those of these records that are not resident so far."""
        records = np.array(order, np.int64)
        return records[~self.resident[records]]

    def _keep_best(self, order: Integers, grads: Integers, host_bytes: int, *, speculative: bool) -> None:
        """Keep a prefix of ``order`` and then one of ``grads``, both as long as fits, or the shorter prefix of
        ``order`` with which a step costs least. So a placement of a smaller budget is always among those to choose
        from."""
        fits = self._keep(order, host_bytes)
        best, least = self.resident.copy(), self.step_cost(speculative=speculative)
        for count in reversed(range(0, fits + 1, -(-len(order) // _PREFIXES) or 1)):
            self.resident[order[count:]] = False
            self.resident[grads] = True
            if self.step_cost(speculative=speculative) >= least:  # nor would a shorter one cost less
                break
            self._keep(grads, host_bytes)
            cost = self.step_cost(speculative=speculative)
            if cost < least:
                best, least = self.resident.copy(), cost
        self.resident = best

    def _keep(self, records: Integers, host_bytes: int) -> int:
        """Keep the longest prefix of ``records`` that fits, and return its length."""

        def keep(count: int) -> None:
            self.resident[records[:count]] = True
            self.resident[records[count:]] = False

        keep(0)
        room = host_bytes - self.total_bytes
        # so many at least, as staging only shrinks with what is kept
        fits = int(np.searchsorted(np.cumsum(self._records.nbytes[records]), room, side="right"))
        count, stride, too_many = fits + 1, 1, len(records) + 1
        while too_many - fits > 1:
            if not fits < count < too_many:
                count = (fits + too_many) // 2
            keep(count)
            if self.total_bytes <= host_bytes:
                fits, count = count, count + stride
            else:
                too_many, count = count, count - stride
            stride *= 2
        keep(fits)
        return fits
