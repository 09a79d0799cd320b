"""Files that frozen weights were read from in place: a generation says which, and does not hold their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.birth.weights import opened
from offload.birth.weights_file import WeightsFile
from offload.errors import ConfigError, WeightsError
from offload.memory import tensor_at
from offload.tiers.home import Home
from offload.units import UnitSpec
from swapper import FilePart, ReadOnlyFile, WeightsChanged
from swapper.in_place import part_checksum


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A weights file: where it was, its bytes, and the checksum of its header."""

    path: str
    nbytes: int
    header: int

    @classmethod
    def of(cls, file: ReadOnlyFile) -> SavedFile:
        return cls(str(file.path), file.nbytes, file.header)

    @property
    def identity(self) -> tuple[str, int, int]:
        """As that of ``ReadOnlyFile``."""
        return Path(self.path).name, self.nbytes, self.header


@dataclass(frozen=True, slots=True)
class SavedPart:
    """``nbytes`` from ``start`` on of a file, which is known by its number: those from byte ``offset`` on of a unit's
    weights. ``checksum`` is None if they were not read so far."""

    file: int
    start: int
    nbytes: int
    offset: int
    checksum: int | None = None


def saved_parts(unit: UnitSpec, home: Home, files: Sequence[SavedFile], width: int) -> tuple[SavedPart, ...]:
    """The parts of a unit's frozen weights, with their checksums as far as they are known, or cost no reading."""
    checksums: Sequence[int | None] = [None] * len(unit.in_files)
    if home.stored is not None:
        checksums = home.stored.checksums
    elif home.address is not None:
        checksums = [part_checksum(home.address + part.offset, part.nbytes) for part in unit.in_files]
    return tuple(
        SavedPart(files.index(SavedFile.of(part.file)), part.start, part.nbytes, part.offset, checksum)
        for part, checksum in zip(unit.in_files, checksums, strict=True)
    )


class BaseFiles:
    """The files of one generation, opened when they are needed. Close them at the end."""

    def __init__(self, files: Sequence[SavedFile], units: Iterable[UnitSpec] = ()) -> None:
        """A file that one of the ``units`` reads in place is taken where that is."""
        own = {part.file.identity: part.file.path for unit in units for part in unit.in_files}
        self._files = files
        self._paths = [own.get(file.identity, Path(file.path)) for file in files]
        self._opened: dict[int, WeightsFile] = {}

    def same(self, parts: Sequence[SavedPart], own: Sequence[FilePart]) -> bool:
        """These parts are the same ones of the same files, as far as names, sizes and headers tell."""
        there = [(self._files[part.file].identity, part.start, part.nbytes, part.offset) for part in parts]
        return there == [(part.file.identity, part.start, part.nbytes, part.offset) for part in own]

    def open(self, number: int) -> WeightsFile:
        """The file of this number. Raises ``ConfigError`` if it is not there, or another one."""
        if number not in self._opened:
            saved, path = self._files[number], self._paths[number]
            try:
                file = opened(path)
            except WeightsError as error:
                raise ConfigError(
                    f"frozen weights were read in place from {saved.path}, and are in no checkpoint: {error.args[0]}. "
                    "Put the file back, or make the engine with weights= where it is now"
                ) from None
            if (file.read_only.nbytes, file.read_only.header) != (saved.nbytes, saved.header):
                file.close()
                raise ConfigError(
                    f"frozen weights were read in place from {saved.path}, and {path} is another file: it has "
                    f"{file.read_only.nbytes:,} bytes and a header with checksum {file.read_only.header:016x}, not "
                    f"{saved.nbytes:,} and {saved.header:016x}. Put back the file that was there"
                )
            self._opened[number] = file
        return self._opened[number]

    def read(self, parts: Sequence[SavedPart], address: int) -> None:
        """Bring them to the unit's weights at ``address``. Raises ``WeightsChanged``, and as ``open``."""
        for part in parts:
            file = self.open(part.file)
            file.read_into(part.start, tensor_at(address + part.offset, part.nbytes, torch.uint8))
        self.verify(parts, address)

    def verify(self, parts: Sequence[SavedPart], address: int) -> None:
        """Raise ``WeightsChanged`` unless the unit's weights at ``address`` have the checksums that are known."""
        for part in parts:
            seen = part_checksum(address + part.offset, part.nbytes)
            if part.checksum not in (None, seen):
                raise WeightsChanged(
                    f"{self._paths[part.file]} [{part.start}, {part.start + part.nbytes}) has other bytes than those "
                    f"that were trained with: checksum {seen:016x}, expected {part.checksum:016x}."
                )

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened = {}
