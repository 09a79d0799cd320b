"""Generations of a run in an engine's store: its last step, and checkpoints that take no room of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offload.checkpoint.native.background import BackgroundCopy
from offload.checkpoint.native.commit import Committer
from offload.checkpoint.native.folder import SavingDirectory
from offload.checkpoint.native.linked import LinkedCheckpoints
from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.config import OffloadConfig
from offload.ranks.ranks import Ranks
from offload.units import UnitSpec
from offload.update.step import UnitUpdate
from swapper import StorageFull

_HOW = "how a checkpoint is saved"
_GO_ON = "Make room and call step() again, which has done nothing yet: its commit has all that this one lacks."


class NoGenerations:
    """The store cannot hold any, or is there no more: steps are not committed, and checkpoints are copied."""

    def step_taken(self, step: Sequence[UnitUpdate]) -> None:
        """These updates are certain."""

    def commit(self, describe: Callable[[Sequence[LoggedUpdate]], bytes]) -> None:
        """Commit what the last step has left, behind the training. ``describe`` is given the logged updates."""

    def wait(self) -> None:
        """Return when no commit is under way, and the last one counts."""

    def raise_missed(self) -> None:
        """Raise ``StorageFull``, once, if the last commit found no room."""

    def agree(self) -> None:
        """All ranks are about to change something: make the last commit count."""

    def changing(self, unit: UnitSpec) -> None:
        """The unit's records are about to be changed from outside."""

    def wait_for_background(self) -> None:
        """Return when no checkpoint is on its way to another file system. Raises, once, what it has failed with."""

    def save(self, directory: SavingDirectory, describe: Callable[[], bytes], ranks: Ranks) -> bool:
        """Save a checkpoint that the store retains. False if it cannot: nothing has changed then."""
        return ranks.all(_HOW, False)

    def finish(self, last: Callable[[], bytes | None], *, give_up: bool) -> None:
        """The engine ends: commit its ``last`` step, if that is not yet, and finish a checkpoint that is on its way, or
        ``give_up``. Updates may go on."""

    def stop(self) -> None:
        """Wait for what is under way, whatever becomes of it."""


class Generations(NoGenerations):
    """The store holds them."""

    def __init__(self, committer: Committer, config: OffloadConfig, ranks: Ranks) -> None:
        self.committer = committer
        self.linked = LinkedCheckpoints(committer)
        self.background = BackgroundCopy(committer.store, committer.failure)
        self._config = config
        self._ranks = ranks

    def step_taken(self, step: Sequence[UnitUpdate]) -> None:
        self.committer.log.step_taken(step)

    def commit(self, describe: Callable[[Sequence[LoggedUpdate]], bytes]) -> None:
        self.committer.begin_commit(describe)

    def wait(self) -> None:
        self.committer.wait()
        self.agree()

    def raise_missed(self) -> None:
        self.committer.raise_missed(_GO_ON)

    def agree(self) -> None:
        if self._config.durable:
            self.committer.finish()

    def changing(self, unit: UnitSpec) -> None:
        self.committer.changing(unit)

    def wait_for_background(self) -> None:
        self.background.wait()

    def save(self, directory: SavingDirectory, describe: Callable[[], bytes], ranks: Ranks) -> bool:
        if not ranks.all(_HOW, self.linked.has_room()):
            return False
        metadata, config, committer = describe(), self._config, self.committer
        retain = partial(directory.retain, config.keep_last, config.keep_every)
        if ranks.all(_HOW, _share_file_system(directory.path, config.paths[0])):
            if not self.linked.save(directory, metadata):
                return False
            retain()
            self.linked.release_removed()
            return True
        if not committer.publication.works_alone:  # what copies behind the training cannot meet the others
            return False
        directory.require(committer.generation_bytes())
        try:
            committer.reserve()
        except StorageFull:  # nothing can be held: training waits for the copy
            return False
        self.background.begin(committer.commit_retained(metadata), directory, retain)
        return True

    def finish(self, last: Callable[[], bytes | None], *, give_up: bool) -> None:
        failure = self.committer.failure
        with contextlib.ExitStack() as ending:
            ending.callback(self.committer.stop)
            ending.callback(self._leave_checkpoints)
            ending.callback(self.background.finish, give_up=give_up)
            if failure.is_known or not self._ranks.can_meet():
                return
            self.wait()
            step = last() if self._config.durable else None
            if step is not None:
                self.committer.commit(step)
            self.committer.raise_missed("Make room, and resume from it.")

    def stop(self) -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(self.committer.stop)
            ending.callback(self.background.finish)

    def _leave_checkpoints(self) -> None:
        """A store that ends with the process leaves its linked checkpoints no more space than they need."""
        is_whole = not self.committer.failure.is_known and not self._config.durable
        self.committer.opened.gives_back = is_whole and self.linked.any


def _share_file_system(directory: Path, store: Path) -> bool:
    """Files in the one can have further names in the other. Not where the store's path has been renamed meanwhile:
    nobody knows what is there now."""
    try:
        return directory.stat().st_dev == store.stat().st_dev
    except FileNotFoundError:
        return False
