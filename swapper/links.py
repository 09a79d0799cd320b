"""Further names of a store's data: those of generations that were linked, and those that others have made.

[Note: Links that are accounted for] What a linked generation needs must stay as long as its folder is there. Its path
says little about that: folders are renamed, moved with those above them, linked once more, seen under another mount.
The inode of the data counts its names. A name in a folder that says which retained generation it holds is accounted
for. When all names are, a generation that no folder holds may go. When one is not, it may be any generation's: all
stay.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.checked import TEXT, Cursor, ListOf, Refused, text_of
from swapper.directory import Directory
from swapper.owner import NAME as OWNER
from swapper.publication import published

NAME = "links"
"""File of the directories where generations were linked: a hint where to look, and nothing is lost without it."""

REPLACES = "replaces"
"""File with the identity of the store that this one was made to replace: once it has committed, that may go."""

_WRITTEN = "links.new"
_BYTES_MAX = 1 << 20
_PATHS = ListOf(TEXT)
DATA = "data.0"


@dataclass(frozen=True)
class Links:
    """``generations`` are held by folders that were found; ``num_unknown`` names of the data are not accounted for."""

    generations: frozenset[int]
    num_unknown: int


def find_links(directory: Directory, files: Sequence[int], retained: Collection[int]) -> Links:
    """Account for the names of the first of the open data files of a store, whose small files are in ``directory``."""
    if not files:  # the data is no file
        return Links(frozenset(), 0)
    data = files[0]
    held: set[int] = set()
    num_known = 1 if directory.is_name_of(DATA, data) else 0
    for folder in _folders_of(os.fstat(data), linked_in(directory)):
        names: list[str] = []
        with contextlib.suppress(OSError):  # it was removed just now
            names = [entry.name for entry in folder.iterdir()]
        generations = set(published(names))
        if generations and generations <= set(retained) and OWNER not in names:
            held |= generations
            num_known += 1
    return Links(frozenset(held), max(os.fstat(data).st_nlink - num_known, 0))


def linked_in(directory: Directory) -> list[Path]:
    """Directories in which folders with generations of this store have been made."""
    with contextlib.suppress(OSError, Refused):
        return [Path(path) for path in _PATHS.read(Cursor(text_of(directory.read(NAME, _BYTES_MAX))))]
    return []


def note_linked_in(directory: Directory, path: Path) -> None:
    """Note that a folder with a generation is made in ``path``. Raises ``OSError``."""
    known = linked_in(directory)
    if path in known:
        return
    noted = [str(other) for other in (*known, path) if other.is_dir()]
    with contextlib.suppress(FileNotFoundError):
        directory.remove(_WRITTEN)
    directory.create(_WRITTEN, json.dumps(noted).encode())
    directory.rename(_WRITTEN, NAME)


def _folders_of(data: os.stat_result, directories: Sequence[Path]) -> Iterator[Path]:
    """Folders in and two below these directories that have the data, each one once."""
    seen = set()
    for directory in directories:
        for folder in (*_inside(directory), *(below for entry in _inside(directory) for below in _inside(entry))):
            with contextlib.suppress(OSError):
                found, own = (folder / DATA).lstat(), folder.stat()
                if os.path.samestat(found, data) and (own.st_dev, own.st_ino) not in seen:
                    seen.add((own.st_dev, own.st_ino))
                    yield folder


def _inside(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []
