"""Large weights in pieces: an embedding or a linear layer much larger than a model's other units is cut by rows.

Every buffer that a unit passes through is as large as the largest unit, so one huge layer would make all of them huge.
Each piece is a unit of its own, with weights, gradients and states of its own. What is cut depends on the model and the
optimizer alone and never on budgets, so that the bits do not, either. ``offload.model.piecewise`` computes with pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from offload.units.packed import Packing

_LEAST_NUMEL = 1 << 18
"""Pieces smaller than this save no memory worth the calls they cost."""

_MOST_PIECES = 32
"""A piece has at least the share of all that could be cut that this many have of it."""


class Piece(nn.Module):
    """Rows ``[start, stop)`` of a weight. ``weight`` is there while a call lasts; a handle stands for it else.

    Each use is a leaf of its own: autograd would hold the gradients of one leaf until those of all its uses have come,
    and a tied weight is used at both ends of a model.
    """

    weight: nn.Parameter
    on_gradient: Callable[[Tensor], None]
    """Told of each leaf that has its gradient."""

    def __init__(self, whole: WeightInPieces, start: int, stop: int) -> None:
        super().__init__()
        self.whole = whole
        self.start = start
        self.stop = stop
        self.register_parameter("weight", None)

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:
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
        self.pieces = [Piece(self, start, stop) for start, stop in pairwise(bounds)]

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
