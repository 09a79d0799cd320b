"""Weights and optimizer states of a checkpoint, read without the model's class or an engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from offload.checkpoint.native.description import Description
from offload.checkpoint.native.saved_layout import Source
from offload.checkpoint.native.saved_records import SavedRecords
from offload.checkpoint.native.saved_units import SavedParameter
from offload.checkpoint.tensors import Entry, Place, Tensors
from offload.elements import Elements
from offload.errors import ConfigError
from offload.units import ParameterSpec, UnitSpec
from swapper import StorageCorrupt


class SavedWeights:
    """See the module's docstring. Used in ``with``."""

    def __init__(self, source: Source, description: Description, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called now and then, and may raise to end the work."""
        self.description = description
        self.run = description.run
        self.buffers: dict[str, torch.Tensor] = self.run.get("buffers", {})
        records = SavedRecords(source, description, check=check)
        places = _places(records.units, description)
        self._records = records
        self._elements = Elements(records, records.layout)
        self.tensors = Tensors(self._elements, records.units, places)

    def __enter__(self) -> SavedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.closing(self._records):
            self._elements.__exit__(kind, error, traceback)

    def entries(self, dtype: torch.dtype) -> list[Entry]:
        """All weights, in this dtype, and all buffers."""
        shapes = {place.name: place.shape for place in self.tensors.places.values()}
        weights = [Entry(name, dtype, tuple(shape)) for name, shape in shapes.items()]
        return weights + [Entry(name, value.dtype, tuple(value.shape)) for name, value in self.buffers.items()]

    def check_states(self) -> None:
        """Raise ``ConfigError`` if there are no states that a stranger can read."""
        optimizer, rule = self.description.optimizer, self.tensors.elements.layout.rule
        if optimizer is None or rule is None:
            raise ConfigError("the checkpoint is that of a model that is not trained: it has no optimizer states")
        parts = (tile.parts for unit in self.description.units for tile in unit.tiles)
        if "states" not in rule.identity and not any(parts):
            raise ConfigError(f"how states of {optimizer['optimizer']} lie in the checkpoint is not written there")


def _places(units: Sequence[UnitSpec], description: Description) -> Mapping[ParameterSpec, Place]:
    """Map the elements of each spec to the model's parameters, in which pieces and shards are joined."""
    found: dict[str, list[tuple[SavedParameter, ParameterSpec]]] = {}
    for unit, saved in zip(units, description.units, strict=True):
        for spec, parameter in zip(unit.parameters, saved.parameters, strict=True):
            if parameter.packing is not None:
                raise ConfigError(
                    f"parameter {parameter.name} is quantised, and ordinary numbers are exported. Load the checkpoint "
                    "into an engine over the same model, and save what was trained: engine.save_model(dir) of peft."
                )
            found.setdefault(parameter.whole or parameter.name, []).append((parameter, spec))
    places = {}
    for name, pieces in found.items():
        parts = [part for part in pieces if part[0].numel] or pieces[:1]
        parts.sort(key=lambda part: (part[0].start, part[0].begin))
        first = parts[0][0]
        rows = {part.start: part.model_shape[0] for part, _ in parts if part.whole is not None}
        shape = torch.Size((sum(rows.values()), *first.model_shape[1:]) if rows else first.model_shape)
        reached = 0
        for part, spec in parts:
            places[spec] = Place(name, shape, part.start * math.prod(shape[1:]) + part.begin)
            if places[spec].first != reached:
                raise StorageCorrupt(f"the checkpoint lacks elements from {reached} on of {name}.")
            reached += part.numel
        if reached != math.prod(shape):
            raise StorageCorrupt(f"the checkpoint has {reached} elements of {name}, not {math.prod(shape)}.")
    return places
