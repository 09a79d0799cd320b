"""The units of a model, as they are laid out: parameters, offsets, tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.units.distributed_tensor import Distribution
from offload.units.experts import Experts
from offload.units.packed import Packing
from offload.units.pieces import Piece, WeightInPieces
from offload.units.wrapped import Wrapping
from swapper import PAGE_BYTES, FilePart, ReadBytes

GRAIN = PAGE_BYTES // 2
"""Elements that a unit's length is a multiple of, so that 16-bit and 32-bit pieces of it both fill whole pages."""

ALIGNMENT = 256
"""Elements that each parameter's offset is a multiple of: those that share one scale where moments are in 8 bits.

One of a grain or more begins at a multiple of ``GRAIN``, so that tiles can hold whole parameters.
"""


class Site(NamedTuple):
    """One place in the model where a parameter stands."""

    module: nn.Module
    name: str


@dataclass(frozen=True, eq=False)
class ParameterSpec:
    """One parameter of a unit, or one piece of a large one.

    ``offset`` and ``numel`` count elements of the unit, from its start. ``sites`` are where it stands while it is used:
    tied ones have several, and a ``piece``, which has it itself, none. Of a quantised one ``shape`` is what the model
    sees, and ``numel`` what its bytes take. Where the model sees a tensor around the stored one, ``outer`` knows it: of
    a ``DTensor`` all of these are of the part that this rank has.
    A rank's shard has ``numel`` elements of the flat parameter ``whole``, from its element ``start``; it may have none.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    trainable: bool
    sites: tuple[Site, ...]
    piece: Piece | None = None
    packing: Packing | None = None
    outer: Distribution | Wrapping | None = None
    whole: ParameterSpec | None = None
    start: int = 0

    @property
    def owners(self) -> tuple[Site, ...]:
        """Sites where the model has the parameter: for a piece, the whole of it. A handle stands there between uses."""
        return tuple(Site(*site) for site in self.piece.whole.sites) if self.piece is not None else self.sites

    @property
    def parameter(self) -> nn.Parameter:
        """The model's parameter as it stands there now."""
        module, name = self.owners[0]
        parameter = module._parameters[name]
        if parameter is None:
            raise ConfigError(f"parameter {self.name} was taken out of the model while the engine was made")
        return parameter

    def value(self) -> torch.Tensor:
        """The elements of ``parameter`` that this one has; of a quantised one the bytes."""
        if self.whole is not None:
            return self.shard_of(self.whole.value())
        value = self.part_of(self.parameter.detach())
        return value if self.packing is None else self.packing.pack(value)

    def places(self, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges of its bytes within its parameter's value in ``dtype``: first, behind the last, and the
        first's place in this piece."""
        if self.piece is not None and self.piece.whole.packing is not None:
            yield from self.piece.whole.packing.places(self.piece.start, self.piece.stop)
            return
        first = self.start + (0 if self.piece is None else self.piece.start * self.model_shape[1:].numel())
        yield first * dtype.itemsize, (first + self.numel) * dtype.itemsize, 0

    def over(self, flat: torch.Tensor) -> nn.Parameter:
        """Return the parameter that computes with these ``numel`` elements of a unit's memory."""
        if self.packing is not None:
            return nn.Parameter(self.packing.over(flat.view(torch.uint8)), requires_grad=False)
        own = flat.view(self.shape).data  # a version counter of its own
        return nn.Parameter(self.in_model(own), requires_grad=self.trainable)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of something that has the parameter's shape."""
        if self.piece is not None:
            return whole[self.piece.start : self.piece.stop]
        return whole if self.outer is None else self.outer.part_of(whole)

    def in_model(self, value: torch.Tensor) -> torch.Tensor:
        """A value as the model sees it, over the same memory: of the class that it is to have."""
        return value if self.outer is None else self.outer.over(value)

    def stored_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The ordinary tensor within a parameter in use, which has these ``numel`` elements."""
        return parameter if self.outer is None else self.outer.part_of(parameter)

    def beside(self, value: torch.Tensor) -> torch.Tensor:
        """A gradient, or a state for each element, as the model sees it: a ``DTensor`` of this part, if the parameter
        is one. What wraps a weight for the sake of its products wraps nothing else."""
        return value if self.distribution is None else self.distribution.over(value)

    @property
    def distribution(self) -> Distribution | None:
        """Its layout over ranks, if it is a ``DTensor``."""
        return self.outer if isinstance(self.outer, Distribution) else None

    def shard_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return what a rank's shard has of a value of the whole, flat; all of it in the value's shape if this is
        none."""
        own = value if self.outer is None else self.outer.part_of(value)
        return own if self.whole is None else own.reshape(-1)[self.start : self.start + self.numel]

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of all that is laid out of the parameter, also where this is a rank's shard."""
        return self.shape if self.whole is None else self.whole.shape

    @property
    def model_shape(self) -> torch.Size:
        """The shape that the model sees."""
        return self.whole_shape if self.outer is None else self.outer.shape

    @property
    def another_piece_follows(self) -> bool:
        """This is a piece, and not the last one."""
        return self.piece is not None and self.piece is not self.piece.whole.pieces[-1]


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Parameters stored flat, one after the other: the trainable ones first.

    ``numel`` and ``trainable_numel`` count elements up to the end of the padding, whole multiples of ``GRAIN``.
    ``modules`` are those around whose forward the unit must be resident, which pieces know for themselves; ``depth``
    counts the units that are resident around this one because their module calls this one's.
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[ParameterSpec, ...]
    trainable_numel: int
    numel: int
    depth: int
    experts: Experts | None = None
    """Experts that it is one of."""
    count: int = 1
    """1 where it moves as a whole; a forecast takes so many that are alike for one, of which each moves by itself."""
    in_files: tuple[FilePart, ...] = ()
    """Parts of read-only files that hold its frozen weights, and their places in the unit's weights; none if they are
    stored."""

    @property
    def stored_numel(self) -> int:
        """Elements of its weights that are stored, or would be: those before what is in files."""
        return self.trainable_numel if self.in_files else self.numel

    @cached_property
    def from_files(self) -> ReadBytes:
        """Return what a read of its parts of files takes."""
        return ReadBytes.of(self.in_files)

    def read_bytes(self, element_bytes: int) -> int:
        """Bytes of the drive that a read of its weights asks for, of so many bytes an element."""
        return self.stored_numel * element_bytes + self.from_files.nbytes

    @cached_property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The parameters that are trained."""
        return tuple(spec for spec in self.parameters if spec.trainable)

    @cached_property
    def is_tied(self) -> bool:
        """Several modules use a weight of it."""
        return any(len(spec.owners) > 1 for spec in self.parameters)

    @property
    def reused(self) -> bool:
        """It is a piece of a weight that the model uses at several places."""
        return self.whole is not None and len(self.whole.sites) > 1

    @property
    def whole(self) -> WeightInPieces | None:
        """The weight that it is a piece of."""
        piece = self.parameters[0].piece
        return piece.whole if piece is not None else None

    @property
    def gaps(self) -> Iterator[tuple[int, int]]:
        """The padding among the trainable elements, as half-open ranges."""
        end = 0
        for spec in self.parameters:
            if spec.trainable:
                if spec.offset > end:
                    yield end, spec.offset
                end = spec.offset + spec.numel
        if self.trainable_numel > end:
            yield end, self.trainable_numel


@dataclass(frozen=True, eq=False)
class Tile:
    """The optimizer states, ``nbytes`` in all, of a unit's elements ``[start, stop)``. Its rule knows how they lie.

    ``count`` is 1 where it is read, updated and written in one go; a forecast takes so many for one.
    """

    start: int
    stop: int
    nbytes: int
    count: int = 1

    @property
    def numel(self) -> int:
        return self.stop - self.start


def largest_numel(units: Sequence[UnitSpec]) -> int:
    """Elements of the largest of them."""
    return max((unit.numel // unit.count for unit in units), default=0)


def largest_trainable_numel(units: Sequence[UnitSpec]) -> int:
    """Elements that are trained of the one that has most."""
    return max((unit.trainable_numel // unit.count for unit in units), default=0)


def num_nested(units: Sequence[UnitSpec]) -> int:
    """The most units that compute needs at a time: the one at work and those whose modules call it."""
    return max((unit.depth for unit in units), default=0) + 1
