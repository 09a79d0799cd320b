"""The records of a saved generation, borrowed from its extents as those of an engine are from their homes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

import aio_ext
from offload.checkpoint.native.base_files import BaseFiles, SavedPart
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.replay import replayed
from offload.checkpoint.native.saved_layout import Source, saved_kernel_rule, saved_unit
from offload.checkpoint.native.saved_units import SavedTile, SavedUnit
from offload.dtypes import BY_PRECISION
from offload.elements import Layout, Loan
from offload.interrupts import held_back
from offload.memory import tensor_at
from offload.optim.formats import Formats, master_bytes
from offload.optim.rule import TileLayout, TilePart
from offload.tiers.home import Home, TileHomes
from offload.units import ParameterSpec, Tile, UnitSpec
from swapper import StorageCorrupt, align, waiting


class SavedHome(Home):
    """A record that lies in these extents of a generation, one after the other, and then in files."""

    def __init__(
        self, source: Source, extents: Sequence[int], base: BaseFiles, in_files: Sequence[SavedPart] = ()
    ) -> None:
        self._source = source
        self._extents = [source.extents[index] for index in extents]
        self._base = base
        self._in_files = in_files
        stored = sum(extent.nbytes for extent in self._extents)
        super().__init__(max([stored, *(align(part.offset + part.nbytes) for part in in_files)]))

    def read(self, address: int) -> None:
        """Bring the record to memory at ``address``. Ctrl-C comes when all transfers are over: the memory may go with
        it."""
        at = address
        with held_back(), waiting() as tickets:
            for extent in self._extents:
                tickets.append(self._source.read(extent, at, extent.nbytes))
                at += extent.nbytes
        self._base.read(self._in_files, address)


class _Memory:
    """Memory for one saved record at a time, as large as the largest so far."""

    def __init__(self) -> None:
        self._memory = aio_ext.Memory(1)

    @contextlib.contextmanager
    def lend(self, home: SavedHome) -> Iterator[int]:
        """The record, brought in."""
        if self._memory.nbytes < home.nbytes:
            self._memory.close()
            self._memory = aio_ext.Memory(home.nbytes)
        home.read(self._memory.address)
        yield self._memory.address


class SavedRecords:
    """The records of all units of a generation: see ``offload.elements.Records``. A unit that ranks have saved is there
    as often as there were ranks.

    ``units`` have what is needed to find elements: a parameter's ``start`` is the first of its flat elements that is
    there. Raises ``StorageCorrupt`` for what cannot be.
    """

    def __init__(
        self,
        source: Source,
        description: Description,
        check: Callable[[], None] = lambda: None,
        parts_of: Callable[[str, int, int], Sequence[TilePart]] = lambda unit, start, stop: (),
        own: Sequence[UnitSpec] = (),
    ) -> None:
        """``check`` is called now and then, and may raise to end the work. ``parts_of`` knows what a tile of a unit has
        where the checkpoint, an old one, does not say. ``own``: units of an engine, which may read files in place that
        the generation refers to."""
        self._source = replayed(source, description)
        self.base = BaseFiles(description.files, own)
        self._parts_of = parts_of
        self._check = check
        dtype, trained = BY_PRECISION[description.precision], description.optimizer is not None
        formats = Formats(dtype.itemsize, master_bytes(description.precision, description.optimizer), 0)
        dtypes = torch.float32, torch.float32  # no step is taken
        self._kernel = None if not trained else saved_kernel_rule(description.optimizer or {}, formats, dtypes)
        self._parts = PartsLayout(description.optimizer or {}, formats)
        tiles: TileLayout | None = (self._kernel or self._parts) if trained else None
        self.layout = Layout(formats, dtype, tiles)
        self.units = [saved_unit(index, saved) for index, saved in enumerate(description.units)]
        self._saved_weights = [saved.weights for saved in description.units]
        self._weights_memory, self._tile_memory = _Memory(), _Memory()
        self._weights: list[SavedHome] = []
        self._states: dict[Tile, SavedHome] = {}
        self._tiles: list[list[TileHomes]] = []
        for unit, saved in zip(self.units, description.units, strict=True):
            self._add(unit, saved)

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        return self._tiles[unit.index]

    def lend_weights(self, unit: UnitSpec) -> Loan:
        self._check()
        return self._weights_memory.lend(self._weights[unit.index])

    def lend_tile(self, tile: TileHomes) -> Loan:
        self._check()
        return self._tile_memory.lend(self._states[tile.tile])

    def lend(self, extent: int) -> Loan:
        """The record in this extent."""
        return _Memory().lend(self.home(extent))

    def home(self, *extents: int) -> SavedHome:
        """The record in these extents."""
        return SavedHome(self._source, extents, self.base)

    def weights(self, unit: UnitSpec, in_files: Sequence[SavedPart]) -> SavedHome:
        """The weights of a unit, with these of its parts in files."""
        return SavedHome(self._source, self._saved_weights[unit.index], self.base, in_files)

    def close(self) -> None:
        """Nothing more is read."""
        self.base.close()

    def _add(self, unit: UnitSpec, saved: SavedUnit) -> None:
        weights = SavedHome(self._source, saved.weights, self.base, saved.in_files)
        states = {self._tile(unit, tile): self.home(tile.extent) for tile in saved.tiles}
        self._weights.append(weights)
        self._states.update(states)
        self._tiles.append([TileHomes(tile, home) for tile, home in states.items()])

    def _tile(self, unit: UnitSpec, saved: SavedTile) -> Tile:
        tile = Tile(saved.start, saved.stop, saved.nbytes)
        if self._kernel is None:
            self._parts.add(tile, unit, saved.parts or self._parts_of(unit.name, tile.start, tile.stop))
        else:
            nbytes = self._kernel.tile_between(unit, tile.start, tile.stop).nbytes
            if tile.nbytes != nbytes:
                raise StorageCorrupt(f"states of unit {unit.name} take {tile.nbytes} bytes there, not {nbytes}.")
        return tile


class PartsLayout:
    """Layout of the tiles of an optimizer without a kernel, as their checkpoint says. See ``TileLayout``."""

    def __init__(self, identity: Mapping[str, Any], formats: Formats) -> None:
        self.identity = dict(identity)
        self._width = formats.master
        self._parts: dict[Tile, Sequence[TilePart]] = {}
        self._offsets: dict[Tile, dict[str, int]] = {}

    def add(self, tile: Tile, unit: UnitSpec, parts: Sequence[TilePart]) -> None:
        """The tile holds these."""
        self._parts[tile] = parts
        self._offsets[tile] = {spec.name: spec.offset for spec in unit.trainable}

    def parts(self, tile: Tile) -> Sequence[TilePart]:
        return self._parts[tile]

    def master_offset(self, tile: Tile, element: int) -> int:
        for part in self._parts[tile]:
            first = element - self._offsets[tile][part.parameter]
            if not part.state and 0 <= first < max(prod(part.shape), 1):
                return part.offset + first * self._width
        raise StorageCorrupt(f"the master of element {element} is in no tile of its unit.")

    def states(self, tile: Tile, address: int, spec: ParameterSpec) -> dict[str, torch.Tensor]:
        return {
            part.state: tensor_at(address + part.offset, prod(part.shape), part.dtype)
            for part in self._parts[tile]
            if part.parameter == spec.name and part.state
        }
