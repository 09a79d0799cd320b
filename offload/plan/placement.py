"""The placement: a pure function from units and budgets to a tier for every record, decided once, before step 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.errors import BudgetError
from offload.optim.formats import DEFAULT_TILE_BYTES, Formats
from offload.plan.device import GOLDEN
from offload.plan.plan import Plan, Staging, Tier, TilesOf, UnitPlan
from offload.units import UnitSpec, largest_numel, num_nested
from swapper import align, edge_bytes, readable_bytes

_TILES_A_UNIT = 8
"""Tiles smaller than the largest unit's weights divided by this save no memory worth the speed they cost."""

_LEAST_TILE_BYTES = 64 << 10

_NUM_TILE_BUFFERS = 6
"""Enough for the disk to read, the kernel to work and the disk to write at the same time, and some to even out."""

_NUM_GRAD_BUFFERS = 3


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
) -> Plan:
    """Give every kind of every unit a tier, within the budgets, by traffic saved per byte.

    Access is cyclic, so what is resident in RAM is fixed and spread evenly over the units, and the disk always has
    something to do. In a step of ``num_backwards`` = k micro-batches, a byte of weights saves 2k + 1 transfers (read
    for each forward and backward, written), one of states two, one of gradients 2k. With k = 1 states come before
    gradients: theirs are both after the verdict, where the disk has most to do if a step is clipped. ``speculative``
    tells that streamed units may be updated during backward: then units are resident with their weights and states
    together, which is what such an update moves, and the others have work for the disk in forward and in backward. A
    tied weight in pieces would go over the disk for each of its sites; it is always resident, and so are its gradients.
    ``tiles_of`` is None where nothing is trained. ``tile_bytes=None`` lets the tile shrink when memory is short.
    ``compute_bytes`` are taken beside all that.

    Raises ``BudgetError``, naming the least budget that works.
    """
    placement = _Placement(units, formats, tiles_of, Staging(0, 0, 0, tile_bytes or DEFAULT_TILE_BYTES), compute_bytes)
    everything = placement.with_all_resident()
    if everything.total_bytes <= host_bytes:
        return everything.plan(host_bytes)
    if nvme_bytes == 0 and any(unit.stored_numel for unit in units):
        raise BudgetError(
            "host_memory is too small to hold everything and there is no nvme_path: "
            f"{readable_bytes(everything.total_bytes)} are needed, {readable_bytes(host_bytes)} are given. "
            "Give an nvme_path, or raise host_memory to {needed}.",
            everything.total_bytes,
        )
    for staging in _stagings(units, formats, tile_bytes, training=tiles_of is not None):
        placement = _Placement(units, formats, tiles_of, staging, compute_bytes)
        placement.keep_large_units()
        if placement.total_bytes <= host_bytes:
            break
    else:
        least = min(placement.total_bytes, everything.total_bytes)  # staging can take more than all of a small model
        raise BudgetError(
            f"host_memory is too small: the least that works for this model is {readable_bytes(least)}, "
            f"{readable_bytes(host_bytes)} are given. Raise host_memory to {{needed}}.",
            least,
        )
    placement.fill(host_bytes, by_unit=speculative, gradients_first=num_backwards > 1)
    plan = placement.plan(host_bytes)
    needed = sum(plan.nvme_bytes.values())
    if needed > nvme_bytes:
        raise BudgetError(
            f"nvme_capacity is too small: {readable_bytes(needed)} must rest on NVMe where host memory is "
            f"{readable_bytes(host_bytes)}, {readable_bytes(nvme_bytes)} are given. "
            "Raise nvme_capacity to {needed}, or raise host_memory.",
            needed,
        )
    return plan


