"""A description that is whole: each element of each parameter is in one place, and each place in a record of its size.

What is checked here holds for whatever is read afterwards: nothing is read or written beyond a record, and no element
is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.checkpoint.native.saved_units import SavedParameter, SavedTile, SavedUnit
from offload.dtypes import BY_PRECISION
from offload.encoding import DTYPE
from offload.optim.formats import master_bytes
from offload.plan.update_log import in_parts
from offload.units import ALIGNMENT, GRAIN
from swapper import Extent, align
from swapper.checked import Refused, within


class Described(Protocol):
    """A description."""

    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> Mapping[str, Any] | None: ...
    @property
    def units(self) -> Sequence[SavedUnit]: ...
    @property
    def files(self) -> Sequence[Any]: ...
    @property
    def run(self) -> Mapping[str, Any]: ...
    @property
    def updates(self) -> Sequence[LoggedUpdate]: ...


class Held(Protocol):
    """A generation, as far as its extents go."""

    @property
    def extents(self) -> Sequence[Extent]: ...
    def holds(self, extent: Extent) -> bool: ...


def check_units(description: Described) -> None:
    """Raise ``Refused`` unless parameters and tiles lie in each unit, one after the other, and tiles leave out none of
    the elements that are trained."""
    names, parameters = set(), set()
    dtype, optimizer = BY_PRECISION[description.precision], description.optimizer
    for index, unit in enumerate(description.units):
        with within("units"), within(index):
            if unit.name in names:
                raise Refused("two units have this name", "name")
            names.add(unit.name)
            if unit.trainable_numel > unit.numel or unit.numel % GRAIN or unit.trainable_numel % GRAIN:
                raise Refused(f"{unit.trainable_numel} of {unit.numel} elements cannot be trained")
            for parameter in unit.parameters:
                if parameter.name in parameters:
                    raise Refused(f"parameter {parameter.name} is there twice")
                parameters.add(parameter.name)
            _check_parameters(unit)
            _check_files(unit, dtype.itemsize, len(description.files))
            if optimizer is None and unit.tiles:
                raise Refused("there are tiles, and nothing is trained", "tiles")
            if optimizer is not None:
                _check_tiles(unit, master_bytes(description.precision, optimizer))


def _check_parameters(unit: SavedUnit) -> None:
    end, frozen_end = 0, unit.trainable_numel
    for index, parameter in enumerate(unit.parameters):
        with within("parameters"), within(index):
            if parameter.packing is not None and (parameter.trainable or parameter.flat_of is not None):
                raise Refused("what is quantised is neither trained nor in shards")
            numel = 0 if parameter.packing is not None else parameter.numel
            first, last = (0, unit.trainable_numel) if parameter.trainable else (unit.trainable_numel, unit.numel)
            if numel == 0:
                if not first <= parameter.offset <= last:
                    raise Refused(f"{parameter.offset} is not between {first} and {last}", "offset")
                continue
            least = end if parameter.trainable else frozen_end
            if not least <= parameter.offset <= last - numel or parameter.offset % ALIGNMENT:
                raise Refused(f"{parameter.offset} is not between {least} and {last - numel}", "offset")
            if parameter.trainable:
                end = parameter.offset + numel
            else:
                frozen_end = parameter.offset + numel


def _check_files(unit: SavedUnit, width: int, num_files: int) -> None:
    """Parts of files lie in what is frozen of the unit, one after the other, and leave out nothing of a parameter."""
    end, covered = unit.trainable_numel * width, 0
    for index, part in enumerate(unit.in_files):
        with within("in_files"), within(index):
            if part.file >= num_files:
                raise Refused(f"{part.file} is none of {num_files} files", "file")
            if not end <= part.offset <= unit.numel * width - part.nbytes:
                raise Refused(f"{part.offset} is not between {end} and {unit.numel * width - part.nbytes}", "offset")
            end = part.offset + part.nbytes
            covered += part.nbytes
    frozen = sum(p.numel for p in unit.parameters if not p.trainable) * width
    is_quantised = any(p.packing is not None for p in unit.parameters)  # how many bytes these have is not said
    if unit.in_files and covered != frozen and not is_quantised:
        raise Refused(f"{covered} of {frozen} bytes are in files", "in_files")


def _check_tiles(unit: SavedUnit, master_bytes: int) -> None:
    end, index = 0, 0
    for index, tile in enumerate(unit.tiles):
        with within("tiles"), within(index):
            if tile.start != end or not tile.start < tile.stop <= unit.trainable_numel or tile.start % ALIGNMENT:
                raise Refused(f"[{tile.start}, {tile.stop}) is not what follows {end}")
            end = tile.stop
            if tile.parts:
                _check_parts(unit, tile, master_bytes)
    if end != unit.trainable_numel:
        raise Refused(f"elements from {end} to {unit.trainable_numel} are in none", "tiles")


def _check_parts(unit: SavedUnit, tile: SavedTile, master_bytes: int) -> None:
    """Parts lie in the tile, one after the other, and no master of the tile's elements is missing."""
    specs = {p.name: p for p in unit.parameters if p.trainable}
    seen: dict[str, set[str]] = {}
    end = 0
    for part in sorted(tile.parts, key=lambda part: part.offset):
        nbytes = math.prod(part.shape) * part.dtype.itemsize
        spec = specs.get(part.parameter)
        if spec is None or not tile.start <= spec.offset < tile.stop + (spec.numel == 0):
            raise Refused(f"{part.parameter} is no trained parameter of the tile", "parts")
        if part.state in seen.setdefault(part.parameter, set()):
            raise Refused(f"{part.parameter} has a part {part.state!r} twice", "parts")
        seen[part.parameter].add(part.state)
        if part.offset < end or part.offset + nbytes > tile.nbytes or part.offset % part.dtype.itemsize:
            raise Refused(f"[{part.offset}, {part.offset + nbytes}) is not within [{end}, {tile.nbytes})", "parts")
        end = part.offset + nbytes
        if not part.state and (math.prod(part.shape) != spec.numel or part.dtype.itemsize != master_bytes):
            raise Refused(f"the master of {part.parameter} has {nbytes} bytes", "parts")
    for spec in specs.values() if master_bytes else ():
        if spec.numel and tile.start <= spec.offset < tile.stop and "" not in seen.get(spec.name, ()):
            raise Refused(f"the master of {spec.name} is in none", "parts")


