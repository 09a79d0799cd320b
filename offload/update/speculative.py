"""Speculative updates: they begin during backward, before the step is certain, and count only if it turns out as
expected.

[Note: Why a speculative update harms nothing] It reads a unit's weights and states, and writes the new ones beside the
current ones, to the second place that each record has, on NVMe or in host memory. Only the step's verdict flips the
places, and only if the step is the one that the update was made for: the same gradients and factor, learning rate and
step number, everything finite. Otherwise the bytes beside are forgotten and the unit is updated in its turn. So a step
gives the same bits with and without, and a gradient that is not finite has changed nothing.

[Note: When a unit's gradients are complete] Nobody says which backward is the last one of a step. A unit has its
gradients when as many have come as for the last step. One that comes after all makes the update void.

[Note: Not every unit is updated speculatively] The disk then works in backward and has little to do in forward. If it
was busier in backward, one unit more is left for the next forward, at the price of another read of gradients that are
spilled; and the other way round.

[Note: Order of speculative updates] The unit that forward needs first comes first: of those that wait that is the last
one whose gradients have come, as backward goes the other way. Whatever is late in backward has little time, and what
came first has until the end of the next forward; what has not begun at the verdict is updated in place, in forward
order. So with enough time in all each update is there when it is needed (earliest deadline first). An update that holds
a slot, or a buffer of gradients, goes before those that hold nothing, and in the order in which they came: compute may
wait for what it holds.

[Note: When compute waits for a speculative update] Where gradients are resident in host memory never: there are no more
speculative updates than leave compute its slots, and the other units are updated under the next forward. Where
gradients are spilled a later update costs another read of them, so every unit is updated speculatively, from the buffer
that its gradients came to, and compute waits for the slot and the buffer. Such an update needs nothing that compute
holds, unless the updates of an earlier step are not over: then the first rule holds for these units, too. Where a
device computes, its copies of weights pass through the slots and leave them: a speculative update takes the slot that
the plan has for updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto

from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.unit import Loan
from offload.tiers.home import Home, StoredHome, TileHomes, Transfer, UnitHomes
from offload.tiers.weights.carrier import HostBuffer
from offload.tiers.weights.shadow import Shadow
from offload.units import UnitSpec
from offload.units.spread import spread_rank
from offload.update.step import UnitUpdate
from offload.waiting import Failure, Monitor


class Stage(Enum):
    """Stage of a speculative update.

    - ``HELD``: all gradients have come, or are on their way to the host. Where the CPU computes, the unit's slot is
      held until backward is done with it.
    - ``QUEUED``: asked for, not begun.
    - ``RUNNING``: some tile is on its way.
    - ``CONFIRMED``: the verdict wants it, while it still runs.
    - ``VOID``: it still runs, and its results are not wanted.
    - ``WRITTEN``: all of it is beside, or on its way there.
    - ``OVER``: flipped, forgotten, or never begun.
    """

    HELD = auto()
    QUEUED = auto()
    RUNNING = auto()
    CONFIRMED = auto()
    VOID = auto()
    WRITTEN = auto()
    OVER = auto()


_NEXT = {
    Stage.HELD: {Stage.QUEUED, Stage.OVER},
    Stage.QUEUED: {Stage.RUNNING, Stage.OVER},
    Stage.RUNNING: {Stage.WRITTEN, Stage.CONFIRMED, Stage.VOID},
    Stage.CONFIRMED: {Stage.OVER},
    Stage.VOID: {Stage.OVER},
    Stage.WRITTEN: {Stage.OVER},
    Stage.OVER: set(),
}


_DIFFERENCE = 0.1
"""Shares of two phases in which the disk is busy count as equal up to this."""


class SpeculativeUpdate:
    """The speculative update of one unit for the coming step. A task of the pipeline once it runs."""

    update: UnitUpdate
    tiles: Sequence[TileHomes]
    grads: int | None

    def __init__(self, unit: UnitSpec, owner: SpeculativeUpdates, *, is_slot_held: bool) -> None:
        self.unit = unit
        self.stage = Stage.HELD
        self.is_slot_held = is_slot_held
        """The weights are in a slot and stay there; else the update brings them in when it runs."""
        self.loan: Loan | None = None
        """Loan of the gradients where they still lie, if they need not be read back."""
        self._owner = owner
        self._shadow = owner.shadow_of(unit)
        self._buffer: HostBuffer | None = None

    @property
    def holds(self) -> bool:
        """It keeps a place that compute may want."""
        return self.is_slot_held or self.loan is not None

    def become(self, stage: Stage) -> None:
        """Go on to another stage; the owner's monitor is held."""
        if stage not in _NEXT[self.stage]:
            raise RuntimeError(
                f"the speculative update of unit {self.unit.name} cannot be {stage.name} after {self.stage.name}"
            )
        self.stage = stage

    # What the pipeline asks, on the update thread.

    def begins(self) -> None:
        pass

    def before_grads(self) -> None:
        self._owner.gradients.gradients_of(self.unit).wait_until_spilled()

    def states_at(self, states: Home) -> int:
        assert states.spare_address is not None
        return states.spare_address

    def weights_at_hand(self) -> bool:
        return not self._shadow.waits

    def weights(self) -> tuple[int, int] | None:
        if not self.is_slot_held:
            self._shadow.bring(self.unit)
        written = [tile.tile for tile in self.tiles]
        self._buffer = self._shadow.lend(self.unit, written, lambda: self.stage is not Stage.VOID)
        return None if self._buffer is None else (self._buffer.address, self._buffer.before)

    def write(self, states: StoredHome, address: int) -> Transfer:
        return states.write_shadow(address)

    def finish(self) -> None:
        if self._buffer is not None:
            self._shadow.give_back(self.unit, self._buffer)
        self._owner.finished(self)


