"""Checkpoints on the file system of the engine's store: a generation that is retained, and hard links to its data."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload.checkpoint.native.commit import Committer
from offload.checkpoint.native.folder import SavingDirectory
from swapper import DurableStore
from swapper.errors import failed

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP)


class LinkedCheckpoints:
    """The store keeps what they need as long as its data has their links: see ``swapper.links``."""

    def __init__(self, committer: Committer) -> None:
        """Give up what a process that had the store before was still copying elsewhere, or has never finished."""
        self._committer = committer
        committer.store.release_unlinked()

    @property
    def any(self) -> bool:
        """There are some."""
        return bool(self._committer.store.retained)

    def has_room(self) -> bool:
        """The store can retain one more generation."""
        self.release_removed()
        return len(self._committer.store.retained) < self._committer.checkpoints_max

    def save(self, directory: SavingDirectory, metadata: bytes) -> bool:
        """Commit, retain and link the generation; False if the file system cannot link, then nothing was saved.

        Raises ``StorageFull`` before anything has changed.
        """
        store = self._committer.store
        self._committer.reserve()
        generation = self._committer.commit_retained(metadata)
        try:
            with directory.unfinished() as folder:
                _link(store, folder, directory.path)
                directory.publish(folder)
        except OSError as error:
            self.release_removed()
            if generation not in store.retained and error.errno in _NO_LINKS:
                return False
            raise failed(f"saving the checkpoint {directory.target}", error) from error
        self.release_removed()  # one that had the tag before
        return True

    def release_removed(self) -> None:
        """Use the space again of checkpoints that are gone, by retention or by the user's hand."""
        self._committer.store.release_unlinked()


def _link(store: DurableStore, folder: Path, directory: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        store.link(descriptor, directory.absolute())
    finally:
        os.close(descriptor)
