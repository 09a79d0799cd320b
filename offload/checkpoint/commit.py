"""Commits: the state after a step becomes the next generation of the engine's store.

[Note: What a commit costs] Records on NVMe are where they belong: a write goes beside what a kept generation needs, so
nothing is copied. Records in memory are written to extents of their own. A commit of a step runs behind the next
forward and backward, on a thread of its own; the next step, and every change from access, waits for its end before it
touches memory (``wait``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

import aio_ext
from offload.checkpoint.description import parts_of
from offload.optim.formats import Formats
from offload.ranks.ranks import Ranks
from offload.tiers.gradients.store import GradientStore
from offload.tiers.home import Home, UnitHomes
from offload.tiers.store import EngineStore, RecordExtents
from offload.units import UnitSpec
from offload.waiting import FATAL, Failure, Job, Worker
from swapper import DurableStore, Extent, Ticket

_log = logging.getLogger("offload")


class Committer:
    """Brings the state of the engine into its store. One thread at a time calls its methods."""

    def __init__(
        self,
        opened: EngineStore,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        records: Sequence[RecordExtents],
        gradients: GradientStore,
        formats: Formats,
        gradient_dtype: torch.dtype,
        wait_for_updates: Callable[[], None],
        failure: Failure,
        ranks: Ranks,
        *,
        speculative: bool,
    ) -> None:
        """A commit of several ``ranks`` counts when all of them have it: see ``finish``. ``speculative``: records on
        NVMe are written beside what is current, so that they take one more place."""
        self._working = 2 if speculative else 1
        self.store: DurableStore = opened.store
        self.checkpoints_max = opened.checkpoints_max
        self._opened = opened
        self._units = units
        self._homes = homes
        self._records = records
        self._gradients = gradients
        self._formats = formats
        self._gradient_dtype = gradient_dtype
        self._wait_for_updates = wait_for_updates
        self._failure = failure
        self._ranks = ranks
        self._worker = Worker("offload-commit")
        self._job: Job | None = None
        self._frozen_done: set[UnitSpec] = set()
        """Units whose frozen weights in memory are in the store as they are."""

    def reserve(self) -> None:
        """Take the space for one more generation. Raises ``StorageFull``; nothing has changed then."""
        kept = sum(1 for number in self.store.generations if number) + 1
        wanted = [0] * len(self.store.extents)
        for unit, homes, extents in zip(self._units, self._homes, self._records, strict=True):
            working = self._working if homes.weights.stored is not None else 0
            trained = extents.weights[: 1 if unit.trainable_numel else 0]
            for extent in trained:
                wanted[extent.index] = kept + working
            for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
                wanted[extent.index] = kept + (self._working if tile.states.stored is not None else 0)
            for extent in extents.weights[len(trained) :]:
                wanted[extent.index] = 1
            if extents.gradients is not None and self._gradients.of(unit):
                wanted[extents.gradients.index] = kept
        self.store.reserve(wanted)

    def generation_bytes(self) -> int:
        """What a generation takes that has the gradients accumulated so far."""
        extents = [extent for of_unit in self._records for extent in (*of_unit.weights, *of_unit.tiles)]
        for unit, of_unit in zip(self._units, self._records, strict=True):
            if of_unit.gradients is not None and self._gradients.of(unit):
                extents.append(of_unit.gradients)
        return sum(extent.nbytes for extent in extents)

    def commit(self, metadata: bytes) -> None:
        """Commit the state as it is once the last step's update is over."""
        self.wait()
        self._commit(metadata, ())
        self.finish()

    def commit_retained(self, metadata: bytes) -> int:
        """The same, with gradients that were accumulated since, as a generation that stays until it is released; its
        number."""
        self.wait()
        generation = self._commit(metadata, [unit for unit in self._units if self._gradients.of(unit)])
        self.finish()
        self.store.retain()
        return generation

    def begin_commit(self, metadata: bytes) -> None:
        """Commit what a step leaves, behind the training. An error is the engine's failure."""
        self.wait()

        def run() -> None:
            try:
                self._commit(metadata, ())
            except FATAL as error:
                self._failure.record(error)

        self._job = self._worker.submit(run)

    def wait(self) -> None:
        """Return when no commit is under way. One of several ranks still needs ``finish``."""
        job, self._job = self._job, None
        if job is not None:
            job.wait(lambda: "a commit")
        self._failure.check()

    def finish(self) -> None:
        """Of several ranks: make what all of them have prepared the committed generation. All call this together."""
        if self._ranks.size == 1:
            return
        self.wait()
        if any(self._ranks.all_gather_object("a commit", self.store.prepared is not None)):
            self.store.finish()
            self._opened.remove_previous()

    def changing(self, unit: UnitSpec) -> None:
        """The unit's weights, frozen ones included, are about to be changed from outside."""
        self.wait()
        self._frozen_done.discard(unit)

    def stop(self) -> None:
        """Wait for the commit under way, whatever becomes of it."""
        self._worker.finish()

    def _commit(self, metadata: bytes, with_gradients: Sequence[UnitSpec]) -> int:
        self._wait_for_updates()
        tickets: list[Ticket] = []
        with contextlib.ExitStack() as borrowed:
            for unit, homes, extents in zip(self._units, self._homes, self._records, strict=True):
                if homes.weights.stored is None:
                    tickets += self._write_weights(borrowed, unit, homes.weights, extents.weights)
                for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
                    if tile.states.stored is None:
                        tickets += self._write(borrowed, tile.states, [(extent, 0)])
                if extents.gradients is not None and unit in with_gradients:
                    self._write_gradients(unit, extents.gradients)
            for ticket in tickets:
                ticket.wait()
        generation = self.store.commit(metadata) if self._ranks.size == 1 else self.store.prepare(metadata)
        self._frozen_done.update(self._units)
        if self._ranks.size == 1:
            self._opened.remove_previous()
        _log.debug("committed: generation %d", generation)
        return generation

    def _write_weights(
        self, borrowed: contextlib.ExitStack, unit: UnitSpec, home: Home, extents: Sequence[Extent]
    ) -> list[Ticket]:
        parts = [
            (extent, start)
            for extent, (start, _) in zip(extents, parts_of(unit, self._formats.weights), strict=True)
            if start < unit.trainable_numel * self._formats.weights or unit not in self._frozen_done
        ]
        return self._write(borrowed, home, parts) if parts else []

    def _write(self, borrowed: contextlib.ExitStack, home: Home, parts: Sequence[tuple[Extent, int]]) -> list[Ticket]:
        """Start writing parts of a record that rests in memory. What was borrowed for it stays so, unless it is a
        copy."""
        with contextlib.ExitStack() as own:
            address = own.enter_context(home.borrow(change=False))
            tickets = [self.store.write(extent, address + start, extent.nbytes) for extent, start in parts]
            if home.address is None:
                for ticket in tickets:
                    ticket.wait()
                return []
            borrowed.push(own.pop_all())
        return tickets

    def _write_gradients(self, unit: UnitSpec, extent: Extent) -> None:
        memory = aio_ext.Memory(extent.nbytes)
        try:
            self._gradients.copy_to(unit, memory.address, self._gradient_dtype)
            self.store.write(extent, memory.address, extent.nbytes).wait()
        finally:
            memory.close()
