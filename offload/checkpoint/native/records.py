"""The records of an engine as a generation has them: each in extents of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from offload.access import ExternalAccess
from offload.checkpoint.native.base_files import SavedFile
from offload.checkpoint.native.description import describe_units, parts_of
from offload.checkpoint.native.saved_units import SavedUnits
from offload.elements import Loan
from offload.memory import private_memory
from offload.tiers.home import Home
from offload.tiers.store import RecordExtents
from offload.units import UnitSpec
from swapper import Extent, align


@dataclass(frozen=True)
class Record:
    """``parts``: each extent, and the byte of the record with which it begins. From ``frozen`` on nothing changes."""

    unit: UnitSpec
    home: Home
    parts: Sequence[tuple[Extent, int]]
    frozen: int

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent, _ in self.parts)


@dataclass(frozen=True)
class EngineRecords:
    """Weights, optimizer states and accumulated gradients of ``units``, which are this rank's shards."""

    units: Sequence[UnitSpec]
    access: ExternalAccess
    gradient_dtype: torch.dtype

    def within(self, extents: Sequence[RecordExtents], *, gradients: bool) -> Iterator[Record]:
        """Each record of an engine whose records are in these extents, with ``gradients`` also those that are there."""
        formats = self.access.layout.formats
        for unit, homes, of_unit in zip(self.units, self.access.homes, extents, strict=True):
            starts = (start for start, _ in parts_of(unit, formats.weights))
            frozen = unit.trainable_numel * formats.weights
            yield Record(unit, homes.weights, tuple(zip(of_unit.weights, starts, strict=True)), frozen)
            for tile, extent in zip(homes.tiles, of_unit.tiles, strict=True):
                yield Record(unit, tile.states, ((extent, 0),), 1)
            if gradients and of_unit.gradients is not None and self.access.gradients.of(unit):
                home = _Gradients(self, unit, of_unit.gradients.nbytes)
                yield Record(unit, home, ((of_unit.gradients, 0),), 1)

    def lent(self, record: Record) -> Loan:
        """The record, to be read, when no update runs."""
        if record.home is self.access.homes[record.unit.index].weights:
            return self.access.weights(record.unit)
        return record.home.borrow(change=False)

    def layout(self) -> list[RecordExtents]:
        """Extents that a copy of all of them takes."""
        formats, count = self.access.layout.formats, 0

        def extent(nbytes: int) -> Extent:
            nonlocal count
            count += 1
            return Extent(count - 1, 0, align(nbytes))

        found = []
        for unit, homes in zip(self.units, self.access.homes, strict=True):
            weights = tuple(extent(nbytes) for _, nbytes in parts_of(unit, formats.weights))
            tiles = tuple(extent(tile.tile.nbytes) for tile in homes.tiles)
            has_gradients = unit.trainable_numel and formats.grads
            gradients = extent(unit.trainable_numel * formats.grads) if has_gradients else None
            found.append(RecordExtents(weights, tiles, gradients))
        return found

    def describe(self, extents: Sequence[RecordExtents]) -> SavedUnits:
        """The units of a generation with these extents."""
        layout = self.access.layout
        return describe_units(self.units, self.access.homes, extents, layout.rule, self.files, layout.formats.weights)

    @cached_property
    def files(self) -> tuple[SavedFile, ...]:
        """The files that frozen weights are in."""
        return tuple(dict.fromkeys(SavedFile.of(part.file) for unit in self.units for part in unit.in_files))

    @property
    def num_checksums(self) -> int:
        """Checksums of what is in files that are known by now."""
        stored = (homes.weights.stored for homes in self.access.homes)
        return sum(value is not None for home in stored if home is not None for value in home.checksums)


class _Gradients(Home):
    """The accumulated gradients of a unit, wherever they are: lent as a copy."""

    def __init__(self, records: EngineRecords, unit: UnitSpec, nbytes: int) -> None:
        super().__init__(nbytes)
        self._records = records
        self._unit = unit

    @contextlib.contextmanager
    def borrow(self, *, change: bool) -> Iterator[int]:
        with private_memory(self.nbytes) as memory:
            self._records.access.gradients.copy_to(self._unit, memory.address, self._records.gradient_dtype)
            yield memory.address