def _stagings(
    units: Sequence[UnitSpec], formats: Formats, tile_bytes: int | None, *, training: bool
) -> Iterator[Staging]:
    """From comfortable to the least that works.

    Compute holds one slot for each unit around the one at work, the update holds one, and one or two more let the next
    units arrive in time. Of three gradient buffers one is filled, one written and one read by a speculative update.
    Less memory would work too, but each unit would wait for the one before it. Tiles that are small against a slot save
    no memory worth their cost.
    """
    largest = largest_numel(units) * formats.weights
    small = max(min(largest // _TILES_A_UNIT, DEFAULT_TILE_BYTES) // _LEAST_TILE_BYTES, 1) * _LEAST_TILE_BYTES
    least_slots = num_nested(units) + (1 if training else 0)
    for slots in (least_slots + 2, least_slots + 1):
        sizes = [size for size in (DEFAULT_TILE_BYTES >> shift for shift in range(3)) if size > small]
        for size in [tile_bytes] if tile_bytes else [*sizes, small]:
            yield Staging(slots, _NUM_GRAD_BUFFERS, _NUM_TILE_BUFFERS, size)


@dataclass
class _Placement:
    """A placement in the making: what is resident in RAM, and what all of it costs."""

    units: Sequence[UnitSpec]
    formats: Formats
    tiles_of: TilesOf | None
    staging: Staging
    compute_bytes: int

    def __post_init__(self) -> None:
        tiles_of, tile_bytes = self.tiles_of, self.staging.tile_bytes
        self.tiles = [tiles_of(unit, tile_bytes) if tiles_of is not None else () for unit in self.units]
        self.weights_resident = [unit.reused for unit in self.units]
        self.grads_resident = [unit.reused or unit.trainable_numel * self.formats.grads == 0 for unit in self.units]
        self.tiles_resident = [[tile.nbytes == 0 for tile in tiles] for tiles in self.tiles]
        self._edges = [edge_bytes(unit.in_files) for unit in self.units]

    def with_all_resident(self) -> _Placement:
        placement = replace(self)
        placement.weights_resident = [True] * len(self.units)
        placement.grads_resident = [True] * len(self.units)
        placement.tiles_resident = [[True] * len(tiles) for tiles in self.tiles]
        return placement

    def keep_large_units(self) -> None:
        """Keep the units in RAM that make every buffer so large that without them all of it takes less memory."""
        for size in sorted({unit.numel for unit in self.units}, reverse=True):
            before, weights, grads = self.total_bytes, self.weights_resident, self.grads_resident
            self.weights_resident = [kept or unit.numel == size for kept, unit in zip(weights, self.units, strict=True)]
            self.grads_resident = [kept or unit.numel == size for kept, unit in zip(grads, self.units, strict=True)]
            if self.total_bytes >= before:
                self.weights_resident, self.grads_resident = weights, grads
                return

    def fill(self, host_bytes: int, *, by_unit: bool, gradients_first: bool) -> None:
        """Keep what saves most traffic per byte, as much as fits: all kinds of one unit after the other, or one kind of
        all units after the other. Gradients come last, unless they come before states.

        Where nothing is trained, experts come last: the room that is left is slots for all of them.

        First the units that forward begins with, whose gradients come last: nothing else is left to do while they are
        updated. The others in an order that is spread evenly.
        """
        first = self.units[0].whole
        is_first = [unit is self.units[0] or (unit.whole is not None and unit.whole is first) for unit in self.units]
        spread = sorted(range(len(self.units)), key=lambda index: (not is_first[index], index * GOLDEN % 1))
        weights = [(self.weights_resident, index) for index in spread if not self._comes_by_use(index)]
        grads = [(self.grads_resident, index) for index in spread]
        if by_unit:
            self._keep([kind for i in spread for kind in self._kinds(i, gradients=gradients_first)], host_bytes)
        else:
            most_tiles = max((len(tiles) for tiles in self.tiles), default=0)
            tiles = [(self.tiles_resident[i], n) for n in range(most_tiles) for i in spread if n < len(self.tiles[i])]
            self._keep(weights, host_bytes)
            if gradients_first:
                self._keep(grads, host_bytes)
            self._keep(tiles, host_bytes)
        self._keep(grads, host_bytes)
        room, slot_bytes = host_bytes - self.total_bytes, self._buffers().slot_bytes
        if any(map(self._comes_by_use, range(len(self.units)))) and slot_bytes:
            self.staging = replace(self.staging, num_slots=self.staging.num_slots + room // slot_bytes)

    def _comes_by_use(self, index: int) -> bool:
        """It is an expert where nothing is trained: those that are used most are the ones that stay."""
        return self.tiles_of is None and self.units[index].experts is not None

    def _kinds(self, index: int, *, gradients: bool) -> list[tuple[list[bool], int]]:
        """Kinds that belong to one unit, with its gradients or without."""
        tiles = self.tiles_resident[index]
        of_gradients = [(self.grads_resident, index)] if gradients else []
        return [(self.weights_resident, index), *of_gradients, *((tiles, n) for n in range(len(tiles)))]

    def _keep(self, candidates: list[tuple[list[bool], int]], host_bytes: int) -> None:
        """Keep the longest prefix of ``candidates`` that fits."""
        candidates = [(kept, index) for kept, index in candidates if not kept[index]]

        def keep(count: int) -> None:
            for position, (kept, index) in enumerate(candidates):
                kept[index] = position < count

        fits, too_many = 0, len(candidates) + 1
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            keep(count)
            if self.total_bytes <= host_bytes:
                fits = count
            else:
                too_many = count
        keep(fits)

    def _weight_bytes(self, index: int) -> int:
        return self.units[index].numel * self.formats.weights

    def _grad_bytes(self, index: int) -> int:
        return self.units[index].trainable_numel * self.formats.grads

    def _resident_bytes(self) -> dict[str, int]:
        everywhere = range(len(self.units))
        return {
            "weights": sum(self._weight_bytes(i) for i in everywhere if self.weights_resident[i]),
            "grads": sum(self._grad_bytes(i) for i in everywhere if self.grads_resident[i]),
            "states": sum(
                align(tile.nbytes)
                for i in everywhere
                for tile, resident in zip(self.tiles[i], self.tiles_resident[i], strict=True)
                if resident
            ),
        }

    def _buffers(self) -> Staging:
        """The staging cut down to what streams."""
        counts = [unit.count for unit in self.units]
        streamed = [self._weight_bytes(i) // counts[i] for i, kept in enumerate(self.weights_resident) if not kept]
        in_place = (self._edges[i] for i, resident in enumerate(self.weights_resident) if not resident)
        spilled = [self._grad_bytes(i) // counts[i] for i, kept in enumerate(self.grads_resident) if not kept]
        spilled_tile = any(spilled) * self.formats.grads
        tiles = [
            (align(tile.nbytes) * (not resident) + tile.numel * spilled_tile * (not self.grads_resident[i]))
            // tile.count
            for i in range(len(self.units))
            for tile, resident in zip(self.tiles[i], self.tiles_resident[i], strict=True)
        ]
        return replace(
            self.staging,
            num_slots=min(self.staging.num_slots, len(streamed)),
            num_grad_buffers=min(self.staging.num_grad_buffers, len(spilled)),
            num_tile_buffers=min(self.staging.num_tile_buffers, sum(1 for nbytes in tiles if nbytes)),
            slot_bytes=max(streamed, default=0),
            edge_bytes=max((align(edges) for edges in in_place), default=0),
            grad_buffer_bytes=max(spilled, default=0),
            tile_buffer_bytes=max(tiles, default=0),
        )

    @property
    def total_bytes(self) -> int:
        return sum(self._resident_bytes().values()) + self._buffers().nbytes + self.compute_bytes

    def plan(self, host_budget_bytes: int) -> Plan:
        tiers = {True: Tier.HOST, False: Tier.NVME}
        units = tuple(
            UnitPlan(
                unit,
                tiers[self.weights_resident[i]],
                tiers[self.grads_resident[i]],
                tuple(
                    (tile, tiers[resident])
                    for tile, resident in zip(self.tiles[i], self.tiles_resident[i], strict=True)
                ),
            )
            for i, unit in enumerate(self.units)
        )
        return Plan(
            units=units,
            formats=self.formats,
            staging=self._buffers(),
            host_budget_bytes=host_budget_bytes,
            compute_bytes=self.compute_bytes,
        )
