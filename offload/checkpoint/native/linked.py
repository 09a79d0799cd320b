"""Checkpoints on the file system of the engine's store: a generation that is retained, and hard links to its data."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload.checkpoint.native.commit import Committer
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.folder import SavingDirectory
from swapper import DurableStore
from swapper.errors import failed

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP)


class LinkedCheckpoints:
    """The store keeps what they need until their folders are gone."""

    def __init__(self, committer: Committer) -> None:
        """Also knows those of the processes that had the store before. What was never finished is given up."""
        self._committer = committer
        self._folders: dict[int, Path] = {}
        for number in committer.store.retained:
            description = Description.decode(committer.store.metadata_of(number), f"generation {number}")
            if "folder" in description.run:
                self._folders[number] = Path(description.run["folder"])
            else:  # it was on its way to another file system
                committer.store.release(number)
        self.release_removed()

    @property
    def any(self) -> bool:
        """There are some."""
        return bool(self._folders)

    def has_room(self) -> bool:
        """The store can retain one more generation."""
        self.release_removed()
        return len(self._folders) < self._committer.checkpoints_max

    def save(self, directory: SavingDirectory, tag: str, description: Description) -> bool:
        """Commit, retain and link the generation; False if the file system cannot link, then nothing was saved.

        Raises ``StorageFull`` before anything has changed.
        """
        store, target = self._committer.store, directory.own_folder(tag).absolute()
        description.run["folder"] = str(target)
        self._committer.reserve()
        generation = self._committer.commit_retained(description.encode())
        try:
            with directory.unfinished() as folder:
                _link(store, folder)
                self._publish(directory, folder, tag, generation)
        except OSError as error:
            if generation not in self._folders:
                store.release(generation)
                if error.errno in _NO_LINKS:
                    return False
            raise failed(f"saving the checkpoint {target}", error) from error
        return True

    def _publish(self, directory: SavingDirectory, folder: Path, tag: str, generation: int) -> None:
        target = directory.own_folder(tag).absolute()
        replaced = [number for number, path in self._folders.items() if path == target]
        self._folders[generation] = target  # also if that fails: it may have its tag
        directory.publish(folder, tag)
        for number in replaced:
            self._release(number)

    def removing(self, folder: Path) -> None:
        """The checkpoint in this folder is gone."""
        for number in [n for n, path in self._folders.items() if path.is_relative_to(folder.absolute())]:
            self._release(number)

    def release_removed(self) -> None:
        """Use the space again of checkpoints that the user has removed."""
        for number in [number for number, path in self._folders.items() if not path.exists()]:
            self._release(number)

    def _release(self, number: int) -> None:
        del self._folders[number]
        self._committer.store.release(number)


def _link(store: DurableStore, folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        store.link(descriptor)
    finally:
        os.close(descriptor)
