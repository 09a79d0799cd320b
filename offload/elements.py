"""Elements of parameters in records: the one walk over them.

A unit's records are flat: weights and their fp32 masters by element, optimizer states tile by tile. ``Elements`` walks
them by parameter and tile; state dicts, a model's first values, exports and all kinds of checkpoints read and write by
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch

from offload.memory import passing_tensor, tensor_at
from offload.optim.formats import Formats
from offload.optim.moments import copy_moments, is_in_codes, read_moments
from offload.optim.rule import Rule, TileLayout
from offload.tiers.home import TileHomes
from offload.units import ParameterSpec, UnitSpec

PART_NUMEL = 1 << 20
"""Elements that are read, converted or written in one go."""

_Record = TypeVar("_Record")
_Tiles = TypeVar("_Tiles", bound=TileLayout, covariant=True)

Loan = contextlib.AbstractContextManager[int]
"""A record in host memory, at this address while it lasts."""

Source = Callable[[int, torch.Tensor], None]
"""Fills a flat tensor with elements of a parameter, from this one on, cast to its dtype."""


Begin = Callable[[TileHomes, int], None]
"""Writes what a tile that is made anew has at first, to memory at this address."""


def source_of(value: torch.Tensor) -> Source:
    """The source of a flat value, on any device."""

    def fill(first: int, target: torch.Tensor) -> None:
        for start in range(0, target.numel(), PART_NUMEL):
            part = target[start : start + PART_NUMEL]
            part.copy_(value[first + start : first + start + part.numel()].float())

    return fill


@dataclass(frozen=True)
class Layout(Generic[_Tiles]):
    """Layout of elements in records: bytes of each kind, the ``dtype`` of weights, and the rule by which tiles are laid
    out, where something is trained."""

    formats: Formats
    dtype: torch.dtype
    rule: _Tiles | None

    def has_master(self, spec: ParameterSpec, dtype: torch.dtype) -> bool:
        """Values in ``dtype`` are those of the fp32 masters, cast. In the dtype of weights they are the weights."""
        return spec.trainable and self.rule is not None and bool(self.formats.master) and dtype != self.dtype


def first_states(layout: Layout[Rule]) -> Begin:
    """The states from before the first step."""

    def begin(tile: TileHomes, address: int) -> None:
        assert layout.rule is not None
        layout.rule.begin(tile.tile, address)

    return begin


class Records(Protocol):
    """Lends the records of units: where they rest, as copies, or as memory that is to become them."""

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        """The unit's tiles, in order."""

    def lend_weights(self, unit: UnitSpec) -> Loan: ...
    def lend_tile(self, tile: TileHomes) -> Loan: ...


@dataclass(frozen=True, eq=False)
class Span:
    """Elements ``[start, stop)`` of a unit: of one parameter what a tile has, or all of it where ``tile`` is None."""

    unit: UnitSpec
    spec: ParameterSpec
    tile: TileHomes | None
    start: int
    stop: int

    @classmethod
    def of(cls, unit: UnitSpec, spec: ParameterSpec, tile: TileHomes | None = None) -> Span:
        """All of them. There are none if ``numel`` is not above 0."""
        start, stop = spec.offset, spec.offset + spec.numel
        if tile is not None:
            start, stop = max(start, tile.tile.start), min(stop, tile.tile.stop)
        return cls(unit, spec, tile, start, stop)

    def common(self, other: Span) -> Span:
        """Those elements that ``other`` has, too, a span of the same parameter in another layout."""
        shift = self.spec.offset - self.spec.start - other.spec.offset + other.spec.start
        return replace(self, start=max(self.start, other.start + shift), stop=min(self.stop, other.stop + shift))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def first(self) -> int:
        """The parameter's element with which it begins."""
        return self.start - self.spec.offset


