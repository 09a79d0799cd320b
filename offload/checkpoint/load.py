"""Loading: a saved generation goes into the tiers of an engine, whose budgets and tiles may be others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import aio_ext
from offload.checkpoint.description import Description, SavedParameter, SavedTile, SavedUnit, parts_of
from offload.memory import tensor_at
from offload.model.backing import ExternalAccess
from offload.optim.formats import Formats
from offload.optim.rule import Rule
from offload.tiers.gradients.store import Gradient, GradientStore
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


@dataclass(frozen=True)
class _Pair:
    """A parameter here, and what a saved unit has of it."""

    spec: ParameterSpec
    saved: SavedParameter

    @property
    def shift(self) -> int:
        """From an element of the saved unit to the same one of the unit here."""
        return self.spec.offset - self.spec.start - self.saved.offset + self.saved.begin

    @property
    def saved_spec(self) -> Any:
        """The saved parameter as a rule wants it: of a shard only ``offset`` and ``numel`` are looked at."""
        return self.spec if self.saved.flat_of is None and self.spec.whole is None else self.saved

    def common(self, own: Tile | None = None, there: Tile | SavedTile | None = None) -> tuple[int, int, int] | None:
        """The elements that both have, within these tiles: the first one here, the same one there, and how many."""
        spec, saved, shift = self.spec, self.saved, self.shift
        numel = spec.numel if spec.whole is None and saved.flat_of is None else saved.numel
        start, stop = (
            max(spec.offset, saved.offset + shift),
            min(spec.offset + spec.numel, saved.offset + numel + shift),
        )
        if own is not None:
            start, stop = max(start, own.start), min(stop, own.stop)
        if there is not None:
            start, stop = max(start, there.start + shift), min(stop, there.stop + shift)
        return (start, start - shift, stop - start) if start < stop else None


def _pairs(unit: UnitSpec, saved: SavedUnit) -> list[_Pair]:
    by_name = {parameter.name: parameter for parameter in saved.parameters}
    return [_Pair(spec, by_name[spec.name]) for spec in unit.parameters]


def _lies_alike(unit: UnitSpec, saved: SavedUnit) -> bool:
    """The saved unit has the same elements at the same places."""
    if (unit.name, unit.numel, unit.trainable_numel) != (saved.name, saved.numel, saved.trainable_numel):
        return False
    here = [(spec.offset, spec.start, tuple(spec.shape)) for spec in unit.parameters]
    there = [(pair.saved.offset, pair.saved.begin, pair.saved.shape) for pair in _pairs(unit, saved)]
    return here == there


class Loading:
    """Brings the records of a generation to the homes of an engine. The description has been compared with it."""

    def __init__(
        self,
        source: Source,
        description: Description,
        units: Sequence[UnitSpec],
        homes: Sequence[UnitHomes],
        access: ExternalAccess,
        gradients: GradientStore,
    ) -> None:
        self._source = source
        self._description = description
        self._units = units
        self._homes = homes
        self._access = access
        self._rule: Rule | None = access.rule
        self._formats: Formats = access.formats
        self._gradients = gradients

    def copy(self) -> None:
        """Copy weights and states of all units. What was there before is lost, also if this raises."""
        saved: dict[str, list[SavedUnit]] = {}
        for of_rank in self._description.units:
            saved.setdefault(of_rank.name, []).append(of_rank)
        moments = (self._description.optimizer or {}).get("moments", "fp32")
        rule = None if self._rule is None else self._rule.saved_as(moments)
        for unit in self._units:
            self._copy_unit(unit, saved[unit.name], rule)

    def take_residents(self, records: Sequence[RecordExtents]) -> None:
        """The generation is in the engine's own store: bring in what rests in memory. The rest is where it belongs."""
        for unit, homes, extents in zip(self._units, self._homes, records, strict=True):
            if homes.weights.stored is None:
                with self._access.all_weights_to_change(unit) as address:
                    self._read_weights(unit, [extent.index for extent in extents.weights], address)
            for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
                if tile.states.stored is None:
                    with tile.states.replace() as address:
                        self._read(extent.index, address)

    def take_gradients(self, known: dict[str, list[float]]) -> None:
        """Bring in the gradients that were accumulated, and what is ``known`` of them, by parameter. The generation has
        them as they lie here: see ``can_take_gradients``."""
        for unit in self._units:
            of_unit = {s: Gradient(*known[s.name]) for s in unit.parameters if s.name in known}
            index = next((saved.gradients for saved in self._description.units if _lies_alike(unit, saved)), None)
            if not of_unit or index is None:
                continue
            with self._memory(self._extent(index).nbytes) as address:
                self._read(index, address)
                self._gradients.restore(unit, of_unit, address, self._description.run["gradient_dtype"])

    def can_take_gradients(self) -> bool:
        """Each unit is there as it is here: it was saved by as many ranks."""
        return all(any(_lies_alike(unit, saved) for saved in self._description.units) for unit in self._units)

    def _copy_unit(self, unit: UnitSpec, saved: Sequence[SavedUnit], saved_rule: Rule | None) -> None:
        """``saved``: the unit, or the shards of it that ranks have saved."""
        as_it_is = next((part for part in saved if _lies_alike(unit, part)), None)
        with self._access.all_weights_to_change(unit) as address:
            if as_it_is is not None:
                saved = [as_it_is]
                self._read_weights(unit, as_it_is.weights, address)
            else:
                self._put_weights_together(unit, saved, address)
            if not any(part.tiles for part in saved) and self._rule is not None:  # of a model that was not trained
                for spec in unit.trainable:
                    self._access.write_master(unit, spec, address + spec.offset * self._formats.weights)
        if saved_rule is None or not any(part.tiles for part in saved):
            return
        for homes in self._homes[unit.index].tiles:
            with homes.states.replace() as address:
                self._fill(saved_rule, unit, saved, as_it_is is not None, homes, address)

    def _put_weights_together(self, unit: UnitSpec, saved: Sequence[SavedUnit], address: int) -> None:
        """From the parts that the saved shards have of each parameter."""
        width = self._formats.weights
        tensor_at(address, unit.numel * width, torch.uint8).zero_()
        for part in saved:
            pairs = [pair for pair in _pairs(unit, part) if pair.common() is not None]
            if not pairs:
                continue
            frozen = part.numel - part.trainable_numel
            sizes = [numel * width for numel in (part.trainable_numel, frozen) if numel]
            with self._memory(sum(sizes)) as memory:
                self._read_parts(unit, part.weights, memory, sizes)
                for pair in pairs:
                    own, their, numel = pair.common() or (0, 0, 0)
                    source = tensor_at(memory + their * width, numel * width, torch.uint8)
                    tensor_at(address + own * width, numel * width, torch.uint8).copy_(source)

    def _fill(
        self,
        saved_rule: Rule,
        unit: UnitSpec,
        saved: Sequence[SavedUnit],
        is_alike: bool,
        homes: TileHomes,
        address: int,
    ) -> None:
        """Put the states of one tile together from the tiles that were saved."""
        rule, tile = self._rule, homes.tile
        assert rule is not None
        bounds = tile.start, tile.stop, tile.nbytes
        same = [t for part in saved for t in part.tiles if is_alike and (t.start, t.stop, t.nbytes) == bounds]
        if same and saved_rule is rule:
            self._read(same[0].extent, address)
            return
        rule.begin(tile, address)
        for part in saved:
            for saved_tile in part.tiles:
                pairs = [pair for pair in _pairs(unit, part) if pair.common(tile, saved_tile) is not None]
                if not pairs:
                    continue
                there = saved_rule.tile_between(unit, saved_tile.start, saved_tile.stop)
                if there.nbytes != saved_tile.nbytes:
                    raise StorageCorrupt(
                        f"states of unit {unit.name} take {saved_tile.nbytes} bytes there, not {there.nbytes}."
                    )
                with self._memory(self._extent(saved_tile.extent).nbytes) as memory:
                    self._read(saved_tile.extent, memory)
                    for pair in pairs:
                        self._move(pair, saved_rule, there, memory, rule, tile, address)

    def _move(
        self, pair: _Pair, saved_rule: Rule, there: Tile, memory: int, rule: Rule, tile: Tile, address: int
    ) -> None:
        """Copy what both tiles hold of one parameter."""
        own, their, numel = pair.common(tile, there) or (0, 0, 0)
        width = self._formats.master
        if width:
            source = tensor_at(memory + saved_rule.master_offset(there, their), numel * width, torch.uint8)
            tensor_at(address + rule.master_offset(tile, own), numel * width, torch.uint8).copy_(source)
        first = max(pair.saved.offset, there.start) + pair.shift
        rule.put_states(tile, address, pair.spec, saved_rule.states(there, memory, pair.saved_spec), first)

    def _read_weights(self, unit: UnitSpec, extents: Sequence[int], address: int) -> None:
        self._read_parts(unit, extents, address, [nbytes for _, nbytes in parts_of(unit, self._formats.weights)])

    def _read_parts(self, unit: UnitSpec, extents: Sequence[int], address: int, sizes: Sequence[int]) -> None:
        """Read extents of these sizes to memory, one after the other."""
        tickets = []
        for index, nbytes in zip(extents, sizes, strict=True):
            extent = self._extent(index)
            if extent.nbytes != nbytes:
                raise StorageCorrupt(f"weights of unit {unit.name} have {extent.nbytes} bytes there, not {nbytes}.")
            tickets.append(self._source.read(extent, address, extent.nbytes))
            address += nbytes
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
