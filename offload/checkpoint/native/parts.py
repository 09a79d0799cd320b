"""A checkpoint in parts, one of each rank that has saved it: ``rank-0-of-4`` and so on, in the checkpoint's folder.

Together they are read like one: each part has shards of the units, and the description of all of them names each unit
as often as there are parts.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload.checkpoint.native.base_files import SavedFile
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.replay import replayed
from offload.checkpoint.native.saved_layout import Source
from offload.checkpoint.native.saved_units import SavedTile, SavedUnit, SavedUnits
from offload.checkpoint.native.whole import check_coverage, check_records
from swapper import (
    DurableStore,
    Extent,
    Generation,
    StorageCorrupt,
    StoreMissing,
    Ticket,
    generation_metadata,
    open_generation,
)
from swapper.checked import refusals

_PART = re.compile(r"rank-([0-9]{1,6})-of-([0-9]{1,6})")


def is_part(folder: Path) -> bool:
    """The folder has the name of one rank's part."""
    return _PART.fullmatch(folder.name) is not None


def part_folders(folder: Path) -> list[Path]:
    """The parts of the checkpoint in this folder, by rank; none if it is not in parts. Raises ``StoreMissing`` if some
    of them are not there."""
    runs = runs_in_parts(folder)
    if not runs:
        return []
    for num_ranks, found in runs.items():
        if len(runs) > 1 or sorted(found) != list(range(num_ranks)):
            raise StoreMissing(f"{folder} has the parts of ranks {sorted(found)} of {num_ranks}: some are missing.")
    (parts,) = runs.values()
    return [parts[rank] for rank in sorted(parts)]


def runs_in_parts(folder: Path) -> dict[int, dict[int, Path]]:
    """By number of ranks: the parts in this folder, by rank."""
    runs: dict[int, dict[int, Path]] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _PART.fullmatch(entry.name)
        if match is not None:
            runs.setdefault(int(match[2]), {})[int(match[1])] = entry
    return runs


def step_of(folder: Path) -> int:
    """The step of the checkpoint in this folder. Raises ``OffloadError`` if its description is not whole."""
    steps = {
        int(Description.decode(generation_metadata(part), str(part)).run["step"])
        for part in part_folders(folder) or [folder]
    }
    if len(steps) > 1:
        raise StorageCorrupt(f"{folder} has parts of several steps: {sorted(steps)}.")
    return steps.pop()


def moment_of(run: Mapping[str, Any]) -> tuple[int, str]:
    """What the state of a ``run`` has in common in all parts of a checkpoint or commit, and with those of no other
    one. Earlier versions have given the step alone."""
    return run["step"], run.get("moment", "")


class Parts:
    """All parts as one generation; see ``swapper.Generation`` for the methods."""

    def __init__(self, folder: Path, parts: Sequence[Path]) -> None:
        """Raises as ``open_generation``, and ``StorageCorrupt`` for descriptions that cannot be."""
        self.folder = folder
        with contextlib.ExitStack() as opening:
            self.generations = [opening.enter_context(open_generation(part)) for part in parts]
            self.descriptions = [Description.decode(part.metadata, str(part.folder)) for part in self.generations]
            self._replayed: list[Source] = []
            for part, description in zip(self.generations, self.descriptions, strict=True):
                with refusals(f"the description of {part.folder}", StorageCorrupt):
                    check_records(description, part)
                self._replayed.append(replayed(part, description))
            if len({moment_of(description.run) for description in self.descriptions}) > 1:
                steps = [description.run["step"] for description in self.descriptions]
                raise StorageCorrupt(f"{folder} has parts that were not saved together, of the steps {steps}.")
            self._closers = opening.pop_all()
        self._bases = [0, *accumulate(len(part.extents) for part in self.generations)]
        self.extents: Sequence[Extent] = _Extents(self)

    @property
    def generation(self) -> int:
        """The number of the last one."""
        return max(part.generation for part in self.generations)

    @property
    def metadata(self) -> bytes:
        """Return the metadata of all parts, one behind the other."""
        return b"".join(part.metadata for part in self.generations)

    def description(self, rank: int = 0) -> Description:
        """The description of all parts, with the state of the run as this rank had it; the last one, if it was none of
        them. What they have logged has been replayed."""
        units: list[SavedUnit] = []
        files: list[SavedFile] = []
        for base, description in zip(self._bases, self.descriptions, strict=False):
            units += [_shifted(unit, base, len(files)) for unit in description.units]
            files += description.files
        own = self.descriptions[min(rank, len(self.descriptions) - 1)]
        return replace(own, units=SavedUnits(units), files=tuple(files), updates=())

    def holds(self, extent: Extent) -> bool:
        number, own = self._place(extent.index)
        return self.generations[number].holds(own)

    def read(self, extent: Extent, address: int, nbytes: int) -> Ticket:
        number, own = self._place(extent.index)
        return self._replayed[number].read(own, address, nbytes)

    def _place(self, index: int) -> tuple[int, Extent]:
        """The number of the part that has the extent of this number, and the extent there. Raises ``IndexError``."""
        number = bisect_right(self._bases, index) - 1
        return number, self.generations[number].extents[index - self._bases[number]]

    def close(self) -> None:
        self._closers.close()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Extents(Sequence[Extent]):
    """The extents of all parts, numbered through."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return self._parts._bases[-1]

    def __getitem__(self, index: int) -> Extent:  # type: ignore[override]  # nobody asks for some of them
        return replace(self._parts._place(index)[1], index=index)


def open_parts(folder: Path) -> Generation | Parts:
    """The checkpoint in this folder, in parts or not. Raises as ``open_generation``."""
    parts = part_folders(folder)
    return Parts(folder, parts) if parts else open_generation(folder)


def description_of(source: Any, where: str, rank: int = 0) -> Description:
    """Return what a generation, or a checkpoint in parts, says of itself; see ``Parts.description`` for ``rank``.

    Raises ``StorageCorrupt`` for what cannot be, or is not in its extents.
    """
    description = source.description(rank) if isinstance(source, Parts) else Description.decode(source.metadata, where)
    with refusals(f"the description of {where}", StorageCorrupt):
        check_coverage(description.units)
        check_records(description, source)
    return description


def own_description(store: DurableStore, where: str) -> Description:
    """Return what the store of one rank says of itself: of its shards, where there are several. Raises as
    ``description_of``, but does not look for elements that are other ranks'."""
    description = Description.decode(store.metadata, where)
    with refusals(f"the description of {where}", StorageCorrupt):
        check_records(description, store)
    return description


def _shifted(unit: SavedUnit, base: int, first_file: int) -> SavedUnit:
    """The unit with the numbers of its extents counted from ``base``, and those of files from ``first_file``."""

    def tile(saved: SavedTile) -> SavedTile:
        return replace(saved, extent=saved.extent + base)

    return replace(
        unit,
        weights=tuple(index + base for index in unit.weights),
        tiles=tuple(tile(saved) for saved in unit.tiles),
        gradients=None if unit.gradients is None else unit.gradients + base,
        in_files=tuple(replace(part, file=part.file + first_file) for part in unit.in_files),
    )