def check_records(description: Described, source: Held) -> None:
    """Raise ``Refused`` unless each record is in extents of its size that the generation holds, which no other record
    has."""
    extents, taken = source.extents, set()
    width = BY_PRECISION[description.precision].itemsize
    gradient_width = DTYPE.take(description.run["gradient_dtype"]).itemsize
    accumulated: Mapping[str, Any] = description.run["gradients"]

    def check(index: int, nbytes: int) -> None:
        if index >= len(extents):
            raise Refused(f"{index} is none of the {len(extents)} extents that are there")
        extent = extents[index]
        if index in taken:
            raise Refused(f"extent {index} is that of another record, too")
        taken.add(index)
        if not source.holds(extent):
            raise Refused(f"extent {index} is no part of the generation")
        if extent.nbytes != align(nbytes):
            raise Refused(f"extent {index} has {extent.nbytes} bytes, and the record {nbytes}")

    tiles = {unit.name: unit.tiles for unit in description.units}
    for number, update in enumerate(description.updates):
        with within("updates"), within(number):
            for index, part in zip(update.gradients, in_parts(tiles[update.unit], update.num_tiles), strict=True):
                check(index, (part[-1].stop - part[0].start) * gradient_width)
    for unit in description.units:
        with within(unit.name):
            parts = [numel for numel in (unit.trainable_numel, unit.stored_numel - unit.trainable_numel) if numel]
            if len(parts) != len(unit.weights):
                raise Refused(f"there are {len(unit.weights)} extents of weights, not {len(parts)}")
            for number, numel in zip(unit.weights, parts, strict=True):
                with within("weights"):
                    check(number, numel * width)
            for index, tile in enumerate(unit.tiles):
                with within("tiles"), within(index):
                    check(tile.extent, tile.nbytes)
            with within("gradients"):
                if unit.gradients is not None and unit.gradients >= len(extents):
                    raise Refused(f"{unit.gradients} is none of the {len(extents)} extents that are there")
                if any(parameter.name in accumulated for parameter in unit.parameters):
                    if unit.gradients is None or any(p.name in accumulated for p in unit.parameters if not p.trainable):
                        raise Refused("they are in no extent")
                    check(unit.gradients, unit.trainable_numel * gradient_width)


def check_coverage(units: Iterable[SavedUnit]) -> None:
    """Raise ``Refused`` for a parameter of which elements are missing, or in places that differ: replicas have saved
    the same."""
    found: dict[str, list[SavedParameter]] = {}
    for unit in units:
        for parameter in unit.parameters:
            found.setdefault(parameter.name, []).append(parameter)
    for name, shards in found.items():
        with within(name):
            first, reached = shards[0], 0
            if any(_is_of(shard) != _is_of(first) for shard in shards):
                raise Refused("its shards are those of different parameters")
            for begin, numel in sorted({(shard.begin, shard.numel) for shard in shards if shard.numel}):
                if begin != reached:
                    raise Refused(f"elements from {reached} on are missing, or in parts that overlap")
                reached += numel
            if reached != math.prod(first.model_shape):
                raise Refused(f"{reached} of {math.prod(first.model_shape)} elements are there")


def _is_of(shard: SavedParameter) -> tuple[Any, ...]:
    """Equal for shards of one parameter."""
    return shard.model_shape, shard.flat_of is None, shard.trainable, shard.start, shard.packing
