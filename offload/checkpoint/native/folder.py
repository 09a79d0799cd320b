"""The directory of a run's checkpoints: one folder for each, named by its tag, and a file that names the latest.

A checkpoint is made in a folder of another name and renamed when it is complete and synced: what has its tag is whole.
Ranks save it together, each a part, in a directory that all of them see; the first one makes the folder, and gives it
its tag. What one rank could not save is no checkpoint: every rank raises, and those before it stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from offload.checkpoint.every_rank import on_every_rank, tell
from offload.checkpoint.native.parts import Parts, open_parts, part_name, step_of
from offload.checkpoint.publish import hidden_in, remove_left_over, sync_folder, write_synced
from offload.errors import ConfigError
from offload.ranks.ranks import Ranks
from swapper import Generation, OffloadError, StoreMissing
from swapper.checked import Refused, read_regular
from swapper.errors import failed, unusable
from swapper.files import Descriptor, exchange, open_directory, require_room

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LATEST = "latest"


class CheckpointDirectory:
    """Checkpoints under ``path``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def folder(self, tag: str) -> Path:
        """Folder of the checkpoint of this tag. Raises ``ConfigError`` for a tag that cannot be a name."""
        if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == _LATEST:
            raise ConfigError(f"tag {tag!r}: expected letters, digits, '.', '_' and '-', at most 100, and not 'latest'")
        return self.path / tag

    def tags(self) -> dict[str, int]:
        """The tags of the checkpoints whose descriptions are whole, with their steps; the oldest step first."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in sorted(self.path.iterdir()):
                if entry.is_dir() and _TAG.fullmatch(entry.name):
                    with contextlib.suppress(OffloadError):
                        found[entry.name] = step_of(entry)
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def open(self, tag: str | None) -> Generation | Parts:
        """Open a checkpoint, in parts or not; the latest without a ``tag``.

        Raises ``StoreMissing`` or ``StorageCorrupt``, which name the others that are whole.
        """
        name = self._latest() if tag is None else tag
        if name is None:
            raise StoreMissing(
                f"there is no checkpoint in {self.path}.", advice="Give the directory that save_checkpoint was given."
            )
        try:
            return open_parts(self.folder(name))
        except OffloadError as error:
            error.args = (f"checkpoint {name}: {error.args[0]}",)
            error.advice = self.others(name)
            raise

    def others(self, tag: str) -> str:
        """Sentence on what else there is."""
        names = [f"{name} (step {step})" for name, step in self.tags().items() if name != tag]
        return f"These are there, too: {', '.join(names)}." if names else "There is no other checkpoint beside it."

    def _latest(self) -> str | None:
        with contextlib.suppress(OSError, Refused):
            tag = read_regular(self.path / _LATEST, 1000).decode("ascii", "replace").strip()
            if _TAG.fullmatch(tag) and (self.path / tag).is_dir():
                return tag
        return next(reversed(self.tags()), None)


class SavingDirectory(CheckpointDirectory):
    """The same, to save into. All ranks call the methods together."""

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks) -> None:
        super().__init__(path)
        self._ranks = ranks
        self._part = "" if ranks.size == 1 else part_name(ranks.rank, ranks.size)
        self._hidden = self.path
        self._has_told = False
        """The other ranks know how it went."""

    def make(self) -> None:
        """Make the directory, and remove what dead processes left unfinished. Raises ``StoreUnsafe``."""
        self._by_first("the directory of checkpoints", self._make)
        if not self._ranks.all("is the directory of checkpoints there", self.path.is_dir()):
            raise ConfigError(
                f"{self.path}: some ranks do not see the directory that the first one has made. Give one on a file "
                "system that all of them share."
            )

    def own_folder(self, tag: str) -> Path:
        """Folder of what this process saves of it."""
        return self.folder(tag) / self._part

    def require(self, nbytes: int) -> None:
        """Raise ``StorageFull`` unless there is room for so many bytes."""
        directory = Descriptor(open_directory(self.path))
        try:
            require_room(directory.number, nbytes, self.path, "Free some space, or give another directory.")
        finally:
            directory.close()

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A hidden folder in which this process makes what it saves. What is complete is published from there, and
        nothing else stays."""
        self._hidden = self.path / self._ranks.all_gather_object("a checkpoint's folder", hidden_in(self.path).name)[0]
        self._has_told = False
        own = self._hidden / self._part
        try:
            own.mkdir(parents=True, mode=0o700)
            yield own
        except BaseException as error:
            if not self._has_told:
                tell(self._ranks, "a checkpoint is complete", error)
            raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are not done yet: the last one removes it
                self._hidden.rmdir()

    def publish(self, folder: Path, tag: str) -> None:
        """Give a complete checkpoint its tag, for good. One that had it before goes. Raises ``OSError``."""
        whole, own = folder, self._hidden / self._part
        if self._part:
            whole = self._hidden
            if folder != own:
                complete = self._hidden / f".{self._part}"
                folder.rename(complete)
                shutil.rmtree(own)
                complete.rename(own)
            sync_folder(whole)
        self._has_told = True
        tell(self._ranks, "a checkpoint is complete", None)
        self._by_first(f"the tag {tag}", partial(self._publish, whole, tag))

    def retain(self, keep_last: int, keep_every: int, removing: Callable[[Path], None]) -> None:
        """Remove all checkpoints but the newest ``keep_last``, and those whose step is a multiple of ``keep_every``.
        Raises ``StorageIOError``. Other ranks see when they next save that the folders are gone."""
        self._by_first("older checkpoints", partial(self._retain, keep_last, keep_every, removing))

    def _by_first(self, what: str, call: Callable[[], None]) -> None:
        """Have the first rank make the call, and all know whether it worked."""
        self._has_told = True
        on_every_rank(self._ranks, what, call if self._ranks.rank == 0 else _nothing)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            remove_left_over(self.path)
        except OSError as error:
            raise unusable(f"{self.path} cannot be made or looked at", error) from None

    def _publish(self, folder: Path, tag: str) -> None:
        target = self.folder(tag)
        if not target.exists():
            folder.rename(target)
        elif exchange(folder, target):
            shutil.rmtree(folder, ignore_errors=True)
        else:  # a moment in which the tag has none
            old = hidden_in(self.path)
            target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        latest = self.path / f".{_LATEST}-{os.urandom(8).hex()}"
        try:
            write_synced(latest, tag.encode())
            latest.rename(self.path / _LATEST)
        except OSError:  # the disk is full: without the file the highest step is the latest
            for file in (latest, self.path / _LATEST):
                file.unlink(missing_ok=True)
        sync_folder(self.path)

    def _retain(self, keep_last: int, keep_every: int, removing: Callable[[Path], None]) -> None:
        steps = self.tags() if keep_last else {}
        for tag in list(steps)[:-keep_last]:
            if not keep_every or steps[tag] % keep_every:
                folder, old = self.path / tag, hidden_in(self.path)
                try:
                    folder.rename(old)
                except OSError as error:
                    raise failed(f"removing the old checkpoint {folder}", error) from error
                shutil.rmtree(old, ignore_errors=True)
                removing(folder)


def _nothing() -> None:
    return None
