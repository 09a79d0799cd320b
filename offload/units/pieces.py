"""Large weights in pieces: an embedding or a linear layer much larger than a model's other units is cut by rows.

Every buffer that a unit passes through is as large as the largest unit, so one huge layer would make all of them huge.
Each piece is a unit of its own, with weights, gradients and states of its own. What is cut depends on the model and the
optimizer alone and never on budgets, so that the bits do not, either. ``offload.model.piecewise`` computes with pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offload.units.packed import Packing

_LEAST_NUMEL = 1 << 18
"""Pieces smaller than this save no memory worth the calls they cost."""

_MOST_PIECES = 32
"""A piece has at least the share of all that could be cut that this many have of it."""


class Piece:
    """Rows ``[start, stop)`` of a weight, the ``index``-th of its pieces.

    Each use is a leaf of its own: autograd would hold the gradients of one leaf until those of all its uses have come,
    and a tied weight is used at both ends of a model.

    No ``nn.Module``, though it is called like one: a layer has hundreds of experts, and a module takes 4 KB.
    """

    __slots__ = ("around", "index", "on_gradient", "start", "stop", "weight", "whole")

    around: tuple[Callable[[Piece, Any], None], Callable[[Piece, Any, Any], Any]]
    """Called before and after each use, like a module's hooks: the latter with None where the use has failed."""
    weight: nn.Parameter
    """The one in the unit's window, whose value is there while a use lasts."""
    on_gradient: Callable[[Tensor], None]
    """Told of each leaf that has its gradient."""

    def __init__(self, whole: WeightInPieces, index: int, start: int, stop: int) -> None:
        self.whole = whole
        self.index = index
        self.start = start
        self.stop = stop

    def __call__(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        before, after = self.around
        before(self, (use,))
        try:
            output = self._compute(use)
        except Exception:
            after(self, (use,), None)
            raise
        return after(self, (use,), output)  # type: ignore[no-any-return]

    def _compute(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return use(self.weight.detach())
        leaf = nn.Parameter(self.weight.detach())
        leaf.register_post_accumulate_grad_hook(self.on_gradient)
        return use(leaf)


class WeightInPieces:
    """A weight in pieces. ``sites`` are the modules that own it, each with its name there."""

    def __init__(
        self,
        name: str,
        sites: Sequence[tuple[nn.Module, str]],
        shape: torch.Size,
        count: int,
        packing: Packing | None = None,
    ) -> None:
        """``count`` pieces, of rows that differ by one at most. ``packing`` is that of a quantised one."""
        self.name = name
        self.sites = tuple(sites)
        self.shape = shape
        self.packing = packing
        bounds = [shape[0] * index // count for index in range(count + 1)]
        self.pieces = [Piece(self, index, *rows) for index, rows in enumerate(pairwise(bounds))]

    def split(self, value: Tensor) -> Iterator[Tensor]:
        """The rows of each piece."""
        return (value[piece.start : piece.stop] for piece in self.pieces)


def can_be_cut(module: nn.Module, name: str) -> bool:
    """The module uses this parameter of its own only in ways that pieces know."""
    if isinstance(module, nn.Embedding):
        return name == "weight" and module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear) and name == "weight"


def num_pieces(shape: torch.Size, most: int) -> int:
    """Number of pieces of a matrix, if each may have ``most`` elements, or a row where that has more."""
    return -(-shape[0] // max(most // shape[1], 1))


def piece_numel(cuttable: Sequence[int], others: Sequence[int]) -> int:
    """The most elements of a piece; what has more than twice as many is to be cut.

    ``cuttable`` and ``others`` are the sizes of units: of those that are one weight which could be cut, and of
    the rest. Layers of like size set the measure together, however large they are.
    """
    limit = max(_LEAST_NUMEL, sum(cuttable) // _MOST_PIECES, *others)
    for numel in sorted(cuttable):
        if numel <= 2 * limit:
            limit = max(limit, numel)
    return limit
