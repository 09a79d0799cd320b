"""Loading: a saved generation goes into the tiers of an engine, whose budgets, tiles and ranks may be others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offload.access import ExternalAccess
from offload.checkpoint.native.base_files import SavedPart
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.saved_layout import Source
from offload.checkpoint.native.saved_records import SavedHome, SavedRecords
from offload.elements import Elements, Loan, Records, Span, first_states
from offload.errors import ConfigError
from offload.optim.moments import scale_name
from offload.optim.rule import TilePart
from offload.tiers.gradients.store import Gradient
from offload.tiers.home import TileHomes
from offload.tiers.store import RecordExtents
from offload.units import Tile, UnitSpec


def _lies_alike(unit: UnitSpec, saved: UnitSpec) -> bool:
    """The saved unit has the same elements at the same places."""
    if (unit.name, unit.numel, unit.trainable_numel) != (saved.name, saved.numel, saved.trainable_numel):
        return False
    here, there = ({s.name: (s.offset, s.start, s.shape) for s in of.parameters} for of in (unit, saved))
    return here == there


class Loading:
    """Brings the records of a generation to the homes of an engine. The description has been compared with it."""

    def __init__(
        self, source: Source, description: Description, units: Sequence[UnitSpec], access: ExternalAccess
    ) -> None:
        self._description = description
        self._units = {unit.name: unit for unit in units}
        self._access = access
        self._same: dict[Tile, SavedHome] = {}
        """Tiles of the unit at hand whose saved bytes are theirs as they are."""
        self._saved = SavedRecords(source, description, parts_of=self._parts_of, own=units)
        for unit in units:
            self._check(unit)

    def close(self) -> None:
        """Nothing more is read."""
        self._saved.close()

    def _check(self, unit: UnitSpec) -> None:
        """Raise ``ConfigError`` where the unit's bytes would have to be converted, and cannot be."""
        if self._alike(unit) is None and any(spec.packing is not None for spec in unit.parameters):
            raise ConfigError(f"unit {unit.name} has quantised weights, and lies otherwise there. Nothing has changed")
        self._check_files(unit)
        for saved in self._description.units if self._access.layout.rule is not None else ():
            for tile in saved.tiles if saved.name == unit.name else ():
                there = self._kinds(tile.parts)
                own = self._kinds(self._parts_of(unit.name, tile.start, tile.stop)) if there else {}
                for (parameter, state), kind in own.items():
                    if there.get((parameter, state)) != kind:
                        what = f"state {state}" if state else "the master"
                        raise ConfigError(f"{what} of {parameter} is another one there. Nothing has changed")

    def _kinds(self, parts: Sequence[TilePart]) -> dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype | None]]:
        """Shapes and dtypes of a tile's parts by parameter and state, as far as the states that are here need them:
        those in another format of moments, and masters in another one, come over."""
        there, rule = self._description.optimizer, self._access.layout.rule
        if there is None or rule is None:
            return {(part.parameter, part.state): (part.shape, part.dtype) for part in parts}
        if there.get("master") != rule.identity.get("master"):
            parts = [part for part in parts if part.state]
        if there["moments"] == rule.identity["moments"]:
            return {(part.parameter, part.state): (part.shape, part.dtype) for part in parts}
        scales = {scale_name(part.state) for part in parts}
        numbers = (part for part in parts if part.state not in scales)
        return {(part.parameter, part.state): (part.shape, None if part.state else part.dtype) for part in numbers}

    def _check_files(self, unit: UnitSpec) -> None:
        """Raise ``ConfigError`` if frozen weights were read in place from other files, or from some that are gone."""
        base = self._saved.base
        for saved in self._description.units:
            if saved.name != unit.name or not saved.in_files:
                continue
            alike = self._alike(unit) is not None
            if alike and unit.in_files and not base.same(saved.in_files, unit.in_files):
                names = {self._description.files[part.file].path for part in saved.in_files}
                own = {str(part.file.path) for part in unit.in_files}
                raise ConfigError(
                    f"frozen weights of unit {unit.name} were read in place from {', '.join(sorted(names))}, and "
                    f"weights= has other files ({', '.join(sorted(own))}): names, sizes and headers must be the same. "
                    "Nothing has changed"
                )
            if not (alike and unit.in_files):
                for part in saved.in_files:
                    base.open(part.file)

    def _files_to_read(self, unit: UnitSpec, saved: UnitSpec) -> Sequence[SavedPart]:
        """The saved parts in files that are to be read; those that the unit has where they are must be the same."""
        parts, home = self._description.units[saved.index].in_files, self._access.homes[unit.index].weights.stored
        if home is None or not unit.in_files or not parts:
            return parts
        home.expect([part.checksum for part in parts])
        return ()

    def copy(self) -> None:
        """Copy weights and states of all units. What was there before is lost, also if this raises."""
        access = self._access
        is_trained = self._description.optimizer is not None  # else the states that are here stay
        with access.new_elements(self._begin) if is_trained else access.elements_to_change() as here:
            for unit in self._units.values():
                self._copy_unit(unit, here)

    def take_residents(self, records: Sequence[RecordExtents]) -> None:
        """The generation is in the engine's own store: bring in what rests in memory. The rest is where it belongs."""
        for unit, extents in zip(self._units.values(), records, strict=True):
            homes, alike = self._access.homes[unit.index], self._alike(unit)
            in_files = () if alike is None else self._files_to_read(unit, alike)
            if homes.weights.stored is None:
                with self._access.weights_to_change(unit) as address:
                    self._saved.home(*(extent.index for extent in extents.weights)).read(address)
                    self._saved.base.verify(in_files, address)
            for tile, extent in zip(homes.tiles, extents.tiles, strict=True):
                if tile.states.stored is None:
                    with tile.states.replace() as address:
                        self._saved.home(extent.index).read(address)

    def take_gradients(self, known: dict[str, list[float]]) -> None:
        """Bring in the gradients that were accumulated, and what is ``known`` of them, by parameter. The generation has
        them as they lie here: see ``can_take_gradients``."""
        for unit in self._units.values():
            of_unit = {s: Gradient(*known[s.name]) for s in unit.parameters if s.name in known}
            alike = self._alike(unit)
            index = None if alike is None else self._description.units[alike.index].gradients
            if of_unit and index is not None:
                with self._saved.lend(index) as address:
                    dtype = self._description.run["gradient_dtype"]
                    self._access.gradients.restore(unit, of_unit, address, dtype)

    def can_take_gradients(self) -> bool:
        """Each unit is there as it is here: it was saved by as many ranks."""
        return all(self._alike(unit) is not None for unit in self._units.values())

    def _alike(self, unit: UnitSpec) -> UnitSpec | None:
        return next((saved for saved in self._saved.units if _lies_alike(unit, saved)), None)

    def _copy_unit(self, unit: UnitSpec, here: Elements) -> None:
        """Put it together from the unit that was saved, or from the shards of it that ranks have saved."""
        saved, alike = [there for there in self._saved.units if there.name == unit.name], self._alike(unit)
        records: Records = self._saved
        if alike is not None:
            self._saved.weights(alike, self._files_to_read(unit, alike)).read(here.weights(unit))
            saved, records = [alike], _InPlace(self._saved, here.weights(unit))
        self._same = self._same_tiles(unit, alike)
        with Elements(records, self._saved.layout) as there:
            found: dict[str, list[Span]] = {spec.name: [] for spec in unit.parameters}
            for part in saved:
                for other in there.spans(part):
                    found[other.spec.name].append(other)
            for span in here.spans(unit):
                if span.tile is None or span.tile.tile not in self._same:
                    for other in found[span.spec.name]:
                        self._copy_span(span.common(other), here, other, there, in_place=alike is not None)

    def _copy_span(self, span: Span, here: Elements, other: Span, there: Elements, *, in_place: bool) -> None:
        """``in_place``: the weights have come."""
        layout = self._access.layout
        if span.numel <= 0:
            return
        if not in_place or (span.tile is not None and layout.has_master(span.spec, torch.float32)):
            here.write(span, partial(self._read, there, other, span.spec.start - other.spec.start))
        if span.tile is not None and other.tile is not None and layout.rule is not None:
            first = span.spec.offset - span.spec.start + other.spec.start + other.first
            address = here.states_at(span.tile)
            layout.rule.put_states(span.tile.tile, address, span.spec, there.states(other), first)

    def _read(self, there: Elements, other: Span, shift: int, first: int, target: torch.Tensor) -> None:
        there.read(other, first + shift, target)

    def _same_tiles(self, unit: UnitSpec, alike: UnitSpec | None) -> dict[Tile, SavedHome]:
        there, rule = self._description.optimizer, self._access.layout.rule
        if alike is None or there is None or rule is None or there["moments"] != rule.identity["moments"]:
            return {}
        extents = {(t.start, t.stop, t.nbytes): t.extent for t in self._description.units[alike.index].tiles}
        own = (homes.tile for homes in self._access.homes[unit.index].tiles)
        found = {tile: extents.get((tile.start, tile.stop, tile.nbytes)) for tile in own}
        return {tile: self._saved.home(extent) for tile, extent in found.items() if extent is not None}

    def _begin(self, tile: TileHomes, address: int) -> None:
        """A new tile has what was saved, or what is there before the first step."""
        if tile.tile in self._same:
            self._same[tile.tile].read(address)
        else:
            first_states(self._access.layout)(tile, address)

    def _parts_of(self, unit: str, start: int, stop: int) -> Sequence[TilePart]:
        rule = self._access.layout.rule
        return () if rule is None else rule.parts(rule.tile_between(self._units[unit], start, stop))


@dataclass(frozen=True)
class _InPlace:
    """Saved records of a unit whose weights have been brought to where they are to be."""

    saved: SavedRecords
    address: int

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        return self.saved.tiles(unit)

    def lend_weights(self, unit: UnitSpec) -> Loan:
        return contextlib.nullcontext(self.address)

    def lend_tile(self, tile: TileHomes) -> Loan:
        return self.saved.lend_tile(tile)