class Elements:
    """The elements of parameters. Used in ``with``, which gives back what was borrowed.

    The weights of a unit and a tile stay borrowed until others are needed: in the order of ``spans`` each record comes
    once. Memory: these two where they cannot be used in place, and a few MiB.
    """

    def __init__(self, records: Records, layout: Layout[TileLayout]) -> None:
        self.layout = layout
        self._records = records
        self._weights = _Borrowed[UnitSpec](records.lend_weights)
        self._tile = _Borrowed[TileHomes](records.lend_tile)
        self._masters = torch.empty(0)
        """Memory for those on their way to or from another dtype."""

    def __enter__(self) -> Elements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending = contextlib.ExitStack()
        ending.push(self._weights.__exit__)
        ending.push(self._tile.__exit__)
        ending.__exit__(kind, error, traceback)

    def spans(
        self, unit: UnitSpec, specs: Collection[ParameterSpec] | None = None, *, tiled: bool = True
    ) -> Iterator[Span]:
        """All elements of the unit's parameters, or of some of these: what is not trained, and then, tile by tile, what
        is. Not ``tiled``: each parameter at once, for those who need its weights alone."""
        wanted = [spec for spec in unit.parameters if specs is None or spec in specs]
        in_tiles = dict.fromkeys(s for s in wanted if tiled and self.layout.rule and s.trainable and s.numel)
        yield from (Span.of(unit, spec) for spec in wanted if spec not in in_tiles)
        for tile in self.tiles(unit) if tiled else ():
            yield from (span for spec in in_tiles if (span := Span.of(unit, spec, tile)).numel > 0)

    def tiles(self, unit: UnitSpec) -> Iterator[TileHomes]:
        """The unit's tiles, in order."""
        yield from self._records.tiles(unit)

    def read(self, span: Span, first: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat, with the parameter's elements from ``first`` on, all in the span, cast to its
        dtype."""
        formats, start = self.layout.formats, span.spec.offset + first
        weights = self.weights(span.unit) + start * formats.weights
        if span.tile is None or not self.layout.has_master(span.spec, target.dtype):
            target.copy_(tensor_at(weights, target.numel(), self.layout.dtype))
            return
        masters = self._master(span.tile, start)
        for begin in range(0, target.numel(), PART_NUMEL):
            part = target[begin : begin + PART_NUMEL]
            values = part if part.dtype == torch.float32 else self._passing(part.numel())
            formats.copy_master(values, weights + begin * formats.weights, masters + begin * formats.master)
            if values is not part:
                part.copy_(values)

    def write(self, span: Span, source: Source) -> None:
        """Make the span's elements what the source gives: fp32 masters, and weights what these are rounded to; weights
        alone where there are no masters."""
        formats = self.layout.formats
        weights = self.weights(span.unit) + span.start * formats.weights
        if span.tile is None or not self.layout.has_master(span.spec, torch.float32):
            source(span.first, tensor_at(weights, span.numel, self.layout.dtype))
            return
        masters = self._master(span.tile, span.start)
        for begin in range(0, span.numel, PART_NUMEL):
            part = self._passing(min(PART_NUMEL, span.numel - begin))
            source(span.first + begin, part)
            at = weights + begin * formats.weights, masters + begin * formats.master
            formats.put_master(part, *at, num_threads=torch.get_num_threads())

    def states(self, span: Span) -> dict[str, torch.Tensor]:
        """The parameter's states in the span's tile, over its memory, by name: see ``TileLayout.states``."""
        if span.tile is None or self.layout.rule is None:
            return {}
        return self.layout.rule.states(span.tile.tile, self.states_at(span.tile), span.spec)

    def read_state(self, span: Span, name: str, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat, with a state's numbers, from element ``start`` of the tile's part of it on."""
        target.copy_(read_moments(name, self.states(span), start, start + target.numel()))

    def write_state(self, span: Span, name: str, source: Source) -> None:
        """Make what the tile has of a state the numbers that the source gives, from element 0 of that on."""
        views = self.states(span)
        if not is_in_codes(name, views):
            source(0, views[name])
            return
        for start in range(0, span.numel, PART_NUMEL):
            numbers = self._passing(min(PART_NUMEL, span.numel - start))
            source(start, numbers)
            copy_moments(name, views, start, {name: numbers}, 0, numbers.numel())

    def weights(self, unit: UnitSpec) -> int:
        """The address of the unit's weights, borrowed. A tile of another unit is given back."""
        if self._weights.what is not unit:
            self._tile.give_back()
        return self._weights.borrow(unit)

    def states_at(self, tile: TileHomes) -> int:
        """The address of a tile, borrowed."""
        return self._tile.borrow(tile)

    def _master(self, tile: TileHomes, element: int) -> int:
        assert self.layout.rule is not None
        return self.states_at(tile) + self.layout.rule.master_offset(tile.tile, element)

    def _passing(self, numel: int) -> torch.Tensor:
        if self._masters.numel() < numel:
            self._masters = passing_tensor(numel * 4).view(torch.float32)
        return self._masters[:numel]


class NewElements(Elements):
    """The elements of records that are made anew. In ``spans`` each tile begins, also one that has padding alone."""

    def __init__(self, records: Records, layout: Layout[Rule], begin: Begin) -> None:
        super().__init__(records, layout)
        self._begin = begin

    def tiles(self, unit: UnitSpec) -> Iterator[TileHomes]:
        self.weights(unit)
        for tile in super().tiles(unit):
            self._begin(tile, self.states_at(tile))
            yield tile


class _Borrowed(Generic[_Record]):
    """One record, lent until another one is needed."""

    def __init__(self, lend: Callable[[_Record], Loan]) -> None:
        self.what: _Record | None = None
        self._lend = lend
        self._address = 0
        self._loan = contextlib.ExitStack()

    def borrow(self, what: _Record) -> int:
        """The address of this one. The one before is given back first."""
        if self.what is not what:
            self.give_back()
            self._address = self._loan.enter_context(self._lend(what))
            self.what = what
        return self._address

    def give_back(self) -> None:
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.what = None
        self._loan.__exit__(kind, error, traceback)
