"""The directory of a run's checkpoints: one folder for each, named by its tag, and a file that names the latest.

A checkpoint is made in a folder of another name and renamed when it is complete and synced: what has its tag is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from offload.checkpoint.native.parts import Parts, open_parts, step_of
from offload.errors import ConfigError
from swapper import Generation, OffloadError, StoreMissing
from swapper.errors import failed, unusable
from swapper.files import Descriptor, exchange, open_directory, require_room

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_UNFINISHED = re.compile(r"\.unfinished-([0-9]+)-[0-9a-f]{8}")
_LATEST = "latest"


class CheckpointDirectory:
    """Checkpoints under ``path``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def make(self) -> None:
        """Make the directory, and remove what dead processes left unfinished. Raises ``StoreUnsafe``."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for entry in self.path.iterdir():
                found = _UNFINISHED.fullmatch(entry.name)
                if found is not None and not Path(f"/proc/{found[1]}").exists():
                    shutil.rmtree(entry, ignore_errors=True)
        except OSError as error:
            raise unusable(f"{self.path} cannot be made or looked at", error) from None

    def folder(self, tag: str) -> Path:
        """Where the checkpoint of this tag is. Raises ``ConfigError`` for a tag that cannot be a name."""
        if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == _LATEST:
            raise ConfigError(f"tag {tag!r}: expected letters, digits, '.', '_' and '-', at most 100, and not 'latest'")
        return self.path / tag

    def own_folder(self, tag: str) -> Path:
        """Where what this process saves of it is."""
        return self.folder(tag)

    def require(self, nbytes: int) -> None:
        """Raise ``StorageFull`` unless there is room for so many bytes."""
        directory = Descriptor(open_directory(self.path))
        try:
            require_room(directory.number, nbytes, self.path, "Free some space, or give another directory.")
        finally:
            directory.close()

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A hidden folder in which a checkpoint is made. What is complete is published from there, and nothing else
        stays."""
        folder = self._hidden()
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, tag: str) -> None:
        """Give a complete checkpoint its tag, for good. One that had it before goes. Raises ``OSError``."""
        target = self.folder(tag)
        if not target.exists():
            folder.rename(target)
        elif exchange(folder, target):
            shutil.rmtree(folder, ignore_errors=True)
        else:  # a moment in which the tag has none
            old = self._hidden()
            target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        latest = self.path / f".{_LATEST}"
        try:
            latest.write_text(tag)
            latest.rename(self.path / _LATEST)
        except OSError:  # the disk is full: without the file the highest step is the latest
            for file in (latest, self.path / _LATEST):
                file.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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
        """What else there is, in a sentence."""
        names = [f"{name} (step {step})" for name, step in self.tags().items() if name != tag]
        return f"These are there, too: {', '.join(names)}." if names else "There is no other checkpoint beside it."

    def retain(self, keep_last: int, keep_every: int, removing: Callable[[Path], None]) -> None:
        """Remove all checkpoints but the newest ``keep_last``, and those whose step is a multiple of ``keep_every``.
        Raises ``StorageIOError``."""
        if not keep_last:
            return
        steps = self.tags()
        for tag in list(steps)[:-keep_last]:
            if not keep_every or steps[tag] % keep_every:
                folder, old = self.path / tag, self._hidden()
                try:
                    folder.rename(old)
                except OSError as error:
                    raise failed(f"removing the old checkpoint {folder}", error) from error
                shutil.rmtree(old, ignore_errors=True)
                removing(folder)

    def _hidden(self) -> Path:
        """A new name for what is no checkpoint yet, or none any more."""
        return self.path / f".unfinished-{os.getpid()}-{os.urandom(4).hex()}"

    def _latest(self) -> str | None:
        with contextlib.suppress(OSError):
            tag = (self.path / _LATEST).read_text().strip()
            if _TAG.fullmatch(tag) and (self.path / tag).is_dir():
                return tag
        return next(reversed(self.tags()), None)
