"""Description of what a generation holds: the units of the model, and which extents their records are in.

It is the metadata of the generation, beside the state of the run. A checkpoint can be read without the model's class: a
parameter is found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from offload.checkpoint.model_state import first_difference as difference_of_models
from offload.checkpoint.native.base_files import SavedFile, SavedPart, saved_parts
from offload.checkpoint.native.logged_updates import LOGGED_UPDATES, LoggedUpdate, check_logged, logged_as_json
from offload.checkpoint.native.saved_units import SavedParameter, SavedTile, SavedUnit, SavedUnits
from offload.checkpoint.native.whole import check_units
from offload.checkpoint.run_fields import RUN
from offload.dtypes import BY_PRECISION
from offload.encoding import DTYPE, Decoder, Encoded, encode
from offload.errors import ConfigError
from offload.optim.rule import Rule, TilePart
from offload.tiers.home import UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import ParameterSpec, Tile, UnitSpec
from swapper import StorageCorrupt
from swapper.checked import (
    FLAG,
    TEXT,
    Int,
    Kind,
    ListOf,
    OneOf,
    Optional,
    Record,
    Refused,
    Shape,
    Text,
    refusals,
    within,
)
from swapper.manifest import EXTENT_BYTES_MAX, METADATA_BYTES_MAX

_FORMAT = 1
_WITH_LOG = 2
"""Format of a description with logged updates, which older programs would pass over."""

_SAID = {
    "buffers": "buffers and parameters that are no floating-point numbers (in the model) take",
    "objects": "the states of registered objects take",
    "client_state": "client_state takes",
}
"""Parts of the run's state, in words."""


