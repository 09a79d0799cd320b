"""The update thread: carries out each step's updates, unit by unit in forward order, and speculative updates before the
step.

[Note: Order of the update] Forward order, so that the next forward waits for each unit's own update and no longer than
that. Everything a step depends on (clip factor, learning rates, step numbers) is frozen before the first tile is
touched, so running under the next forward changes nothing in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from offload.tiers.gradients.store import GradientStore
from offload.tiers.gradients.unit import Loan, UnitGradients
from offload.tiers.home import StoredHome, TileHomes, Transfer, UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.units import UnitSpec
from offload.update.device_side import DeviceSide
from offload.update.pipeline import Pipeline, Task
from offload.update.speculative import SpeculativeUpdates
from offload.update.step import UnitUpdate
from offload.waiting import Failure, Worker


class _ConfirmedUpdate:
    """The update of one unit in a step that is certain. A task of the pipeline."""

    def __init__(
        self, update: UnitUpdate, homes: UnitHomes, host: HostLevel, gradients: UnitGradients, loan: Loan | None
    ) -> None:
        """``loan`` of gradients that were spilled, and still lie in a buffer."""
        self.update = update
        self.tiles: Sequence[TileHomes] = update.touched(homes.tiles)
        self.grads = loan.address if loan is not None else None if homes.grads is None else homes.grads.address
        self._loan = loan
        self._homes = homes
        self._host = host
        self._gradients = gradients

    def begins(self) -> None:
        self._host.try_fetch(self.update.unit)

    def before_grads(self) -> None:
        self._gradients.wait_until_spilled()

    def weights_at_hand(self) -> bool:
        return self._homes.weights.address is not None

    def weights(self) -> int | None:
        return self._host.begin_update(self.update.unit)

    def write(self, states: StoredHome, address: int) -> Transfer:
        return states.write(address)

    def finish(self) -> None:
        if self._loan is not None:
            self._loan.end_loan()
        self._host.end_update(self.update.unit)


class Updater:
    """Owns the update thread. ``start`` hands it a step; ``stop`` ends the thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        speculative: SpeculativeUpdates,
        homes: Sequence[UnitHomes],
        host: HostLevel,
        gradients: GradientStore,
        device: DeviceSide | None,
        failure: Failure,
    ) -> None:
        self.speculative = speculative
        self._pipeline = pipeline
        self._homes = homes
        self._host = host
        self._gradients = gradients
        self._device = device
        self._failure = failure
        self._worker = Worker("offload-update")

    def start(self, step: Sequence[UnitUpdate]) -> None:
        """Begin a step's update. Returns at once; each unit is usable again when its own update is done."""
        self.speculative.step_begins()
        loans = [self._gradients.gradients_of(update.unit).lend() for update in step]
        self._worker.submit(lambda: self._run_step(step, loans))

    def read_ahead(self) -> None:
        """Start reading what the update of the coming step begins with, although it is not certain yet."""
        stored = (tile.states.stored for homes in self._homes for tile in homes.tiles)
        read = self._pipeline.ahead.reader([home for home in stored if home is not None])
        self._worker.submit(partial(self._guarded, read))

    def invalidate(self, unit: UnitSpec) -> None:
        """The unit's weights, gradients or states are about to change: nothing that was computed or read from them for
        the coming step counts, and nothing is read of the unit any more when this returns."""
        self.speculative.invalidate(unit)
        self._pipeline.ahead.drop()

    def drop_all(self) -> None:
        """There will be no step with these gradients: forget all that was done for it."""
        self.speculative.drop_all()
        self._pipeline.ahead.drop()

    def begin_speculative(self, unit: UnitSpec, update: UnitUpdate | None) -> None:
        """Begin the speculative update of a unit that is held; with None it will not come."""
        if self.speculative.begin(unit, update):
            self._worker.submit(lambda: self._run(self.speculative.tasks()))

    def stop(self) -> None:
        """End the thread after the tile at hand. Units that were not updated stay as they were."""
        self._pipeline.stop()
        self._worker.stop()
        self._pipeline.ahead.drop()

    def _run_step(self, step: Sequence[UnitUpdate], loans: Sequence[Loan | None]) -> None:
        if self._device is not None:
            self._device.begin_step()
        self._run(map(self._confirmed, step, loans))
        self.speculative.step_is_over()

    def _confirmed(self, update: UnitUpdate, loan: Loan | None) -> Task:
        gradients = self._gradients.gradients_of(update.unit)
        return _ConfirmedUpdate(update, self._homes[update.unit.index], self._host, gradients, loan)

    def _run(self, tasks: Iterable[Task]) -> None:
        self._guarded(lambda: self._pipeline.run(tasks))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            self._failure.check()
            call()
        except BaseException as error:
            self._failure.record(error)
