"""A generation as it is after the updates in its log: whoever reads records finds them with all of them applied.

[Note: How a log is replayed] An update changes each tile by itself: its states, the weights of its elements. So a tile
is read as it was when it was last written, with the gradients of all its logged updates, and the kernel runs over it as
it did in the run, once for each of them. The kernels give the same bits on every machine. The weights of a unit are one
record: all of its tiles are replayed when they are read. Memory: the weights of one unit, and a tile with all of its
gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aio_ext
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.checkpoint.native.saved_layout import Source, saved_kernel_rule, saved_unit
from offload.checkpoint.native.saved_units import SavedTile, SavedUnit
from offload.dtypes import BY_PRECISION
from offload.optim.formats import MASTER_BYTES, Formats
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
        self._formats = Formats(dtype.itemsize, MASTER_BYTES[dtype], grads_dtype.itemsize)
        rule = saved_kernel_rule(description.optimizer or {}, self._formats, (dtype, grads_dtype))
        assert rule is not None
        self._rule = rule
        self._tiles: dict[int, tuple[_Logged, int]] = {}
        """By extent: unit and number of each tile with updates."""
        self._units: dict[int, _Logged] = {}
        """By the extent of the trained weights."""
        self._memory = aio_ext.Memory(1)
        self._weights = aio_ext.Memory(1)
        self._weights_of: int | None = None
        """The extent whose bytes ``_weights`` has, as they were written last."""
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
        states = self._source.extents[tile.extent]
        with waiting() as tickets:
            first, gradients = self._room_for(logged, number, states.nbytes)
            tickets.append(self._source.read(states, first, states.nbytes))
            tickets += self._read_gradients(logged, number, gradients)
        self._apply(logged, tile, TileBytes(first, weights + tile.start * self._formats.weights, 0), gradients)

    def _replay_tile(self, logged: _Logged, number: int, states: int) -> None:
        """Bring the states of a tile, at this address, to what they are after all updates."""
        tile, width = logged.saved.tiles[number], self._formats.weights
        base = self._base_weights(logged)
        with waiting() as tickets:
            nbytes = (tile.stop - tile.start) * width
            weights, gradients = self._room_for(logged, number, self._source.extents[tile.extent].nbytes)
            tickets += self._read_gradients(logged, number, gradients)
            ctypes.memmove(weights, base + tile.start * width, nbytes)
        self._apply(logged, tile, TileBytes(states, weights, 0), gradients)

    def _base_weights(self, logged: _Logged) -> int:
        """The address of the unit's weights as they were written last."""
        extent = self._source.extents[logged.weights]
        if self._weights_of != extent.index:
            self._weights_of = None
            if self._weights.nbytes < extent.nbytes:
                self._weights.close()
                self._weights = aio_ext.Memory(extent.nbytes)
            self._source.read(extent, self._weights.address, extent.nbytes).wait()
            self._weights_of = extent.index
        return self._weights.address

    def _room_for(self, logged: _Logged, number: int, first_bytes: int) -> tuple[int, list[int]]:
        """The addresses of memory for so many bytes, and for the gradients of each update of a tile."""
        sizes = [first_bytes, *(extent.nbytes for extent in self._gradients(logged, number))]
        if self._memory.nbytes < sum(sizes):
            self._memory.close()
            self._memory = aio_ext.Memory(sum(sizes))
        addresses = [self._memory.address]
        for nbytes in sizes[:-1]:
            addresses.append(addresses[-1] + nbytes)
        return addresses[0], addresses[1:]

    def _gradients(self, logged: _Logged, number: int) -> Iterator[Extent]:
        return (self._source.extents[update.gradients[number]] for update, _ in logged.updates)

    def _read_gradients(self, logged: _Logged, number: int, addresses: Sequence[int]) -> Iterator[Ticket]:
        for extent, address in zip(self._gradients(logged, number), addresses, strict=True):
            yield self._source.read(extent, address, extent.nbytes)

    def _apply(self, logged: _Logged, tile: SavedTile, at: TileBytes, gradients: Sequence[int]) -> None:
        own = self._rule.tile_between(logged.unit, tile.start, tile.stop)
        for (_, update), grads in zip(logged.updates, gradients, strict=True):
            apply(self._rule, self._formats, update, own, at._replace(grads=grads))
