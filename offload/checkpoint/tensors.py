"""The tensors of a model as exports take them: whose elements lie in which units, a few MiB at a time.

A source gives portions, a sink (safetensors, ``torch.distributed.checkpoint``) reads each in parts, in any memory of
its own. Memory: as ``offload.elements.Elements``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from offload.dtypes import BY_PRECISION
from offload.elements import PART_NUMEL, Elements, Span
from offload.memory import passing_tensor
from offload.optim.moments import scale_name
from offload.option_values import as_choice
from offload.units import ParameterSpec, UnitSpec


class Entry(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """Elements of a tensor from ``start`` on, flat. ``values`` may be memory that is used again for the next part."""

    name: str
    start: int
    values: torch.Tensor


class Place(NamedTuple):
    """Of which parameter of the model a spec has elements: its name and shape there, and the first of them."""

    name: str
    shape: torch.Size
    first: int


@dataclass(frozen=True)
class Portion:
    """The flat elements ``[start, stop)`` of a parameter, or of its ``state`` of this name, whose dtype and whole shape
    ``entry`` has.

    ``read(first, target)`` fills ``target``, flat and of that dtype, with those from ``first`` on.
    """

    entry: Entry
    state: str
    start: int
    stop: int
    read: Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Tensors:
    """Weights and optimizer states of units, as parts of the model's parameters: of those that have a place."""

    elements: Elements
    units: Sequence[UnitSpec]
    places: Mapping[ParameterSpec, Place]

    def portions(
        self, dtype_of: Callable[[ParameterSpec], torch.dtype], states_of: Collection[str] = ()
    ) -> Iterator[Portion]:
        """All weights in these dtypes, unit by unit and tile by tile, and the states of specs with these names."""
        layout = self.elements.layout
        for unit in self.units:
            specs = [spec for spec in unit.parameters if spec in self.places]
            tiled = bool(states_of) or any(layout.has_master(spec, dtype_of(spec)) for spec in specs)
            for span in self.elements.spans(unit, specs, tiled=tiled):
                place = self.places[span.spec]
                entry = Entry(place.name, dtype_of(span.spec), tuple(place.shape))
                start = place.first + span.first
                yield Portion(entry, "", start, start + span.numel, partial(self._read, span, place.first))
                if span.spec.name in states_of and span.tile is not None:
                    yield from self._states(span, place)

    def _read(self, span: Span, origin: int, first: int, target: torch.Tensor) -> None:
        self.elements.read(span, first - origin, target)

    def _states(self, span: Span, place: Place) -> Iterator[Portion]:
        rule, tile = self.elements.layout.rule, span.tile
        assert rule is not None and tile is not None
        of_moments = torch.bfloat16 if rule.identity["moments"] == "bf16" else torch.float32  # codes become numbers
        own = tuple(span.spec.shape)
        states = [(name, of_moments, own) for name in rule.identity.get("states", ())]
        parts = [part for part in rule.parts(tile.tile) if part.parameter == span.spec.name and part.state]
        in_codes = {part.state for part in parts if part.dtype == torch.uint8}
        for part in parts:
            if part.state not in {scale_name(name) for name in in_codes}:
                states.append((part.state, torch.float32 if part.state in in_codes else part.dtype, part.shape))
        for name, dtype, shape in states:
            per_element = shape == own  # else the tile has all of it
            start = place.first + span.first if per_element else 0
            stop = start + (span.numel if per_element else math.prod(shape))
            entry = Entry(place.name, dtype, tuple(place.shape) if per_element else shape)
            yield Portion(entry, name, start, stop, partial(self._read_state, span, name, start))

    def _read_state(self, span: Span, name: str, origin: int, first: int, target: torch.Tensor) -> None:
        self.elements.read_state(span, name, first - origin, target)


def parts_of(portions: Iterable[Portion], dtype: torch.dtype) -> Generator[Part, None, None]:
    """All of the portions, in the same memory, one after the other."""
    buffer = passing_tensor(PART_NUMEL * dtype.itemsize).view(dtype)
    for portion in portions:
        for start in range(portion.start, portion.stop, PART_NUMEL):
            values = buffer[: min(PART_NUMEL, portion.stop - start)]
            portion.read(start, values)
            yield Part(portion.entry.name, start, values)


def as_dtype(dtype: str) -> torch.dtype:
    """Raises ``ConfigError`` for another name than those of ``precision``."""
    return BY_PRECISION[as_choice("dtype", dtype, tuple(BY_PRECISION))]