@dataclass(eq=False)
class SpeculativeUpdates:
    """All speculative updates of the coming step. The training thread begins, voids and confirms them; the update
    thread, by ``tasks`` and the calls of each task, carries them out."""

    units: Sequence[UnitSpec]
    eligible: Callable[[UnitSpec], bool]
    """Tells units that have two places for all that an update writes."""
    max_held: int | None
    """Slots of compute that can be spared for speculative updates at a time; None where compute has no weights in host
    memory."""
    homes: Sequence[UnitHomes]
    shadow_of: Callable[[UnitSpec], Shadow]
    """The shadow to which a unit's weights are written."""
    gradients: GradientStore
    failure: Failure
    _: KW_ONLY
    num_backwards: int
    """Backwards that are expected before the first step."""

    def __post_init__(self) -> None:
        self._rank: dict[int, int] = {}
        """Of the units that may be updated speculatively."""
        self._num_speculative = 0
        """Units of a lower rank are updated speculatively, which leaves the others evenly spread."""
        self.look_at_homes()
        self._num_arrived = [0] * len(self.units)
        """Gradients of each unit that have come for the coming step."""
        self._num_expected = [self.num_backwards * len(unit.trainable) for unit in self.units]
        """Gradients that will come for it, if it is like the last one that the unit took part in."""
        self.of_unit: dict[int, SpeculativeUpdate] = {}
        """Those that are held or begun, by index of the unit, which is its shards' too; the training thread's alone."""
        self._changed = Monitor(self.failure)
        """Guards the stages and the four below. Outermost: the cache's monitor may be taken while it is held."""
        self._queue: list[SpeculativeUpdate] = []
        """As they were asked for."""
        self._carried_out = False
        """The update thread has, or will have, its eye on the queue."""
        self._num_holding = 0
        """Speculative updates that hold a slot, or have one."""
        self._num_steps = 0
        """Steps whose own updates are not over."""

    def look_at_homes(self) -> None:
        """Units rest elsewhere than before. There is no speculative update now."""
        spread = sorted(self.units, key=lambda unit: spread_rank(unit.index))
        eligible = [unit.index for unit in spread if self.eligible(unit)]
        self._rank = {index: rank for rank, index in enumerate(eligible)}
        self._num_speculative = len(eligible)

    # The training thread, during backward.

    def gradient_arrived(self, unit: UnitSpec) -> None:
        """If it was the unit's last one, its update may be next: hold the weights, which compute still has."""
        index = unit.index
        if index not in self._rank:
            return
        self._num_arrived[index] += 1
        if self._num_arrived[index] != self._num_expected[index] or index in self.of_unit:
            return
        if self._rank[index] >= self._num_speculative:
            return
        is_slot_held = self.max_held is not None
        if self.max_held is not None and not self._hold(unit, self.max_held):
            return
        self.of_unit[index] = SpeculativeUpdate(self.units[index], self, is_slot_held=is_slot_held)

    def is_held(self, unit: UnitSpec) -> bool:
        """An update of the unit would begin, now that its backward is over."""
        speculative = self.of_unit.get(unit.index)
        return speculative is not None and speculative.stage is Stage.HELD

    def begin(self, unit: UnitSpec, update: UnitUpdate | None) -> bool:
        """Ask for the update of a unit that is held; None lets it go. True if ``tasks`` must be carried out anew."""
        speculative, homes = self.of_unit[unit.index], self.homes[unit.index]
        with self._changed:
            if update is None:
                self._cancel(speculative)
                return False
            speculative.update = update
            speculative.tiles = update.touched(homes.tiles)
            if self._compute_may_wait(unit):
                speculative.loan = self.gradients.gradients_of(unit).lend()
            loan = speculative.loan
            speculative.grads = homes.grads_address if loan is None else loan.address
            speculative.become(Stage.QUEUED)
            self._queue.append(speculative)
            before, self._carried_out = self._carried_out, True
            return not before

    # The training thread, at any time.

    def invalidate(self, unit: UnitSpec) -> None:
        """The unit's weights, gradients or states are about to change: a speculative update of it is void, and reads
        nothing of the unit any more when this returns."""
        speculative = self.of_unit.get(unit.index)
        if speculative is None or speculative.stage is Stage.HELD:
            return
        del self.of_unit[unit.index]
        with self._changed:
            if speculative.stage is Stage.QUEUED:
                self._unqueue(speculative)
            elif speculative.stage is Stage.RUNNING:
                speculative.become(Stage.VOID)
                self._changed.wait_until(
                    lambda: speculative.stage is Stage.OVER, lambda: f"the speculative update of unit {unit.name}"
                )
            else:
                speculative.become(Stage.OVER)
        self.shadow_of(unit).forget(unit)

    def confirm(self, step: Sequence[UnitUpdate]) -> list[UnitUpdate]:
        """Flip the speculative updates that are what the step is to be, and forget all others; the updates still to
        do."""
        remaining = []
        for update in step:
            speculative = self.of_unit.get(update.unit.index)
            if speculative is None or speculative.stage is Stage.HELD:
                remaining.append(update)
                continue
            wanted = speculative.update.is_the_same(update)
            with self._changed:
                stage = speculative.stage
                if stage is Stage.RUNNING:  # one that is void need not be waited for: the unit's own update comes after
                    speculative.become(Stage.CONFIRMED if wanted else Stage.VOID)
                    del self.of_unit[update.unit.index]
                elif stage is Stage.WRITTEN and wanted:
                    speculative.become(Stage.OVER)
                    del self.of_unit[update.unit.index]
                elif stage is Stage.QUEUED:  # now: the update thread would run it for nothing
                    self._unqueue(speculative)
            if stage is Stage.QUEUED or not wanted:
                remaining.append(update)
            elif stage is Stage.WRITTEN:
                self._flip(speculative)
        for index, num_arrived in enumerate(self._num_arrived):
            if num_arrived:
                self._num_expected[index] = num_arrived
        self.drop_all()
        return remaining

    def drop_all(self) -> None:
        """There will be no step with these gradients: forget every speculative update."""
        for speculative in list(self.of_unit.values()):
            if speculative.stage is Stage.HELD:
                with self._changed:
                    self._cancel(speculative)
            else:
                self.invalidate(speculative.unit)
        self.of_unit.clear()
        self._num_arrived = [0] * len(self.units)

    def balance(self, forward: float, backward: float) -> None:
        """Nothing was clipped, and the disk was busy for these shares of the last step's forward and of its rest. The
        one with more time to spare gets more of the updates from the next step on."""
        if abs(forward - backward) > _DIFFERENCE:
            self._num_speculative = min(
                max(self._num_speculative + (1 if forward > backward else -1), 0), len(self._rank)
            )

    # Both threads.

    def step_begins(self) -> None:
        """The updates of a step are on the update thread's list."""
        with self._changed:
            self._num_steps += 1

    def step_is_over(self) -> None:
        with self._changed:
            self._num_steps -= 1

    # The update thread.

    def tasks(self) -> Iterator[SpeculativeUpdate]:
        """The speculative updates that are asked for, and those that will be while they are carried out."""
        while True:
            with self._changed:
                if not self._queue:
                    self._carried_out = False
                    return
                holding = (index for index, waiting in enumerate(self._queue) if waiting.holds)
                speculative = self._queue.pop(next(holding, -1))  # see [Note: Order of speculative updates]
                speculative.become(Stage.RUNNING)
            yield speculative

    def finished(self, speculative: SpeculativeUpdate) -> None:
        """All of it is on its way to the spare copies."""
        with self._changed:
            self._end_loan(speculative)
            self._num_holding -= speculative.is_slot_held
            stage = speculative.stage
            speculative.become(Stage.WRITTEN if speculative.stage is Stage.RUNNING else Stage.OVER)
            self._changed.notify_all()
        if stage is Stage.CONFIRMED:
            self._flip(speculative)
        elif stage is Stage.VOID:
            self.shadow_of(speculative.unit).forget(speculative.unit)

    def _flip(self, speculative: SpeculativeUpdate) -> None:
        """The results are the current ones from now on."""
        for tile in speculative.tiles:
            tile.states.flip()
        self.shadow_of(speculative.unit).flip(speculative.unit)

    def _unqueue(self, speculative: SpeculativeUpdate) -> None:
        """It is asked for, and will not be carried out. Called with the monitor held."""
        with contextlib.suppress(ValueError):  # an interrupt may have come before it was put there
            self._queue.remove(speculative)
        self._cancel(speculative)

    def _cancel(self, speculative: SpeculativeUpdate) -> None:
        """It has not begun, and never will. Called with the monitor held."""
        speculative.become(Stage.OVER)
        self.of_unit.pop(speculative.unit.index, None)
        self._end_loan(speculative)
        if speculative.is_slot_held:
            self._num_holding -= 1
            self.shadow_of(speculative.unit).end_hold(speculative.unit)

    def _hold(self, unit: UnitSpec, max_held: int) -> bool:
        """Keep the slot that compute has; False if it cannot be spared, or compute has none."""
        with self._changed:
            if self._num_holding >= max_held and not self._compute_may_wait(unit):
                return False
            held = self.shadow_of(unit).hold(unit)
            self._num_holding += held
            return held

    def _end_loan(self, speculative: SpeculativeUpdate) -> None:
        if speculative.loan is not None:
            speculative.loan.end_loan()
            speculative.loan = None

    def _compute_may_wait(self, unit: UnitSpec) -> bool:
        """Compute may wait for a speculative update of ``unit`` where it finds no slot or no gradient buffer."""
        return self.gradients.gradients_of(unit).spills and self._num_steps == 0
