"""Loading: a saved generation goes into the tiers of an engine, whose budgets and tiles may be others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

import aio_ext
from offload.checkpoint.description import Description, SavedTile, SavedUnit, parts_of
from offload.memory import tensor_at
from offload.model.backing import Outside
from offload.optim.formats import Formats
from offload.optim.rule import Rule
from offload.tiers.gradients import Gradient, GradientStore
from offload.tiers.home import TileHomes, UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import ParameterSpec, Tile, UnitSpec
from swapper import Extent, StorageCorrupt, Ticket


class Source(Protocol):
    """What a generation is read from: a checkpoint, or the store of an earlier run."""

    @property
    def extents(self) -> Sequence[Extent]: ...
    @property
    def metadata(self) -> bytes: ...
    def read(self, extent: Extent, address: int, nbytes: int) -> Ticket: ...


class Loading:
    """Brings the records of a generation to the homes of an engine. The description has been compared with it."""

    def __init__(
        self,
        source: Source,
        description: Description,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        outside: Outside,
        gradients: GradientStore,
    ) -> None:
        self._source = source
        self._description = description
        self._units = units
        self._homes = homes
        self._outside = outside
        self._rule: Rule | None = outside.rule
        self._formats: Formats = outside.formats
        self._gradients = gradients

    def copy(self) -> None:
        """Copy weights and states of all units. What was there before is lost, also if this raises."""
        saved = {unit.name: unit for unit in self._description.units}
        moments = (self._description.optimizer or {}).get("moments", "fp32")
        rule = None if self._rule is None else self._rule.saved_as(moments)
        for unit in self._units:
            self._copy_unit(unit, saved[unit.name], rule)

    def take_residents(self, records: Sequence[RecordExtents]) -> None:
        """The generation is in the engine's own store: bring in what rests in memory. The rest is where it belongs."""
        for unit, homes, extents in zip(self._units, self._homes, records, strict=True):
            if homes.weights.stored is None:
                with self._outside.all_weights_to_change(unit) as address:
                    self._read_weights(unit, [extent.index for extent in extents.weights], address)
            for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
                if tile.states.stored is None:
                    with tile.states.replace() as address:
                        self._read(extent.index, address)

    def take_gradients(self, known: dict[str, list[float]]) -> None:
        """Bring in the gradients that were accumulated, and what is ``known`` of them, by parameter."""
        saved = {unit.name: unit for unit in self._description.units}
        for unit in self._units:
            of_unit = {s: Gradient(*known[s.name]) for s in unit.parameters if s.name in known}
            index = saved[unit.name].gradients
            if not of_unit or index is None:
                continue
            with self._memory(self._extent(index).nbytes) as address:
                self._read(index, address)
                self._gradients.restore(unit, of_unit, address, self._description.run["gradient_dtype"])

    def _copy_unit(self, unit: UnitSpec, saved: SavedUnit, saved_rule: Rule | None) -> None:
        with self._outside.all_weights_to_change(unit) as address:
            self._read_weights(unit, saved.weights, address)
            if not saved.tiles and self._rule is not None:  # of a model that was not trained
                for spec in unit.trainable:
                    self._outside.write_master(unit, spec, address + spec.offset * self._formats.weights)
        if saved_rule is None or not saved.tiles:
            return
        for homes in self._homes[unit.index].tiles:
            with homes.states.replace() as address:
                self._fill(saved_rule, unit, saved.tiles, homes, address)

    def _fill(
        self, saved_rule: Rule, unit: UnitSpec, saved: Sequence[SavedTile], homes: TileHomes, address: int
    ) -> None:
        """Put the states of one tile together from the tiles that were saved."""
        rule, tile = self._rule, homes.tile
        assert rule is not None
        same = next((t for t in saved if (t.start, t.stop, t.nbytes) == (tile.start, tile.stop, tile.nbytes)), None)
        if same is not None and saved_rule is rule:
            self._read(same.extent, address)
            return
        rule.begin(tile, address)
        for part in saved:
            if part.start < tile.stop and tile.start < part.stop:
                there = saved_rule.tile_between(unit, part.start, part.stop)
                if there.nbytes != part.nbytes:
                    raise StorageCorrupt(
                        f"states of unit {unit.name} take {part.nbytes} bytes there, {there.nbytes} were expected."
                    )
                with self._memory(self._extent(part.extent).nbytes) as memory:
                    self._read(part.extent, memory)
                    for spec in unit.trainable:
                        self._move(spec, saved_rule, there, memory, rule, tile, address)

    def _move(
        self, spec: ParameterSpec, saved_rule: Rule, there: Tile, memory: int, rule: Rule, tile: Tile, address: int
    ) -> None:
        """Copy what both tiles hold of one parameter."""
        start = max(spec.offset, there.start, tile.start)
        stop = min(spec.offset + spec.numel, there.stop, tile.stop)
        if start >= stop:
            return
        width = self._formats.master
        if width:
            source = tensor_at(memory + saved_rule.master_offset(there, start), (stop - start) * width, torch.uint8)
            tensor_at(address + rule.master_offset(tile, start), (stop - start) * width, torch.uint8).copy_(source)
        rule.put_states(tile, address, spec, saved_rule.states(there, memory, spec), max(spec.offset, there.start))

    def _read_weights(self, unit: UnitSpec, extents: Sequence[int], address: int) -> None:
        tickets = []
        for index, (start, nbytes) in zip(extents, parts_of(unit, self._formats.weights), strict=True):
            extent = self._extent(index)
            if extent.nbytes != nbytes:
                raise StorageCorrupt(f"weights of unit {unit.name} have {extent.nbytes} bytes there, {nbytes} here.")
            tickets.append(self._source.read(extent, address + start, extent.nbytes))
        for ticket in tickets:
            ticket.wait()

    def _read(self, index: int, address: int) -> None:
        extent = self._extent(index)
        self._source.read(extent, address, extent.nbytes).wait()

    def _extent(self, index: int) -> Extent:
        if not 0 <= index < len(self._source.extents):
            raise StorageCorrupt(f"extent {index} is none of the {len(self._source.extents)} that are there.")
        return self._source.extents[index]

    @contextlib.contextmanager
    def _memory(self, nbytes: int) -> Iterator[int]:
        memory = aio_ext.Memory(nbytes)
        try:
            yield memory.address
        finally:
            memory.close()
