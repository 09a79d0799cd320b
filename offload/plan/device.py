"""Division of device memory: resident units, the other weights around their use, gradients on their way out."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import BudgetError
from offload.optim.formats import Formats
from offload.plan.buffers import SquaresOf
from offload.plan.ranks import RanksPlan
from offload.units import UnitSpec, largest_numel, largest_trainable_numel, num_nested
from offload.units.spread import spread_rank
from swapper import align, readable_bytes

MARGIN = 0.75
"""Of what the first step has left free, "auto" takes this much: activations are not the same in every step, and an
allocator cannot use every gap."""

AUTO_RESIDENT_SHARE = 0.5
"""A model that takes at most this much of what is free is resident there altogether with "auto"; the rest is left to
its activations, whose size nothing tells before the first step."""

NUM_AHEAD = 2
"""Units that may arrive on a device while others are in use there."""

_FIRST_SHARE = 0.4
"""Of the units that fit: those that forward begins with. Backward ends with them, so that their gradients go, their
update and their weights' way back would be waited for, whatever else is ready; and while they compute, the updates of
those behind them come to their end and fill the windows. The more fit, the faster compute is past each of them: see
"The bound of the schedule" in ``docs/plan.md``."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of device memory that the engine may hold.

    ``resident`` are the indices of the units that rest there, and never leave; ``resident_bytes`` is what they take, by
    kind.
    ``all_bytes``: the weights of all other units. ``least_weights_bytes``: those that compute needs at a time.
    Where the CPU computes it is ``ON_HOST``, which has no units and takes nothing.
    """

    weights_bytes: int = 0
    least_weights_bytes: int = 0
    gradients_bytes: int = 0
    all_bytes: int = 0
    num_units: int = 0
    resident: frozenset[int] = frozenset()
    resident_bytes: dict[str, int] = field(default_factory=dict)
    squares_bytes: int = 0
    """Bytes that sums of squares of gradients take."""
    updates_bytes: int = 0
    """Buffers for tiles of the other units that are updated there: see ``DeviceSide``. 0: none are."""
    ranks_bytes: int = 0
    """Shards and gradients on their way between ranks, whose units are shards."""
    unsupported_reason: str | None = None
    """Reason why no unit may be resident there, if that is so."""
    num_ahead: int = NUM_AHEAD
    """See ``DeviceNeeds``."""

    @property
    def computes(self) -> bool:
        """A device does, not the CPU."""
        return self.num_units > 0

    @property
    def passing_bytes(self) -> int:
        """Buffers that weights and gradients of other units pass through, and those of updates and sums."""
        passing = self.weights_bytes + self.gradients_bytes + self.updates_bytes
        return passing + self.squares_bytes + self.ranks_bytes

    @property
    def total_bytes(self) -> int:
        return self.passing_bytes + sum(self.resident_bytes.values())

    def grown(self, free_bytes: int) -> DevicePlan:
        """The plan with copies in what a step has left free."""
        more = max(int(free_bytes * MARGIN), 0)
        return replace(self, weights_bytes=min(self.weights_bytes + more, max(self.all_bytes, self.weights_bytes)))

    def __str__(self) -> str:
        mib = 1 << 20
        resident_mib = sum(self.resident_bytes.values()) / mib
        resident = f"{len(self.resident)} of {self.num_units} units resident in {resident_mib:,.1f} MiB"
        why = f" ({self.unsupported_reason})" if self.unsupported_reason is not None else ""
        parts = [f"device memory {self.total_bytes / mib:,.1f} MiB: {resident}{why}"]
        if self.all_bytes:
            parts.append(f"{self.weights_bytes / mib:,.1f} of {self.all_bytes / mib:,.1f} MiB of weights at a time")
            parts.append(f"{self.gradients_bytes / mib:,.1f} MiB of gradients on their way out")
            parts.append(f"{self.updates_bytes / mib:,.1f} MiB for updates of the other units")
        if self.ranks_bytes:
            parts.append(f"{self.ranks_bytes / mib:,.1f} MiB for what passes between ranks")
        return ", ".join(parts)


ON_HOST = DevicePlan(unsupported_reason="the CPU computes")


@dataclass(frozen=True)
class DeviceNeeds:
    """Bytes that units take of a device's memory. ``states`` are each unit's optimizer states and masters, in bytes.

    ``updates`` is what each takes for its update, if it is not resident; they take turns. ``unsupported_reason`` is
    what hinders kernels there, so that none may be resident. Where there are several ``ranks`` the units are shards.
    For ``num_ahead`` units there is room for copies, beside those in use, before others become resident."""

    units: Sequence[UnitSpec]
    formats: Formats
    states: Sequence[int]
    updates: Sequence[int]
    unsupported_reason: str | None
    ranks: RanksPlan
    adds_squares: bool
    """Kernels run there, which take the sums of squares of gradients, whatever the optimizer can do there."""
    num_ahead: int = NUM_AHEAD

    def of_unit(self, index: int) -> dict[str, int]:
        """By kind, of a unit that is resident there."""
        unit, formats = self.units[index], self.formats
        return {
            "weights": unit.numel * formats.weights,
            "grads": align(unit.trainable_numel * formats.grads),
            "states": align(self.states[index]),
        }

    def of_units(self, resident: Collection[int]) -> dict[str, int]:
        """Of all these units."""
        kinds: dict[str, int] = {}
        for index in resident:
            for kind, nbytes in self.of_unit(index).items():
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds

    @functools.cached_property
    def unit_bytes(self) -> list[int]:
        """Of each unit, if it is resident there."""
        return [sum(self.of_unit(index).values()) for index in range(len(self.units))]

    def saved_per_byte(self, index: int) -> float:
        """Bytes that need not move in a step, for each resident byte on the device.

        Over the link, and in host memory at its other end: weights twice, gradients once. In host memory alone: what an
        update reads and writes.
        """
        return self._saved_per_byte[index]

    @functools.cached_property
    def _saved_per_byte(self) -> list[float]:
        return [self._saved_of(index) for index in range(len(self.units))]

    def _saved_of(self, index: int) -> float:
        unit, formats = self.units[index], self.formats
        link = 2 * unit.numel * formats.weights + unit.trainable_numel * formats.weights * bool(formats.grads)
        update = formats.update_bytes(self.states[index], unit.trainable_numel)
        return round((2 * link + update * bool(formats.grads)) / max(self.unit_bytes[index], 1), 3)

    def rank(self, index: int, num_first: int = 0) -> tuple[float, bool, float]:
        """Of a unit among those that may be resident: see ``plan_device``."""
        return -self.saved_per_byte(index), index >= num_first, spread_rank(index)

    def squares(self, resident: Collection[int]) -> int:
        """Sums of squares, when these units are resident there; none where they are worked out in host memory."""
        return self._squares.nbytes(resident) if self.formats.grads and self.adds_squares else 0

    @functools.cached_property
    def _squares(self) -> SquaresOf:
        return SquaresOf(self.units)

    def updated(self, resident: Collection[int]) -> int:
        """For updates of the units that are not resident there."""
        return max((nbytes for index, nbytes in enumerate(self.updates) if index not in resident), default=0)

    def staged(self, resident: Collection[int]) -> tuple[int, int, int, int]:
        """Of the units that are not resident there: the least and a comfortable amount for weights at a time, the
        gradients on their way, all weights. Whole units are gathered also from shards that are resident."""
        rest = [unit for unit in self.units if unit.index not in resident]
        everything = sum(unit.numel for unit in rest)
        nested = num_nested(rest) if rest else 0
        return self.staged_of(nested, largest_numel(rest), largest_trainable_numel(rest), everything)

    def staged_of(
        self, nested: int, largest: int, trained: int, everything: int, num_ahead: int = NUM_AHEAD
    ) -> tuple[int, int, int, int]:
        """The same for units of which compute needs ``nested`` at a time and ``num_ahead`` come meanwhile; elements of
        the ``largest`` one, of what is ``trained`` of one, of ``everything``."""
        ranks, width = self.ranks, self.formats.weights
        if ranks.gathers:
            return ranks.least_bytes, sum(ranks.places), trained * self.formats.grads, ranks.all_bytes
        gradients = trained * width if self.formats.grads else 0
        least, all_bytes = nested * largest * width, everything * width
        return least, min(least + num_ahead * largest * width, max(all_bytes, least)), gradients, all_bytes


def plan_device(needs: DeviceNeeds, device_bytes: int | None, free_bytes: int) -> DevicePlan:
    """Divide ``device_bytes``, or with None ("auto") what of ``free_bytes`` is safe to take before the first step.

    Compute holds the unit at work and those around it; two more arrive meanwhile. The gradients of one unit are on
    their way while the next ones are made. Where there is more, units rest there with all that belongs to them, as many
    as fit beside that and ``num_ahead`` copies: those first whose bytes save most traffic, and among equals those that
    forward begins with, two of five that fit, and then others, spread evenly, so that the link has always something to
    do. What is left then keeps copies of weights. Buffers for updates of the other units come before residents, if
    there is room. Of several ranks the units are a rank's shards, and compute takes the whole units that they are
    gathered to.

    Raises ``BudgetError``, naming the least that works.
    """
    units, unsupported_reason, between = needs.units, needs.unsupported_reason, needs.ranks.device_bytes

    def plan(resident: Collection[int], spare_bytes: int | None) -> DevicePlan:
        least, comfortable, gradients, everything = needs.staged(resident)
        resident_bytes = needs.of_units(resident)
        squares, updated = needs.squares(resident), needs.updated(resident)
        weights = comfortable
        others = gradients + squares + between + sum(resident_bytes.values())
        bound = free_bytes * AUTO_RESIDENT_SHARE if spare_bytes is None else spare_bytes
        if others + comfortable + updated > bound:
            updated = 0
        if spare_bytes is not None:
            weights = min(spare_bytes - others - updated, max(everything, least))
        return DevicePlan(
            weights,
            least,
            gradients,
            everything,
            len(units),
            frozenset(resident),
            resident_bytes,
            squares,
            updated,
            between,
            unsupported_reason,
            needs.num_ahead,
        )

    every = range(len(units))
    if device_bytes is None:
        whole = plan(every, None)
        fits = unsupported_reason is None and whole.total_bytes <= free_bytes * AUTO_RESIDENT_SHARE
        return whole if fits else plan((), None)
    weights, _, gradients, _ = needs.staged(())
    least = weights + gradients + needs.squares(()) + between
    if device_bytes < least:
        raise BudgetError(
            f"device_memory is too small: the least that works for this model is {readable_bytes(least)}, "
            f"{readable_bytes(device_bytes)} are given. Raise device_memory to {{needed}}.",
            least,
            budget="device_memory",
        )
    resident: Collection[int] = ()
    if unsupported_reason is None:
        room = device_bytes - between
        num_first = math.ceil(_FIRST_SHARE * len(_choose(needs, sorted(every, key=needs.rank), room)))
        resident = _choose(needs, sorted(every, key=lambda index: needs.rank(index, num_first)), room)
    return plan(resident, device_bytes)


def _choose(needs: DeviceNeeds, order: Iterable[int], room: int) -> set[int]:
    """Those that fit when they are taken in this order."""
    chosen = _Chosen(needs)
    for index in order:
        if chosen.bytes_with(index) <= room:
            chosen.add(index)
    return chosen.resident


class _Chosen:
    """Units that are to be ``resident``, and what one more would take: in time that does not grow with their number."""

    def __init__(self, needs: DeviceNeeds) -> None:
        self.resident: set[int] = set()
        units = needs.units
        self._needs, self._everything = needs, sum(unit.numel for unit in units)
        self._unit_bytes = needs.unit_bytes
        self._bytes = needs.squares(range(len(units)))  # no choice takes more for them
        self._numel = _Left([unit.numel // unit.count for unit in units])
        self._trained = _Left([unit.trainable_numel // unit.count for unit in units])
        self._nested = _Left([unit.depth + 1 for unit in units])
        self._updates = _Left(needs.updates)

    def bytes_with(self, index: int) -> int:
        """Bytes that residents, what passes through and updates take with this one, too."""
        needs, largest = self._needs, self._numel.largest_without(index)
        nested, trained = self._nested.largest_without(index), self._trained.largest_without(index)
        everything = self._everything - needs.units[index].numel
        _, copies, gradients, _ = needs.staged_of(nested, largest, trained, everything, needs.num_ahead)
        passing = copies + gradients + self._updates.largest_without(index)
        return self._bytes + self._unit_bytes[index] + passing

    def add(self, index: int) -> None:
        """Make it resident."""
        self.resident.add(index)
        self._everything -= self._needs.units[index].numel
        self._bytes += self._unit_bytes[index]
        for left in (self._numel, self._trained, self._nested, self._updates):
            left.take(index)


class _Left:
    """Numbers, from which one after the other is taken."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self._taken = values, [False] * len(values)
        self._order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        self._first = 0

    def take(self, index: int) -> None:
        self._taken[index] = True
        while self._first < len(self._order) and self._taken[self._order[self._first]]:
            self._first += 1

    def largest_without(self, index: int) -> int:
        """The largest that would be left; 0 if none were."""
        for place in range(self._first, len(self._order)):
            other = self._order[place]
            if other != index and not self._taken[other]:
                return self._values[other]
        return 0
