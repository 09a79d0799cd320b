"""The update thread: carries out each step's updates, unit by unit in forward order, and early updates before the step.

[Note: Order of the update] Forward order, so that the next forward waits for each unit's own update and no longer than
that. Everything a step depends on (clip factor, learning rates, step numbers) is frozen before the first tile is
touched, so running under the next forward changes nothing in the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.tiers.gradients import GradientStore, UnitGradients
from offload.tiers.home import StoredHome, TileHomes, Transfer, UnitHomes
from offload.tiers.host_weights import HostWeights
from offload.units import UnitSpec
from offload.update.device_side import DeviceSide
from offload.update.early import EarlyUpdates
from offload.update.pipeline import Pipeline, Task
from offload.update.step import UnitUpdate
from offload.waiting import Failure, Worker


class _ConfirmedUpdate:
    """The update of one unit in a step that is certain. A task of the pipeline."""

    def __init__(self, update: UnitUpdate, homes: UnitHomes, host: HostWeights, gradients: UnitGradients) -> None:
        self.update = update
        self.tiles: Sequence[TileHomes] = update.touched(homes.tiles)
        self.grads = None if homes.grads is None else homes.grads.address
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
        return self._host.acquire_for_update(self.update.unit)

    def write(self, states: StoredHome, address: int) -> Transfer:
        return states.write(address)

    def finish(self) -> None:
        self._host.end_update(self.update.unit)


class Updater:
    """Owns the update thread. ``start`` hands it a step; ``stop`` ends the thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        early: EarlyUpdates,
        homes: Sequence[UnitHomes],
        host: HostWeights,
        gradients: GradientStore,
        device: DeviceSide | None,
        failure: Failure,
    ) -> None:
        self.early = early
        self._pipeline = pipeline
        self._homes = homes
        self._host = host
        self._gradients = gradients
        self._device = device
        self._failure = failure
        self._worker = Worker("offload-update")

    def start(self, step: Sequence[UnitUpdate]) -> None:
        """Begin a step's update. Returns at once; each unit is usable again when its own update is done."""
        self.early.step_begins()
        self._worker.submit(lambda: self._run_step(step))

    def begin_early(self, unit: UnitSpec, update: UnitUpdate | None) -> None:
        """Begin the early update of a unit that is held; with None it will not come."""
        if self.early.begin(unit, update):
            self._worker.submit(lambda: self._run(self.early.tasks()))

    def stop(self) -> None:
        """End the thread after the tile at hand. Units that were not updated stay as they were."""
        self._pipeline.stop()
        self._worker.stop()

    def _run_step(self, step: Sequence[UnitUpdate]) -> None:
        if self._device is not None:
            self._device.begin_step()
        self._run(self._confirmed(update) for update in step)
        self.early.step_is_over()

    def _confirmed(self, update: UnitUpdate) -> Task:
        gradients = self._gradients.gradients_of(update.unit)
        return _ConfirmedUpdate(update, self._homes[update.unit.index], self._host, gradients)

    def _run(self, tasks: Iterable[Task]) -> None:
        try:
            self._failure.check()
            self._pipeline.run(tasks)
        except BaseException as error:
            self._failure.record(error)
