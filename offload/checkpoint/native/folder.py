"""The directory of checkpoints: one folder for each, named by its tag, and a file that names the latest.

A checkpoint is made in a folder of another name and renamed when it is complete and synced: what has its tag is whole.
Ranks save it together, each a part, in a directory that all of them see; the first one makes the folder, and gives it
its tag. What one rank could not save is no checkpoint: every rank raises, and those before it stay.

[Note: What retention removes] Of the checkpoints of its own run, which are complete and have the names that the run
gave them, the newest stay. Nothing else goes: no other run's, no copy, nothing that is damaged or being read, no store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from offload.checkpoint.every_rank import on_every_rank, tell
from offload.checkpoint.locks import share, take_unused
from offload.checkpoint.native.mark import NAME as MARK
from offload.checkpoint.native.mark import (
    Mark,
    Saved,
    is_checkpoint,
    is_complete,
    is_store,
    read_mark,
    saved_in,
)
from offload.checkpoint.native.parts import Parts, open_parts, step_of
from offload.checkpoint.native.run_identity import RunIdentity, clear_held
from offload.checkpoint.publish import make_directory, sync_folder, write_synced
from offload.checkpoint.workplace import Workplace, clear_left_over
from offload.errors import ConfigError, warn
from offload.option_values import as_path
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
        self.path = as_path("dir", path)

    def folder(self, tag: str) -> Path:
        """Folder of the checkpoint of this tag. Raises ``ConfigError`` for a tag that cannot be a name."""
        if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == _LATEST or tag.endswith(".store"):
            raise ConfigError(
                f"tag {tag!r}: expected letters, digits, '.', '_' and '-', at most 100, not 'latest', and no '.store' "
                "at the end"
            )
        return self.path / tag

    def saved(self) -> list[Saved]:
        """The checkpoints that are there, the one saved first first."""
        return [saved for saved in saved_in(self.path) if _TAG.fullmatch(saved.name)]

    def recover(self) -> None:
        """Give names back that a process which has died in the middle of a save had taken away."""
        with contextlib.suppress(OSError):  # a directory to be read only: nothing is made there
            clear_left_over(self.path)

    @contextlib.contextmanager
    def open(self, tag: str | None) -> Iterator[Generation | Parts]:
        """Open a checkpoint, in parts or not; the latest without a ``tag``. Meanwhile no retention removes it.

        Raises ``StoreMissing`` or ``StorageCorrupt``, which name the others that are whole.
        """
        name = self._latest() if tag is None else tag
        with contextlib.ExitStack() as closing:
            try:
                hold(self.folder(name), closing)
                generation = open_parts(self.folder(name))
                closing.callback(generation.close)
            except OffloadError as error:
                error.args = (f"checkpoint {name}: {error.args[0]}",)
                error.advice = self.others(name)
                raise
            yield generation

    def others(self, tag: str) -> str:
        """Sentence on what else there is that is whole."""
        names = []
        for saved in self.saved():
            with contextlib.suppress(OffloadError):
                if saved.name != tag and is_complete(self.path / saved.name):
                    names.append(f"{saved.name} (step {step_of(self.path / saved.name)})")
        return f"These are there, too: {', '.join(names)}." if names else "There is no other checkpoint beside it."

    def _latest(self) -> str:
        tag = ""
        with contextlib.suppress(OSError, Refused):
            tag = read_regular(self.path / _LATEST, 1000).decode("ascii", "replace").strip()
        if _TAG.fullmatch(tag) and (self.path / tag).is_dir():
            return tag
        found = self.saved()
        if not found:
            raise StoreMissing(f"there is no checkpoint in {self.path}.", advice=self._what_to_give())
        if tag:
            warn(
                f"{self.path / _LATEST} names {tag!r}, which is not there. Of the rest {found[-1].name} was saved last"
            )
        return found[-1].name

    def _what_to_give(self) -> str:
        if is_checkpoint(self.path) and not is_store(self.path):
            return (
                f"It is one itself: give its directory and its tag, {str(self.path.parent)!r} and {self.path.name!r}."
            )
        stores = sorted(entry.name for entry in self.path.glob("*.store") if is_store(entry))
        if stores:
            return f"It has stores of runs: give one of them ({', '.join(stores[:3])}) to offload inspect or export."
        return "Give the directory that save_checkpoint was given."


class SavingDirectory(CheckpointDirectory):
    """The same, to save one checkpoint into. All ranks call the methods together."""

    def __init__(
        self, path: str | os.PathLike[str], tag: str | None, step: int, identity: RunIdentity, ranks: Ranks
    ) -> None:
        """Without a ``tag`` it is that of the ``step``. The first rank's ``identity`` is the run's."""
        super().__init__(path)
        self.tag = f"step{step}" if tag is None else tag
        self.folder(self.tag)
        self.moment = ""
        """Names this checkpoint, in the part of each rank, and no other one."""
        self._is_named = tag is not None
        self._step = step
        self._identity = identity
        self._run = ""
        self._ranks = ranks
        self._part = ranks.world.part_name
        self._place: Workplace | None = None
        """The first rank's workplace, while it saves."""
        self._new = self.path
        self._has_told = False
        """The other ranks know how it went."""

    def make(self) -> None:
        """Make the directory, and remove what dead processes left unfinished. Raises ``StoreUnsafe``, and
        ``ConfigError`` for a tag whose folder is there and is no checkpoint, ``RankError`` for tags that differ."""
        self._ranks.barrier("save_checkpoint()", lambda: {"the tag": self.tag})
        self._by_first("the directory of checkpoints", self._make)
        own = self.tag, secrets.token_hex(8)
        self.tag, self.moment = self._ranks.all_gather_object("the tag of a checkpoint", own)[0]
        if not self._ranks.all("is the directory of checkpoints there", self.path.is_dir()):
            raise ConfigError(
                f"{self.path}: some ranks do not see the directory that the first one has made. Give one on a file "
                "system that all of them share."
            )

    @property
    def target(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder(self.tag)

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
        with contextlib.ExitStack() as ending:
            self._by_first("a checkpoint's folder", partial(self._open_place, ending))
            new = None if self._place is None else str(self._place.new)
            self._new = Path(self._ranks.all_gather_object("the name of a checkpoint's folder", new)[0])
            self._has_told = False
            own = self._new / self._part
            try:
                own.mkdir(exist_ok=not self._part, mode=0o700)
                yield own
            except BaseException as error:
                if not self._has_told:
                    tell(self._ranks, "a checkpoint is complete", error)
                raise
            finally:
                shutil.rmtree(own, ignore_errors=True)

    def publish(self, folder: Path) -> None:
        """Give a complete checkpoint its tag, for good. One that had it before goes. Raises ``OSError``."""
        own = self._new / self._part
        if folder != own:
            complete = self._new.parent / f"complete{self._part}"
            folder.rename(complete)
            shutil.rmtree(own)
            complete.rename(own)
        sync_folder(self._new)
        self._has_told = True
        tell(self._ranks, "a checkpoint is complete", None)
        self._by_first(f"the tag {self.tag}", self._publish)
        self.tag = self._ranks.all_gather_object("the tag of a checkpoint", self.tag)[0]

    def retain(self, keep_last: int, keep_every: int) -> None:
        """Remove all checkpoints of this run but the newest ``keep_last``, and those whose step is a multiple of
        ``keep_every``. Raises ``StorageIOError``. See [Note: What retention removes]."""
        if keep_last:
            self._by_first("older checkpoints", partial(self._retain, keep_last, keep_every))

    def _by_first(self, what: str, call: Callable[[], None]) -> None:
        """Have the first rank make the call, and all know whether it worked."""
        self._has_told = True
        on_every_rank(self._ranks, what, call if self._ranks.rank == 0 else _nothing)

    def _make(self) -> None:
        try:
            make_directory(self.path)
            clear_left_over(self.path)
            clear_held(self.path)
            self._run = self._identity.in_directory(self.path)
        except OSError as error:
            raise unusable(f"{self.path} cannot be made or looked at", error) from None
        if (self.path / _LATEST).is_dir():
            raise ConfigError(
                f"{self.path / _LATEST} is a directory, and the file with the latest tag is to have that name: rename "
                "it, or give another directory for checkpoints. Nothing was written"
            )
        self._choose_tag()

    def _choose_tag(self) -> None:
        """A tag that nobody has chosen is never one that belongs to another run."""
        if not self.target.exists():
            return
        mark = read_mark(self.target)
        if not self._is_named and (mark is None or mark.run != self._run):
            taken, self.tag = self.target, f"{self.tag}-{self._run[:8]}"
            warn(f"{taken} is there and not of this run: it stays, and this checkpoint is {self.target}")
        if self.target.exists() and (is_store(self.target) or not is_checkpoint(self.target)):
            raise ConfigError(f"{self.target} is there and is no checkpoint: give another tag. Nothing was written")

    def _open_place(self, ending: contextlib.ExitStack) -> None:
        self._place = ending.enter_context(Workplace(self.path))

    def _publish(self) -> None:
        assert self._place is not None
        while not self._has_tag(self._place):
            pass
        sync_folder(self.path)  # only then may what was there go
        latest = self._place.folder / _LATEST
        try:
            write_synced(latest, self.tag.encode())
            latest.rename(self.path / _LATEST)
        except OSError:  # the disk is full: without the file the one saved last is the latest
            (self.path / _LATEST).unlink(missing_ok=True)
        sync_folder(self.path)

    def _has_tag(self, place: Workplace) -> bool:
        """Give what is complete its tag. False if another run was faster: its checkpoint is not replaced."""
        self._choose_tag()
        number = 1 + max((saved.mark.number for saved in self.saved()), default=0)
        (self._new / MARK).unlink(missing_ok=True)
        Mark(self._run, number, self._step, self.tag).write(self._new)
        sync_folder(self._new)
        if self.target.exists():
            if exchange(self._new, self.target):
                return True
            place.put_aside(self.tag)
        try:
            self._new.rename(self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def _retain(self, keep_last: int, keep_every: int) -> None:
        own = [saved for saved in self.saved() if saved.mark.run == self._run and not saved.was_moved]
        whole = [saved for saved in own if is_complete(self.path / saved.name)]
        old = [s for s in whole[:-keep_last] if s.name != self.tag and (not keep_every or s.mark.step % keep_every)]
        if not old:
            return
        try:
            with contextlib.ExitStack() as locks, Workplace(self.path) as place:
                for saved in old:
                    lock = take_unused(self.path / saved.name / MARK)
                    if lock is not None:  # nobody reads it
                        locks.callback(lock.close)
                        place.remove(saved.name, partial(_has_mark, saved.mark))
                sync_folder(self.path)
        except OSError as error:
            raise failed(f"removing old checkpoints in {self.path}", error) from error


def hold(folder: Path, closing: contextlib.ExitStack) -> None:
    """Have no retention remove a checkpoint until ``closing``. Nothing is known of one without a mark."""
    with contextlib.suppress(OSError):
        closing.callback(share(folder / MARK).close)


def _has_mark(mark: Mark, folder: Path) -> bool:
    return read_mark(folder) == mark


def _nothing() -> None:
    return None