@dataclass(frozen=True)
class Description:
    """``optimizer`` is what ``Rule.identity`` gave, None for a model that is not trained. ``run`` is the state of the
    run, see ``offload.checkpoint.run_state``."""

    precision: str
    optimizer: dict[str, Any] | None
    units: SavedUnits
    run: dict[str, Any] = field(default_factory=dict)
    files: tuple[SavedFile, ...] = ()
    """Files that frozen weights are in."""
    updates: tuple[LoggedUpdate, ...] = ()
    """Updates that came after the records of their units were written, in order."""

    def encode(self) -> bytes:
        """As the metadata of a generation. Raises ``ConfigError`` for a state of the user's that cannot be saved, and
        for one that is too large."""
        number = _WITH_LOG if self.updates else _FORMAT
        content = {"format": number, "precision": self.precision, "optimizer": self.optimizer}
        updates = {"updates": logged_as_json(self.updates)} if self.updates else {}
        files = {"files": [asdict(file) for file in self.files]} if self.files else {}
        encoded = Encoded({**content, **files, "units": self.units.as_json, **updates, "run": self.run}, "the state")
        if encoded.nbytes > METADATA_BYTES_MAX:
            raise ConfigError(self._too_large(encoded.nbytes))
        if not encoded.is_held("run"):
            raise ConfigError(self._too_many())
        return encoded.join()

    def _too_many(self) -> str:
        largest = max(self.run, key=lambda name: len(encode(self.run[name], name)))
        return (
            f"{_SAID.get(largest, largest)} so many small values that a reader would need far more memory than they "
            "take as bytes. Save them as tensors, or in a file of their own. Nothing was written"
        )

    def _too_large(self, nbytes: int) -> str:
        sizes = {name: len(encode(value, name)) for name, value in self.run.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        return (
            f"beside weights and optimizer states a checkpoint holds at most {METADATA_BYTES_MAX:,} bytes, and there "
            f"are {nbytes:,}: {_SAID.get(largest, largest)} alone {sizes[largest]:,}. Save large tensors among them in "
            "a file of their own. Nothing was written"
        )

    @classmethod
    def decode(cls, metadata: bytes, where: str) -> Description:
        """The other way round. Raises ``StorageCorrupt``, and ``ConfigError`` for another version."""
        with refusals(f"the description of {where}", StorageCorrupt):
            decoder, found = Decoder(metadata), {}
            for name in decoder.cursor.members():
                with within(name):
                    if name not in _FIELDS:
                        raise Refused("this program does not know it")
                    kind = _FIELDS[name]
                    found[name] = kind.take(decoder.whole()) if kind is RUN else kind.read(decoder.cursor)
                if name == "format" and found[name] not in (_FORMAT, _WITH_LOG):
                    raise ConfigError(f"{where} has format {found[name]}, this program knows {_FORMAT} and {_WITH_LOG}")
            decoder.end()
            for name in _FIELDS:
                if name not in found and name not in ("files", "updates"):
                    raise Refused("it is not there", name)
            units, files = SavedUnits(found["units"]), tuple(found.get("files", ()))
            updates = tuple(found.get("updates", ()))
            description = cls(found["precision"], found["optimizer"], units, found["run"], files, updates)
            check_units(description)
            with within("updates"):
                check_logged(updates, units, description.optimizer)
            return description

    def first_difference(self, other: Description) -> str | None:
        """In what a run described by ``other`` cannot go on from this one, if in anything."""
        if self.precision != other.precision:
            return f"precision is {self.precision!r} there and {other.precision!r} here"
        difference = _difference_of_optimizers(self.optimizer, other.optimizer)
        if difference is not None:
            return difference
        there, here = self._by_name(), other._by_name()
        lost, new = ([name for name in one if name not in two] for one, two in ((there, here), (here, there)))
        if lost:
            return f"parameter {lost[0]} is there and not in this model"
        if new:
            return f"parameter {new[0]} is in this model and not there"
        for name, (unit, parameter) in there.items():
            own_unit, own = here[name]
            if parameter.model_shape != own.model_shape:
                return f"parameter {name} has shape {parameter.model_shape} there and {own.model_shape} here"
            if parameter.packing != own.packing:
                return f"parameter {name} is {_packed(parameter)} there and {_packed(own)} here"
            if parameter.trainable != own.trainable:
                trained = "trained" if parameter.trainable else "frozen"
                return f"parameter {name} is {trained} there and {'trained' if own.trainable else 'frozen'} here"
            in_shards = parameter.flat_of is not None or own.flat_of is not None
            if unit.name != own_unit.name or (parameter.offset != own.offset and not in_shards):
                return f"parameter {name} is in unit {unit.name} there and in {own_unit.name} here"
        return difference_of_models(self.run, other.run)

    def _by_name(self) -> dict[str, tuple[SavedUnit, SavedParameter]]:
        return {parameter.name: (unit, parameter) for unit in self.units for parameter in unit.parameters}


def describe_units(
    units: Sequence[UnitSpec],
    homes: Sequence[UnitHomes],
    records: Sequence[RecordExtents],
    rule: Rule | None,
    files: Sequence[SavedFile],
    width: int,
) -> SavedUnits:
    """The units of a generation whose records are in these extents, with frozen weights in these ``files``; weights
    have ``width`` bytes an element."""
    saved = []
    for unit, of_unit, extents in zip(units, homes, records, strict=True):
        tiles = zip(of_unit.tiles, extents.tiles, strict=True)
        saved.append(
            SavedUnit(
                unit.name,
                unit.numel,
                unit.trainable_numel,
                tuple(_parameter(spec) for spec in unit.parameters),
                tuple(extent.index for extent in extents.weights),
                tuple(_tile(item.tile, extent.index, rule) for item, extent in tiles),
                None if extents.gradients is None else extents.gradients.index,
                saved_parts(unit, of_unit.weights, files, width),
            )
        )
    return SavedUnits(saved)


def _parameter(spec: ParameterSpec) -> SavedParameter:
    packing = None if spec.packing is None else str(spec.packing)
    saved = SavedParameter(spec.name, tuple(spec.shape), spec.offset, spec.trainable, packing=packing)
    if spec.whole is not None:
        saved = replace(saved, begin=spec.start, flat_of=tuple(spec.whole_shape))
    return saved if spec.piece is None else replace(saved, whole=spec.piece.whole.name, start=spec.piece.start)


def _packed(parameter: SavedParameter) -> str:
    return "not quantised" if parameter.packing is None else f"quantised as {parameter.packing}"


def _tile(tile: Tile, extent: int, rule: Rule | None) -> SavedTile:
    parts = () if rule is None else tuple(rule.parts(tile))
    return SavedTile(tile.start, tile.stop, tile.nbytes, extent, parts)


def _difference_of_optimizers(there: dict[str, Any] | None, here: dict[str, Any] | None) -> str | None:
    if there is None or here is None:  # only the weights are looked at
        return None
    for name in here:
        if name not in ("moments", "master") and there.get(name) != here[name]:
            return f"{name} is {there.get(name)!r} there and {here[name]!r} here"
    return None


_INDEX = Int(0, 1 << 32)
_PARAMETER = Record(
    SavedParameter,
    {"name": Text(not_="__metadata__"), "shape": Shape(), "offset": Int(), "trainable": FLAG},
    {
        **{"whole": Optional(Text(not_="__metadata__")), "start": Int(), "packing": Optional(TEXT)},
        **{"begin": Int(), "flat_of": Optional(Shape())},
    },
)
"""The name that it cannot have is another thing's in a file of weights."""
_PART = Record(TilePart, {"parameter": TEXT, "state": TEXT, "offset": Int(), "shape": Shape(), "dtype": DTYPE})
_TILE = Record(
    SavedTile,
    {"start": Int(), "stop": Int(), "nbytes": Int(0, EXTENT_BYTES_MAX), "extent": _INDEX},
    {"parts": ListOf(_PART)},
    in_parts=True,
)
_CHECKSUM = Int(0, (1 << 64) - 1)
_SAVED_PART = Record(
    SavedPart,
    {"file": _INDEX, "start": Int(), "nbytes": Int(), "offset": Int(), "checksum": Optional(_CHECKSUM)},
)
_UNITS = ListOf(
    Record(
        SavedUnit,
        {
            **{"name": TEXT, "numel": Int(), "trainable_numel": Int(), "parameters": ListOf(_PARAMETER)},
            **{"weights": ListOf(_INDEX, 2), "tiles": ListOf(_TILE), "gradients": Optional(_INDEX)},
        },
        {"in_files": ListOf(_SAVED_PART)},
        in_parts=True,
    )
)
_OPTIMIZER: Kind[dict[str, Any]] = Record(
    dict,
    {"optimizer": TEXT, "moments": TEXT},
    {"states": ListOf(TEXT, make=list), "master": OneOf({"bf16": "bf16"})},
)
_FIELDS: dict[str, Kind[Any]] = {
    "format": Int(),
    "precision": OneOf({name: name for name in BY_PRECISION}),
    "optimizer": Optional(_OPTIMIZER),
    "files": ListOf(Record(SavedFile, {"path": TEXT, "nbytes": Int(), "header": _CHECKSUM})),
    "units": _UNITS,
    "updates": LOGGED_UPDATES,
    "run": RUN,
}


def parts_of(unit: UnitSpec, width: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of what is trained and what is frozen of a unit's weights, as far as they are stored; ``width``
    bytes an element."""
    if unit.trainable_numel:
        yield 0, unit.trainable_numel * width
    if unit.stored_numel > unit.trainable_numel:
        yield unit.trainable_numel * width, (unit.stored_numel - unit.trainable_numel) * width
