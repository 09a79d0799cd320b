"""The update thread: carries out each step's updates, unit by unit in the order of their use, and speculative updates
before the step.

[Note: Order of the update] The order in which the next forward is expected to use the units, so that it waits for each
unit's own update and no longer than that. Everything a step depends on (clip factor, learning rates, step numbers) is
frozen before the first tile is touched, so running under the next forward changes nothing in the result. Tiles are read
in that order, ahead of the kernel, by ``Pipeline._read_ahead``; while a verdict is waited for, ``read_ahead`` has their
states read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.unit import Loan, UnitGradients
from offload.tiers.home import Home, StoredHome, TileHomes, Transfer, UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.units import UnitSpec
from offload.update.device_side import DeviceSide
from offload.update.pipeline import Pipeline, Task
from offload.update.speculative import SpeculativeUpdates
from offload.update.step import UnitUpdate
from offload.update.together import Together, can_take
from offload.waiting import Failure, Job, Worker, make_updates


@dataclass(eq=False)
class _ConfirmedUpdate:
    """The update of one unit in a step that is certain. A task of the pipeline."""

    update: UnitUpdate
    homes: UnitHomes
    host: HostLevel
    gradients: UnitGradients
    loan: Loan | None
    """Loan of gradients that were spilled, and still lie in a buffer."""

    def __post_init__(self) -> None:
        self.tiles: Sequence[TileHomes] = self.update.touched(self.homes.tiles)
        self.grads = self.homes.grads_address if self.loan is None else self.loan.address

    def begins(self) -> None:
        self.host.try_fetch(self.update.unit)

    def before_grads(self) -> None:
        self.gradients.wait_until_spilled()

    def states_at(self, states: Home) -> int:
        assert states.address is not None
        return states.address

    def weights_at_hand(self) -> bool:
        return self.homes.weights.address is not None

    def weights(self) -> tuple[int, int] | None:
        address = self.host.begin_update(self.update.unit)
        return address, address

    def write(self, states: StoredHome, address: int) -> Transfer:
        return states.write(address)

    def finish(self) -> None:
        if self.loan is not None:
            self.loan.end_loan()
        self.host.end_update(self.update.unit)


@dataclass(eq=False)
class Updater:
    """Owns the update thread. ``start`` hands it a step; ``stop`` ends the thread."""

    pipeline: Pipeline
    speculative: SpeculativeUpdates
    homes: Sequence[UnitHomes]
    host: HostLevel
    gradients: GradientStore
    device: DeviceSide
    failure: Failure

    def __post_init__(self) -> None:
        self._worker = Worker("offload-update")
        self._worker.submit(make_updates)  # now: a finalizer can come wherever a thread begins
        self._last_step: Job | None = None

    def start(self, step: Sequence[UnitUpdate]) -> None:
        """Begin a step's update. Returns at once; each unit is usable again when its own update is done."""
        self.speculative.step_begins()
        loans = self.gradients.lend([update.unit for update in step])
        self._last_step = self._worker.submit(lambda: self._run_step(step, loans))

    def wait_for_step(self) -> None:
        """Wait until the last step's update is done, and its states are written."""
        if self._last_step is not None:
            self._last_step.wait(lambda: "the last step's update")

    def read_ahead(self) -> None:
        """Start reading what the update of the coming step begins with, although it is not certain yet: units without a
        speculative update."""
        still_to_do = [unit for unit in self.speculative.units if unit.index not in self.speculative.of_unit]
        in_order = self.host.by_first_use(still_to_do, lambda unit: unit)
        stored = (tile.states.stored for unit in in_order for tile in self.homes[unit.index].tiles)
        read = self.pipeline.ahead.reader([home for home in stored if home is not None])
        self._worker.submit(partial(self._guarded, read))

    def invalidate(self, unit: UnitSpec) -> None:
        """The unit's weights, gradients or states are about to change: nothing that was computed or read from them for
        the coming step counts, and nothing is read of the unit any more when this returns."""
        self.speculative.invalidate(unit)
        self.pipeline.ahead.drop()

    def drop_all(self) -> None:
        """There will be no step with these gradients: forget all that was done for it."""
        self.speculative.drop_all()
        self.pipeline.ahead.drop()

    def begin_speculative(self, unit: UnitSpec, update: UnitUpdate | None) -> None:
        """Begin the speculative update of a unit that is held; with None it will not come."""
        if self.speculative.begin(unit, update):
            self._worker.submit(lambda: self._run(self.speculative.tasks()))

    def stop(self) -> None:
        """End the thread after the tile at hand. Units that were not updated stay as they were."""
        self.pipeline.stop()
        self._worker.stop()
        self.pipeline.ahead.drop()

    def _run_step(self, step: Sequence[UnitUpdate], loans: Sequence[Loan | None]) -> None:
        self.device.begin_step()
        self._run(self._confirmed(step, loans))
        self.speculative.step_is_over()

    def _confirmed(self, step: Sequence[UnitUpdate], loans: Sequence[Loan | None]) -> Iterator[Task | Together]:
        """Tasks of a step, in order: those of neighbours in host memory together, unless a device may take tiles."""
        together, stays = Together(self.host.updated), not self.device.takes_tiles
        for update, loan in zip(step, loans, strict=True):
            homes = self.homes[update.unit.index]
            if loan is None and stays and can_take(homes):
                for tile in homes.tiles:
                    if together.add(update, homes, tile):
                        yield together
                        together = Together(self.host.updated)
                continue
            if together.numel:
                yield together
                together = Together(self.host.updated)
            yield _ConfirmedUpdate(update, homes, self.host, self.gradients.gradients_of(update.unit), loan)
        if together.numel:
            yield together

    def _run(self, tasks: Iterable[Task | Together]) -> None:
        self._guarded(lambda: self.pipeline.run(tasks))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            self.failure.check()
            call()
        except BaseException as error:
            self.failure.record(error)
