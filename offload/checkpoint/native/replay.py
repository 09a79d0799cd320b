"""A generation as it is after the updates in its log: whoever reads records finds them with all of them applied.

[Note: How a log is replayed] An update changes each tile by itself: its states, the weights of its elements. So a tile
is read as it was when it was last written, with the gradients of all its logged updates, and the kernel runs over it as
it did in the run, once for each of them. The kernels give the same bits on every machine. The weights of a unit are one
record: all of its tiles are replayed when they are read. Memory: the weights of one unit, a tile, and one part of the
gradients of each update (8 MiB).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import aio_ext
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.checkpoint.native.saved_layout import Source, saved_kernel_rule, saved_unit
from offload.checkpoint.native.saved_units import SavedUnit
from offload.dtypes import BY_PRECISION
from offload.interrupts import held_back
from offload.optim.formats import Formats, master_bytes
from offload.optim.rule import TileBytes
from offload.units import UnitSpec
from offload.update.step import UnitUpdate, apply
from swapper import Extent, StorageCorrupt, Ticket, waiting


def replayed(source: Source, description: Description) -> Source:
    """The records of a generation that ``description`` is of, and was compared with, after all that it has logged."""
    return Replayed(source, description) if description.updates else source


@dataclass
class _Logged:
    """A unit with logged updates, in their order."""

    unit: UnitSpec
    saved: SavedUnit
    updates: list[tuple[LoggedUpdate, UnitUpdate]]

    @property
    def weights(self) -> int:
        """The extent of what is trained."""
        return self.saved.weights[0]


class Replayed:
    """See the module's docstring, and ``Source`` for the methods. One thread at a time reads."""

    def __init__(self, source: Source, description: Description) -> None:
        """Raises ``StorageCorrupt`` for what cannot be."""
        dtype, grads_dtype = BY_PRECISION[description.precision], description.run["gradient_dtype"]
        self._source = source
        beside = master_bytes(description.precision, description.optimizer)
        self._formats = Formats(dtype.itemsize, beside, grads_dtype.itemsize)
        rule = saved_kernel_rule(description.optimizer or {}, self._formats, (dtype, grads_dtype))
        assert rule is not None
        self._rule = rule
        self._tiles: dict[int, tuple[_Logged, int]] = {}
        """By extent: unit and number of each tile with updates."""
        self._units: dict[int, _Logged] = {}
        """By the extent of the trained weights."""
        self._weights, self._gradients, self._states, self._slice = _Room(), _Room(), _Room(), _Room()
        of_unit: dict[str, list[LoggedUpdate]] = {}
        for update in description.updates:
            of_unit.setdefault(update.unit, []).append(update)
        for index, saved in enumerate(description.units):
            if saved.name in of_unit:
                self._add(saved_unit(index, saved), saved, of_unit[saved.name])

    @property
    def extents(self) -> Sequence[Extent]:
        return self._source.extents

    @property
    def metadata(self) -> bytes:
        return self._source.metadata

    def holds(self, extent: Extent) -> bool:
        return self._source.holds(extent)

    def read(self, extent: Extent, address: int, nbytes: int) -> Ticket:
        ticket = self._source.read(extent, address, nbytes)
        if extent.index in self._units:
            ticket.wait()
            logged = self._units[extent.index]
            for number in range(len(logged.saved.tiles)):
                self._replay_beside(logged, number, address)
        elif extent.index in self._tiles:
            ticket.wait()
            self._replay_tile(*self._tiles[extent.index], address)
        return ticket

    def _add(self, unit: UnitSpec, saved: SavedUnit, updates: Sequence[LoggedUpdate]) -> None:
        optimizer = str(self._rule.identity["optimizer"])
        logged = _Logged(
            unit, saved, [(update, UnitUpdate(unit, tuple(update.steps(optimizer)))) for update in updates]
        )
        self._units[logged.weights] = logged
        for number, tile in enumerate(saved.tiles):
            self._tiles[tile.extent] = logged, number
            if self._rule.tile_between(unit, tile.start, tile.stop).nbytes != tile.nbytes:
                raise StorageCorrupt(f"states of unit {unit.name} take {tile.nbytes} bytes there, which cannot be.")

    def _replay_beside(self, logged: _Logged, number: int, weights: int) -> None:
        """Bring the weights of a tile's elements, in the record at this address, to what they are after all updates."""
        tile = logged.saved.tiles[number]
        extent = self._source.extents[tile.extent]
        states = self._states.room_for(extent.nbytes)
        self._source.read(extent, states, extent.nbytes).wait()
        self._apply(logged, number, states, weights + tile.start * self._formats.weights)

    def _replay_tile(self, logged: _Logged, number: int, states: int) -> None:
        """Bring the states of a tile, at this address, to what they are after all updates."""
        tile, width = logged.saved.tiles[number], self._formats.weights
        nbytes = (tile.stop - tile.start) * width
        weights = self._slice.room_for(nbytes)
        ctypes.memmove(weights, self._base_weights(logged) + tile.start * width, nbytes)
        self._apply(logged, number, states, weights)

    def _base_weights(self, logged: _Logged) -> int:
        """The address of the unit's weights as they were written last."""
        return self._weights.brought(self._source, [self._source.extents[logged.weights]])[0]

    def _apply(self, logged: _Logged, number: int, states: int, weights: int) -> None:
        """Run the kernel over a tile, once for each update."""
        tiles = logged.saved.tiles
        tile = self._rule.tile_between(logged.unit, tiles[number].start, tiles[number].stop)
        parts = [update.gradients[number // update.num_tiles] for update, _ in logged.updates]
        addresses = self._gradients.brought(self._source, [self._source.extents[index] for index in parts])
        for (logged_update, update), address in zip(logged.updates, addresses, strict=True):
            first = tiles[number - number % logged_update.num_tiles]
            grads = address + (tile.start - first.start) * self._formats.grads
            apply(self._rule, self._formats, update, tile, TileBytes.in_place(states, weights, grads))


class _Room:
    """Memory that is as large as what was asked for at most."""

    def __init__(self) -> None:
        self._memory = aio_ext.Memory(1)
        self._holds: list[int] = []
        """The extents that ``brought`` has left there."""
        self._addresses: list[int] = []

    def room_for(self, nbytes: int) -> int:
        """The address of so many bytes, which may be written to."""
        self._holds = []
        if self._memory.nbytes < nbytes:
            self._memory.close()
            self._memory = aio_ext.Memory(nbytes)
        return self._memory.address

    def brought(self, source: Source, extents: Sequence[Extent]) -> list[int]:
        """The addresses of what these extents hold, to be read. What was brought last is not read again."""
        numbers = [extent.index for extent in extents]
        if self._holds != numbers:
            first = self.room_for(sum(extent.nbytes for extent in extents))
            self._addresses = list(accumulate((extent.nbytes for extent in extents[:-1]), initial=first))
            with held_back(), waiting() as tickets:  # as in ``SavedHome.read``
                for extent, address in zip(extents, self._addresses, strict=True):
                    tickets.append(source.read(extent, address, extent.nbytes))
            self._holds = numbers
        return self._addresses
