"""The records of units as arrays, so that a placement can be weighed in one sweep over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from offload.optim.formats import Formats
from offload.plan.plan import Plan, Staging, Tier, TilesOf, UnitPlan
from offload.plan.routing import Routing
from offload.units import UnitSpec, num_nested
from swapper import align

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TRANSFER_BYTES = 512 << 10
"""A transfer costs what so many bytes more would, however small it is: its request, its wake-ups, its bookkeeping."""


WAIT_SHARE = 8
"""The cost of weights counts an eighth more where units wait for each other's slots, and so does that of gradients
where compute waits for the update that has their buffer. By the forecast."""

_COMFORTABLE_GRAD_BUFFERS = 3
"""With so many compute, an update and what is written have one each."""


class Records:
    """All records of ``units``, numbered: the weights of each unit, the gradients of each unit, the states of each
    tile. A placement says of each of them whether it is ``resident`` in RAM."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        formats: Formats,
        tiles_of: TilesOf | None,
        tile_bytes: int,
        num_backwards: int,
        rereads: bool,
        routing: Routing,
    ) -> None:
        """``tiles_of`` is None where nothing is trained; the last three as in ``make_plan``."""
        self.units, self.formats, self._routing, self._num_backwards = units, formats, routing, num_backwards
        self.num_comfortable_slots = num_nested(units) + (3 if formats.grads else 2)
        """Slots with which compute, the update and the next units have one each."""
        self._tiles = [tiles_of(unit, tile_bytes) if tiles_of is not None else () for unit in units]
        flat = [tile for tiles in self._tiles for tile in tiles]
        self.has_large_tiles = any(tile.nbytes > tile.count * tile_bytes for tile in flat)
        """There are tiles of more bytes than were asked for."""
        count, lengths = len(units), _integers(map(len, self._tiles))
        self.weights, self.grads, self.states = slice(count), slice(count, 2 * count), slice(2 * count, None)
        self.numel = _integers(unit.numel for unit in units)
        trained = _integers(unit.trainable_numel for unit in units)
        self._counts = _integers(unit.count for unit in units)
        states = _integers(align(tile.nbytes) for tile in flat)
        self.nbytes = np.concatenate([self.numel * formats.weights, trained * formats.grads, states])
        self._first_states = 2 * count + np.cumsum(lengths) - lengths
        self._unit_of_tile = np.repeat(np.arange(count), lengths)
        self._tile_counts = _integers(tile.count for tile in flat)
        tile_numels = _integers(tile.numel for tile in flat)
        self.cut = np.stack([self._unit_of_tile, tile_numels, states, self._tile_counts]).tobytes()
        """Equal where units are cut into the same tiles."""
        tile_grads = tile_numels * formats.grads
        self._one_grads = tile_grads // self._tile_counts
        self._one_states = states // self._tile_counts
        self._one_of_both = (states + tile_grads) // self._tile_counts
        """Bytes that one of the tiles which are taken together has in a buffer: a division for each placement that is
        weighed would take most of its time."""
        self._one_weights, self._one_unit_grads = (
            self.numel * formats.weights // self._counts,
            trained * formats.grads // self._counts,
        )
        self._edges = _integers(align(unit.from_files.edge_bytes) for unit in units)
        backwards = 2 * num_backwards if formats.grads else 1
        reads = backwards * np.fromiter(map(routing.used, units), float)
        num_tiles = _integers(sum(tile.count for tile in tiles) for tiles in self._tiles)
        one_read = trained * formats.grads + num_tiles * TRANSFER_BYTES
        transfers = [(reads + (trained > 0)) * self._counts, num_tiles * backwards, 2 * self._tile_counts]
        self._transfer_costs = (TRANSFER_BYTES * np.concatenate(transfers)).astype(np.int64)
        self._saved = np.concatenate(
            [-rereads * (trained > 0) * (self.numel * formats.weights + self._counts * TRANSFER_BYTES), one_read]
        )
        """Bytes that an update during backward saves of a unit's weights and of its gradients."""
        moved = [(self.numel * reads + trained) * formats.weights, trained * formats.grads * backwards, 2 * states]
        self._costs = (np.concatenate(moved) + self._transfer_costs).astype(np.int64)

    def small_units(self) -> list[int]:
        """The units whose transfers cost more than their bytes."""
        transfers, all_costs = map(self._of_units, (self._transfer_costs, self._costs))
        return [index for index, is_small in enumerate(2 * transfers > all_costs) if is_small]

    def _of_units(self, costs: Integers) -> Integers:
        """Costs of each unit's records, added up."""
        states = np.bincount(self._unit_of_tile, costs[self.states], len(self.units)).astype(np.int64)
        return states + costs[self.weights] + costs[self.grads]

    def always_resident(self) -> Flags:
        """Those that no placement puts elsewhere: tied weights in pieces, and what has no bytes."""
        reused = np.array([unit.reused for unit in self.units], bool)
        resident = np.concatenate([reused, reused, np.zeros(len(self._tile_counts), bool)])
        resident[self.grads.start :] |= self.nbytes[self.grads.start :] == 0
        return resident

    def states_of(self, index: int) -> range:
        """Numbers of the states of a unit."""
        first = int(self._first_states[index])
        return range(first, first + len(self._tiles[index]))

    def step_cost(self, resident: Flags, staging: Staging, *, speculative: bool) -> int:
        """Bytes that a step moves over NVMe, with those that transfers count for, and units that wait for a slot or for
        a buffer of gradients. ``speculative``: units that stream are updated during backward, which finds their last
        gradients where they came to."""
        away = ~resident
        cost = np.add.reduce(self._costs[away])
        if speculative:
            kept = np.bincount(self._unit_of_tile, resident[self.states], len(self.units)) + resident[self.weights]
            streams = kept == 0
            cost -= np.add.reduce(self._saved[np.concatenate((streams, streams)) & away[: self.states.start]])
            spilled = streams & away[self.grads] & (self.nbytes[self.grads] > 0)
            if staging.num_grad_buffers < min(_COMFORTABLE_GRAD_BUFFERS, int(np.count_nonzero(spilled))):
                cost += self._costs[self.grads][spilled].sum() // WAIT_SHARE
        streamed = away[self.weights]
        if staging.num_slots < min(self.num_comfortable_slots, int(np.count_nonzero(streamed))):
            cost += self._costs[self.weights][streamed].sum() // WAIT_SHARE
        return int(cost)

    def staged(self, resident: Flags, staging: Staging) -> Staging:
        """``staging``, cut down to what is not resident."""
        streamed = ~resident[self.weights]
        spilled = ~resident[self.grads] & (self._one_unit_grads > 0)
        with_grads = spilled[self._unit_of_tile]
        here = np.where(with_grads, self._one_grads, 0)
        away = np.where(with_grads, self._one_of_both, self._one_states)
        tiles = np.where(resident[self.states], here, away)
        return Staging(
            num_slots=min(staging.num_slots, int(np.count_nonzero(streamed))),
            num_grad_buffers=min(staging.num_grad_buffers, int(np.count_nonzero(spilled))),
            num_tile_buffers=min(staging.num_tile_buffers, int(np.count_nonzero(tiles > 0))),
            tile_bytes=staging.tile_bytes,
            slot_bytes=_largest(self._one_weights * streamed),
            edge_bytes=_largest(self._edges * streamed),
            grad_buffer_bytes=_largest(self._one_unit_grads * spilled),
            tile_buffer_bytes=_largest(tiles),
        )

    def plan(self, resident: Flags, staging: Staging, host_budget_bytes: int, compute_bytes: int) -> Plan:
        """The plan with these records resident in RAM."""
        tiers = [Tier.HOST if kept else Tier.NVME for kept in resident.tolist()]
        of_units = zip(self.units, tiers[self.weights], tiers[self.grads], strict=True)
        units = tuple(
            UnitPlan(unit, weights, grads, tuple(zip(tiles, (tiers[n] for n in self.states_of(i)), strict=True)))
            for i, ((unit, weights, grads), tiles) in enumerate(zip(of_units, self._tiles, strict=True))
        )
        plan = Plan(units, self.formats, staging, host_budget_bytes, compute_bytes)
        return replace(plan, routing=self._routing, passes=self._num_backwards)


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def _largest(nbytes: Integers) -> int:
    return int(np.maximum.reduce(nbytes, initial=0))
