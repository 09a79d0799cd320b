"""The directory of the checkpoints that ranks save together: each writes a part, and all of them get their tag at once.

The first rank makes the folder and gives it its tag, so the directory must be one that all ranks see. A checkpoint that
one rank could not save is none: every rank raises, and the checkpoints before it stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from offload.checkpoint.every_rank import on_every_rank, tell
from offload.checkpoint.native.folder import CheckpointDirectory
from offload.checkpoint.native.parts import part_name
from offload.checkpoint.publish import sync_folder
from offload.errors import ConfigError
from offload.ranks.ranks import Ranks


class SharedDirectory(CheckpointDirectory):
    """All ranks call the methods together."""

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks) -> None:
        super().__init__(path)
        self._ranks = ranks
        self._part = part_name(ranks.world.rank, ranks.world.size)
        self._is_first = ranks.world.rank == 0
        self._hidden_folder = Path()
        self._has_told = False

    def make(self) -> None:
        self._together("the directory of checkpoints", super().make if self._is_first else _nothing)
        there = self.path.is_dir()
        if not all(self._ranks.all_gather_object("is the directory of checkpoints there", there)):
            raise ConfigError(
                f"{self.path}: some ranks do not see the directory that the first one has made. Give one on a file "
                "system that all of them share."
            )

    def own_folder(self, tag: str) -> Path:
        return self.folder(tag) / self._part

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[Path]:
        name = self._ranks.all_gather_object("the folder of a checkpoint", self._hidden().name)[0]
        self._hidden_folder = self.path / name
        self._has_told = False
        own = self._hidden_folder / self._part
        try:
            own.mkdir(parents=True, mode=0o700)
            yield own
        except BaseException as error:
            if not self._has_told:
                self._tell(error)
            raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are not done yet: the last one removes it
                self._hidden_folder.rmdir()

    def publish(self, folder: Path, tag: str) -> None:
        own = self._hidden_folder / self._part
        if folder != own:
            complete = self._hidden_folder / f".{self._part}"
            folder.rename(complete)
            shutil.rmtree(own)
            complete.rename(own)
        sync_folder(self._hidden_folder)
        self._tell(None)
        self._together(f"the tag {tag}", lambda: self._publish(tag) if self._is_first else None)

    def retain(self, keep_last: int, keep_every: int, removing: Callable[[Path], None]) -> None:
        """The other ranks see when they next save that the folders are gone."""
        self._together(
            "older checkpoints",
            lambda: super(SharedDirectory, self).retain(keep_last, keep_every, removing),
            only_first=True,
        )

    def _publish(self, tag: str) -> None:
        super().publish(self._hidden_folder, tag)

    def _together(self, what: str, call: Callable[[], None], *, only_first: bool = False) -> None:
        """Make the call, and tell the others whether it worked."""
        self._has_told = True
        on_every_rank(self._ranks, what, call if self._is_first or not only_first else _nothing)

    def _tell(self, error: BaseException | None) -> None:
        self._has_told = True
        tell(self._ranks, "a checkpoint is complete", error)


def _nothing() -> None:
    return None
