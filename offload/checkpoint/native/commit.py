"""Commits: the state after a step becomes the next generation of the engine's store.

[Note: What a commit costs] Records on NVMe are where they belong: a write goes beside what a kept generation needs, so
nothing is copied. Records in memory are written to extents of their own, or the gradients from which they follow
([Note: The log of updates]). A commit of a step runs behind the next forward and backward, on a thread of its own; the
next step, and every change from access, waits for its end before it touches memory (``wait``).

[Note: Why a commit is one step] What it reads cannot change, and what it has written counts at once. ``_commit`` writes
gradients, waits for the step's update (``wait_for_updates``), writes what is in memory, and calls
``DurableStore.commit``: that has the store alone (``Turns.alone``), waits for its writes, syncs, and renames the
manifest, before which the old generation counts. Until ``wait`` has returned nothing changes memory: ``Step._prepare``
calls it before a verdict, and ``ExternalAccess.changing`` before every change from outside. Updates during backward and
spilled gradients go to other places than those that a kept generation needs (``Places``). A checkpoint is a generation
that is retained (``commit_retained``, ``linked.py``). Several ranks only ``prepare``; ``finish`` renames on each when
all of them have prepared (``Publication``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.checkpoint.native.records import EngineRecords, Record
from offload.checkpoint.native.update_log import Logging, UpdateLog
from offload.interrupts import held_back
from offload.ranks.ranks import Ranks
from offload.tiers.store import EngineStore, RecordExtents
from offload.units import UnitSpec
from offload.waiting import Job, Worker
from swapper import DurableStore, Extent, OffloadError, StorageFull, Ticket, waiting

if TYPE_CHECKING:
    from typing import TypeGuard

_log = logging.getLogger("offload")


class Publication:
    """How a commit comes to count: of one rank, at once."""

    works_alone = True
    """No other rank is needed for it."""

    def publish(self, opened: EngineStore, metadata: bytes) -> int:
        """Publish what is written, or prepare that; the generation's number."""
        generation = opened.store.commit(metadata)
        opened.remove_previous()
        return generation

    def finish(self, opened: EngineStore) -> None:
        """All ranks have published; they call this together."""


class JointPublication(Publication):
    """Of several ranks: when each of them has prepared it."""

    works_alone = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def publish(self, opened: EngineStore, metadata: bytes) -> int:
        return opened.store.prepare(metadata)

    def finish(self, opened: EngineStore) -> None:
        if any(self._ranks.all_gather_object("a commit", opened.store.prepared is not None)):
            opened.store.finish()
            opened.remove_previous()


