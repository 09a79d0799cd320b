"""The mark of a checkpoint: a small file in its folder that says what it is, and whose.

[Note: What is a checkpoint] A folder with a mark is a checkpoint, and was complete when it got its name. A store that
a run trains with has none, whatever its name is. Checkpoints follow each other in the order in which they were saved
into their directory, by the mark's ``number``: not by step, which goes back when a run does. What is in use, by who
reads it, is locked by its mark.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.checkpoint.native.parts import part_folders, step_of
from offload.checkpoint.publish import write_synced
from swapper import OffloadError, check_generation
from swapper.checked import Cursor, Int, Record, Refused, Text, read_regular, text_of
from swapper.owner import NAME as OWNER
from swapper.publication import committed, published

NAME = "checkpoint.json"
_FORMAT = 1
_BYTES_MAX = 4096


@dataclass(frozen=True)
class Mark:
    """``run`` has saved it under ``tag``, at ``step``, as number ``number`` of its directory."""

    run: str
    number: int
    step: int
    tag: str

    def write(self, folder: Path) -> None:
        """Put it into a folder, for good but for its name there. Raises ``OSError``."""
        write_synced(folder / NAME, json.dumps({"format": _FORMAT, **asdict(self)}).encode())


_MARK = Record(
    lambda format, **fields: Mark(**fields),
    {"format": Int(_FORMAT, _FORMAT), "run": Text(64), "number": Int(), "step": Int(), "tag": Text(255)},
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint under the name that it has now. ``mark`` says what it was saved as."""

    name: str
    mark: Mark

    @property
    def was_moved(self) -> bool:
        """It is a copy, or somebody gave it another name."""
        return self.name != self.mark.tag


def read_mark(folder: Path) -> Mark | None:
    """The mark in a folder; None if there is none that makes sense."""
    with contextlib.suppress(OSError, Refused):
        return _MARK.read(Cursor(text_of(read_regular(folder / NAME, _BYTES_MAX))))
    return None


def saved_in(directory: Path) -> list[Saved]:
    """The checkpoints in a directory, the one saved first first. Those of earlier versions, without a mark, come before
    all others, by step, if their descriptions are whole."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        with contextlib.suppress(OSError, OffloadError):  # another user's: it hides no other one
            if not entry.name.startswith(".") and entry.is_dir() and not is_store(entry):
                mark = read_mark(entry) or Mark("", 0, step_of(entry), entry.name)
                found.append(Saved(entry.name, mark))
    return sorted(found, key=lambda saved: (saved.mark.number, saved.mark.step))


def holds_generation(folder: Path) -> bool:
    """A generation, whole or damaged, is directly in this folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - they are all that is asked for
        return bool(published(names) or committed(names))
    except OSError:
        return False


def is_checkpoint(folder: Path) -> bool:
    """A checkpoint, whole or damaged, is in this folder: a generation, or the parts of ranks."""
    try:
        return read_mark(folder) is not None or holds_generation(folder) or bool(part_folders(folder))
    except OffloadError:  # some of the parts
        return True


def is_store(folder: Path) -> bool:
    """The folder is the store of a run, or a copy of one."""
    return folder.name.endswith(".store") or ((folder / OWNER).exists() and not (folder / NAME).exists())


def is_complete(folder: Path) -> bool:
    """All files of the checkpoint are there, with all of their bytes; whether these are right is not looked at."""
    try:
        for part in part_folders(folder) or [folder]:
            check_generation(part)
    except OffloadError:
        return False
    return True
