"""The log of updates: which units a commit writes, and of which it logs the last update.

[Note: The log of updates] What a step changes of a unit follows from what the unit was, its gradients, and the step as
it was frozen (``Coef``, with the factor of clipping in it): the kernels give the same bits each time. So a commit need
not write the weights and states that rest in memory. It writes the gradients, which are a sixth of them, to extents of
their own, and the description of the generation says which step they take. Whoever reads the records finds them as
they are after all logged updates (``replay.py``).
Logged gradients are extents of a generation like all others: synced, named with their checksums by a manifest that is
published at once. So a commit is whole or it is not there, as without a log.
A unit is written again after ``LOGGED_STEPS`` logged updates, one unit after the other, so that every commit writes
about as much. It is written, too, if its last update was not the only change since the last commit: after a change from
outside, a checkpoint that was loaded, a step that no commit has (``durable=2``), or if its gradients are not those of
the step any more. A checkpoint, and the commit at the end, log nothing: all units are written.
[Note: When gradients are logged] Their memory is the next backward's. They are written first, before the update is
over, and the first gradient that would replace one waits until all are written (``LastGradients``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from offload.checkpoint.native.logged_updates import LoggedUpdate, logged
from offload.plan.update_log import LOGGED_STEPS, in_parts, tiles_a_part
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.home import UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import UnitSpec
from offload.update.step import UnitUpdate
from swapper import Extent


@dataclass(frozen=True)
class Logging:
    """Contents of one commit, as far as the log goes."""

    chains: Mapping[UnitSpec, tuple[LoggedUpdate, ...]] = field(default_factory=dict)
    """Logged updates of each unit that has a log, in order; none if the commit writes the unit."""
    gradients: Sequence[tuple[Extent, int]] = ()
    """Extents that gradients are written to, each with their address."""
    over: Sequence[Extent] = ()
    """Extents whose gradients nobody needs any more."""

    @property
    def updates(self) -> tuple[LoggedUpdate, ...]:
        """All logged updates, those of each unit in order."""
        return tuple(update for chain in self.chains.values() for update in chain)

    def writes(self, unit: UnitSpec) -> bool:
        """The commit writes the unit's records that rest in memory, as far as they have changed."""
        return not self.chains.get(unit)


class UpdateLog:
    """See the module's docstring. The training thread calls all methods but ``committed``, when no commit is under
    way."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        extents: Sequence[RecordExtents],
        gradients: LastGradients,
        gradient_bytes: int,
    ) -> None:
        """``gradient_bytes`` are those of one element. Units whose extents have no log are always written."""
        self.gradients = gradients
        self._homes = homes
        self._width = gradient_bytes
        self._extents = {unit: of_unit.log for unit, of_unit in zip(units, extents, strict=True) if of_unit.log}
        self._turns = _turns([sum(extent.nbytes for extent in slots[0]) for slots in self._extents.values()])
        self._num_commits = 0
        self._updates: dict[UnitSpec, UnitUpdate] | None = None
        """Updates of the last step, which no commit has."""
        self._chains: dict[UnitSpec, tuple[LoggedUpdate, ...]] = {}
        """As the last commit has them, of the units that can go on from there."""

    def step_taken(self, step: Sequence[UnitUpdate]) -> None:
        """These updates are certain."""
        if self._updates is not None:  # those before were not committed: nothing goes on from there
            self._chains = {}
        self._updates = {update.unit: update for update in step}
        self.gradients.step_taken()

    def changing(self, unit: UnitSpec) -> None:
        """The unit is about to be changed by something else than an update."""
        self._chains.pop(unit, None)

    def next(self) -> Logging:
        """Return what the commit of the last step logs. Without ``committed`` the next one writes all units."""
        updates, self._updates = self._updates, None
        before, self._chains = self._chains, {}
        self._num_commits += 1
        chains: dict[UnitSpec, tuple[LoggedUpdate, ...]] = {}
        gradients: list[tuple[Extent, int]] = []
        over: list[Extent] = []
        for (unit, slots), turn in zip(self._extents.items(), self._turns, strict=True):
            chain = before.get(unit)
            if updates is not None and chain is not None and (self._num_commits + turn) % (LOGGED_STEPS + 1):
                update = updates.get(unit)
                chains[unit] = chain if update is None else self._longer(chain, update, gradients)
            else:
                chains[unit] = ()
            if not chains[unit]:
                over += [extent for slot in slots for extent in slot]
        return Logging(chains, gradients, over)

    def all(self) -> Logging:
        """The contents of a commit that writes all units."""
        self._updates, self._chains = None, {}
        return self.next()

    def committed(self, logging: Logging) -> None:
        """The commit with these contents is the last one."""
        self._chains = dict(logging.chains)

    def _longer(
        self, chain: tuple[LoggedUpdate, ...], update: UnitUpdate, gradients: list[tuple[Extent, int]]
    ) -> tuple[LoggedUpdate, ...]:
        """The chain with one more update, whose gradients join those to be written; none if it cannot be logged."""
        homes, slots = self._homes[update.unit.index], self._extents[update.unit]
        address = homes.grads_address
        if address is None or len(chain) == len(slots) or not self.gradients.are_there(update.unit):
            return ()
        slot, tiles = slots[len(chain)], [tile.tile for tile in homes.tiles]
        num_tiles = tiles_a_part(tiles, self._width)
        one = logged(update.unit.name, num_tiles, [extent.index for extent in slot], update.segments)
        if one is None:
            return ()
        for extent, part in zip(slot, in_parts(tiles, num_tiles), strict=True):
            gradients.append((extent, address + part[0].start * self._width))
        return (*chain, one)


def _turns(sizes: Sequence[int]) -> list[int]:
    """The turn of each unit to be written, of ``LOGGED_STEPS + 1``, so that as many bytes fall to each."""
    ends = list(accumulate(sizes, initial=0))
    return [(start + end) * (LOGGED_STEPS + 1) // max(2 * ends[-1], 1) for start, end in pairwise(ends)]