class Committer:
    """Brings the state of the engine into its store. One thread at a time calls its methods."""

    def __init__(
        self,
        opened: EngineStore,
        records: EngineRecords,
        extents: Sequence[RecordExtents],
        log: UpdateLog,
        publication: Publication,
        *,
        speculative: bool,
    ) -> None:
        """``speculative``: records on NVMe are written beside what is current, so that they take one more place."""
        self._working = 2 if speculative else 1
        self.store: DurableStore = opened.store
        self.checkpoints_max = opened.checkpoints_max
        self.opened = opened
        self.log = log
        self._records = records
        self._extents = extents
        self._access = records.access
        self.publication = publication
        self.failure = records.access.failure
        self._worker = Worker("offload-commit")
        self._job: Job | None = None
        self._missed: StorageFull | None = None
        """Why the last commit has come to nothing. The worker sets it; who has waited for the commit takes it."""
        self._frozen_done: set[UnitSpec] = set()
        """Units whose frozen weights in memory are in the store as they are."""

    def reserve(self) -> None:
        """Take the space for one more generation. Raises ``StorageFull``; nothing has changed then."""
        kept = sum(1 for number in self.store.generations if number) + 1
        wanted = [0] * len(self.store.extents)
        for record in self._records.within(self._extents, gradients=True):
            working = self._working if record.home.stored is not None else 0
            for extent, start in record.parts:
                wanted[extent.index] = 1 if start >= record.frozen else kept + working
        self.store.reserve(wanted)

    def generation_bytes(self) -> int:
        """Bytes that a generation takes that has the gradients accumulated so far."""
        return sum(record.nbytes for record in self._records.within(self._extents, gradients=True))

    def commit(self, metadata: bytes) -> None:
        """Commit the state as it is once the last step's update is over."""
        self.wait()
        self._commit(metadata, self.log.all(), gradients=False)
        self.finish()

    def commit_retained(self, metadata: bytes) -> int:
        """The same, with gradients that were accumulated since, as a generation that stays until it is released; its
        number."""
        self.wait()
        generation = self._commit(metadata, self.log.all(), gradients=True)
        self.finish()
        self.store.retain()
        return generation

    def begin_commit(self, describe: Callable[[Sequence[LoggedUpdate]], bytes]) -> None:
        """Commit what a step leaves, behind the training. An error is the engine's failure, or, if there is no room and
        nothing has changed, what ``raise_missed`` raises. ``describe`` is given the logged updates, and gives the
        metadata."""
        self.wait()
        logging = self.log.next()
        metadata = describe(logging.updates)

        def run() -> None:
            try:
                self._log(logging)
                self._commit(metadata, logging, gradients=False)
            except BaseException as error:
                if self._goes_on_after(error):
                    self._missed = self._as_missed(error)
                else:
                    self.failure.record(error)

        with held_back():
            self.log.gradients.begin_reading()
            try:
                self._job = self._worker.submit(run)
                return
            except OffloadError:  # no thread begins, as at a program's end since Python 3.12
                self._job = None
        run()

    def wait(self) -> None:
        """Return when no commit is under way. It may still need ``finish``."""
        if self._job is not None:  # and stays: an interrupted wait is followed by another one
            self._job.wait(lambda: "a commit")
        self.failure.check()

    def raise_missed(self, way_out: str) -> None:
        """Wait for the commit under way. Raise ``StorageFull``, once, if it found no room, and none has come after it:
        the next one writes all that it lacks."""
        with self.failure:
            self.wait()
        missed, self._missed = self._missed, None
        if missed is not None:
            missed.advice = way_out
            raise missed

    def finish(self) -> None:
        """Make what all ranks have committed count. All of them call this together."""
        self.wait()
        self.publication.finish(self.opened)

    def changing(self, unit: UnitSpec) -> None:
        """The unit's weights, frozen ones included, are about to be changed from outside."""
        self.wait()
        self.log.changing(unit)
        self._frozen_done.discard(unit)

    def stop(self) -> None:
        """Wait for the commit under way, whatever becomes of it."""
        self._worker.finish()

    def _goes_on_after(self, error: BaseException) -> TypeGuard[StorageFull]:
        """A commit that failed by ``error`` has changed nothing, and no other rank counts on it."""
        is_whole = not self.failure.is_known and not self.store.has_failed
        return isinstance(error, StorageFull) and is_whole and self.publication.works_alone

    def _as_missed(self, error: StorageFull) -> StorageFull:
        return StorageFull(
            f"a step could not be committed: {error.args[0]}",
            survives=f"Generation {self.store.generation}, the last that was committed, is whole, as is the run.",
        )

    def _log(self, logging: Logging) -> None:
        """Write the gradients of the last step that are logged: see [Note: When gradients are logged]."""
        try:
            with waiting() as tickets:
                for extent, address in logging.gradients:
                    tickets.append(self.store.write(extent, address, extent.nbytes))
        finally:
            self.log.gradients.end_reading()

    def _commit(self, metadata: bytes, logging: Logging, *, gradients: bool) -> int:
        self._access.wait_for_updates()
        for extent in logging.over:
            self.store.discard(extent)
        with contextlib.ExitStack() as borrowed, waiting() as tickets:
            for record in self._records.within(self._extents, gradients=gradients):
                is_written = record.home.stored is None and logging.writes(record.unit)
                parts = self._to_write(record) if is_written else ()
                if parts and record.home.address is None:
                    with record.home.borrow(change=False) as address, waiting() as of_copy:
                        self._write(parts, address, of_copy)
                elif parts:
                    self._write(parts, borrowed.enter_context(record.home.borrow(change=False)), tickets)
        generation = self.publication.publish(self.opened, metadata)
        self._frozen_done.update(self._records.units)
        self.log.committed(logging)
        self._missed = None
        _log.debug("committed: generation %d", generation)
        return generation

    def _to_write(self, record: Record) -> Sequence[tuple[Extent, int]]:
        """The parts of a record that rests in memory which the store does not have as they are."""
        are_done = record.unit in self._frozen_done
        return [(extent, start) for extent, start in record.parts if start < record.frozen or not are_done]

    def _write(self, parts: Sequence[tuple[Extent, int]], address: int, tickets: list[Ticket]) -> None:
        """Start writing them from memory at ``address``, which stays as it is until ``tickets`` are over."""
        for extent, start in parts:
            tickets.append(self.store.write(extent, address + start, extent.nbytes))
