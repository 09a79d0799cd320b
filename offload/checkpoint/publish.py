"""A directory of weights files that is complete or as it was before, whenever the machine stops.

[Note: How weights become visible] New files are written and synced in a hidden folder of the directory, and renamed.
Readers prefer ``model.safetensors`` to an index, and see of shards only what the index names. So one rename or removal
makes the new weights the visible ones. Where new shards have the names of old ones, they first get other names beside
them, and an index that says so; it makes way for the ordinary names once the old shards are gone.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from offload.checkpoint.workplace import Workplace, clear_left_over, is_workplace
from offload.errors import ConfigError
from offload.option_values import as_path
from swapper import OffloadError, StorageFull, readable_bytes
from swapper.errors import failed, unusable

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""Error numbers of a file system without hard links."""

INDEX_SUFFIX = ".safetensors.index.json"


class Unfinished:
    """A hidden folder in ``target``, which is made if it is not there. Without ``publish`` nothing of it stays.

    Raises ``StoreUnsafe`` for a target that cannot be a directory.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = as_path("dir", target)
        self._made = not self.target.exists()
        try:
            make_directory(self.target)
            clear_left_over(self.target)
            self._place = Workplace(self.target)
        except OSError as error:
            raise unusable(f"{self.target} cannot be written to", error) from None
        self.folder = self._place.new
        self._survives = "What was there is whole, and nothing of the new files is left."

    def require(self, nbytes: int) -> None:
        """Raise ``StorageFull`` unless there is room for so many bytes."""
        found = os.statvfs(self.folder)
        free_bytes = found.f_bavail * found.f_frsize
        if nbytes > free_bytes:
            raise StorageFull(
                f"{self.target} has too little room: {readable_bytes(nbytes)} are needed, {readable_bytes(free_bytes)} "
                "are free.",
                survives="Nothing was written, and what was there is whole.",
                advice="Free some space, or give another path.",
            )

    def publish(self, stem: str, others: Sequence[str] = ()) -> None:
        """Put the synced weights files, which begin with ``stem``, and ``others`` into the target, in place of those
        that are there. See [Note: How weights become visible]."""
        target, index = self.target, stem + INDEX_SUFFIX
        names = [entry.name for entry in self.folder.iterdir() if entry.name not in others]
        weights = re.compile(re.escape(stem) + r"(-[0-9]{5}-of-[0-9]{5}(-[0-9a-f]{16})?)?\.safetensors")
        old = [entry.name for entry in target.iterdir() if weights.fullmatch(entry.name)]
        shards = [name for name in names if name != index]
        provisional: list[Path] = []
        changed = [name for name in others if not _is_same(self.folder / name, target / name)]
        if changed:
            self._put_out_of_sight(target / index, target / f"{stem}.safetensors")
            for name in changed:
                (self.folder / name).replace(target / name)
            sync_folder(target)
        if index in names and (target / index).exists() and set(shards) & set(old):
            provisional = self._show_under_other_names(shards, index)
        for name in shards:
            (self.folder / name).replace(target / name)
        sync_folder(target)  # an index is seen only with its shards
        if index in names:
            (self.folder / index).replace(target / index)
        sync_folder(target)
        for path in [target / name for name in old if name not in shards] + provisional:
            path.unlink(missing_ok=True)
        if index not in names:
            (target / index).unlink(missing_ok=True)
        sync_folder(target)

    def publish_with(self, last: str, is_ours: re.Pattern[str]) -> None:
        """Put all synced files into the target, in place of those that match ``is_ours``. Readers begin with the
        ``last``, the only one whose name may be there: when it is replaced, the new files are what they see."""
        names = [entry.name for entry in self.folder.iterdir()]
        old = [entry.name for entry in self.target.iterdir() if is_ours.fullmatch(entry.name)]
        for name in names:
            if name != last:
                (self.folder / name).rename(self.target / name)
        sync_folder(self.target)
        (self.folder / last).replace(self.target / last)
        sync_folder(self.target)
        for name in set(old) - {last}:
            (self.target / name).unlink()
        sync_folder(self.target)

    def _put_out_of_sight(self, *readers_begin_with: Path) -> None:
        """Remove what old weights are found by, once the new ones cannot be lost any more."""
        found = [path for path in readers_begin_with if path.exists()]
        for folder in (self.folder, self.folder.parent, self.target) if found else ():
            sync_folder(folder)
        for path in found:
            self._survives = "The old weights had made way for new ones, which are not there: write them again."
            path.unlink()
            sync_folder(self.target)

    def _show_under_other_names(self, shards: Sequence[str], index: str) -> list[Path]:
        mark = self._place.mark
        other = {name: name.replace(".safetensors", f"-{mark}.safetensors") for name in shards}
        content = json.loads((self.folder / index).read_text())
        content["weight_map"] = {name: other[shard] for name, shard in content["weight_map"].items()}
        write_synced(self.folder / "provisional", json.dumps(content).encode())
        linked = []
        try:
            for name, new in other.items():
                os.link(self.folder / name, self.target / new)
                linked.append(self.target / new)
            sync_folder(self.target)
            (self.folder / "provisional").replace(self.target / index)
        except OSError as error:
            if error.errno in _NO_LINKS:  # no weights are better than mixed ones
                (self.target / index).unlink()
                return linked
            for path in linked:
                path.unlink()
            raise
        sync_folder(self.target)
        return linked

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._place.close()
        if error is not None and self._made:
            with contextlib.suppress(OSError):
                self.target.rmdir()
        if isinstance(error, OSError) and not isinstance(error, OffloadError):
            told = failed(f"writing to {self.target}", error)
            told.survives = self._survives
            raise told from error


def _is_same(new: Path, old: Path) -> bool:
    return old.is_file() and filecmp.cmp(new, old, shallow=False)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small new file, and wait until the disk has it. What has its name already, a link that others have made
    for one, is not written to: raises ``FileExistsError``."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has a file that someone else wrote."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, for good. Raises ``OSError``."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def check_replaceable(target: Path, is_ours: re.Pattern[str]) -> None:
    """Raise ``ConfigError`` if the directory holds other things."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file: give a directory")
    for entry in target.iterdir() if target.is_dir() else ():
        if not is_ours.fullmatch(entry.name) and not is_workplace(entry.name):
            raise ConfigError(f"{target} has other files in it ({entry.name}): give a directory of its own")
