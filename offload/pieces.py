"""Large weights in pieces: an embedding or a linear layer much larger than a model's other units is cut by rows.

Every buffer that a unit passes through is as large as the largest unit, so one huge layer would make all of them huge.
Each piece is a unit of its own, with weights, gradients and states of its own; the module that owns the weight stays as
it is and calls ``F.embedding`` or ``F.linear`` with the weight's handle (``CutHandle``), which does the work piece by
piece. Whatever else is done with the weight works, too, on a copy of the whole.

An embedding in pieces has the same bits as in one. The columns of a linear layer's output are worked out in several
products instead of one, and the gradient of its input is a sum of several: equal up to the rounding of that. What is
cut depends on the model alone and never on budgets, so that the bits do not, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.handle import Handle, Link

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

    def __init__(self, cut: Cut, start: int, stop: int) -> None:
        super().__init__()
        self.cut = cut
        self.start = start
        self.stop = stop
        self.register_parameter("weight", None)

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            return use(self.weight.detach())
        leaf = nn.Parameter(self.weight.detach())
        leaf.register_post_accumulate_grad_hook(self.on_gradient)
        return use(leaf)


class Cut:
    """A weight in pieces. ``sites`` are the modules that own it, each with its name there."""

    def __init__(self, name: str, sites: Sequence[tuple[nn.Module, str]], shape: torch.Size, piece_numel: int) -> None:
        """``piece_numel`` elements are the most that a piece may have, if that is a row or more."""
        self.name = name
        self.sites = tuple(sites)
        self.shape = shape
        rows = self.shape[0]
        most = max(piece_numel // self.shape[1], 1)
        count = -(-rows // most)
        bounds = [rows * index // count for index in range(count + 1)]
        self.pieces = [Piece(self, start, stop) for start, stop in pairwise(bounds)]

    def split(self, value: Tensor) -> Iterator[Tensor]:
        """The rows of each piece."""
        return (value[piece.start : piece.stop] for piece in self.pieces)


def can_be_cut(module: nn.Module, name: str) -> bool:
    """The module uses this parameter of its own only in ways that pieces know."""
    if isinstance(module, nn.Embedding):
        return name == "weight" and module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear) and name == "weight"


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


class WholeLink(Link, Protocol):
    """Where the value of ``cut`` is put together, and taken apart."""

    cut: Cut


class CutHandle(Handle):
    """The handle of a weight in pieces."""

    _link: WholeLink

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        in_pieces = _IN_PIECES.get(func)
        if in_pieces is not None:
            result = in_pieces(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs or {})


def _cut_of(weight: Any) -> Cut | None:
    """A detached handle, or a view of one, is a value like any other."""
    return weight._link.cut if isinstance(weight, CutHandle) and isinstance(weight, nn.Parameter) else None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    cut = _cut_of(weight)
    if cut is None or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    output: Tensor | None = None
    for piece in cut.pieces:
        mine = _mine(input, piece)
        local = torch.where(mine, input - piece.start, 0)
        padding = None if padding_idx is None else padding_idx % cut.shape[0] - piece.start
        if padding is not None and not 0 <= padding < piece.stop - piece.start:
            padding = None

        def look_up(rows: Tensor, local: Tensor = local, padding: int | None = padding) -> Tensor:
            return F.embedding(local, rows, padding, sparse=sparse)

        found = piece(look_up)
        output = found if output is None else torch.where(mine.unsqueeze(-1), found, output)
    return output


def _mine(input: Tensor, piece: Piece) -> Tensor:
    """Which indices are in the piece. Those that are in none belong to the first and the last, which refuse them."""
    if piece is piece.cut.pieces[0]:
        return input < piece.stop
    if piece is piece.cut.pieces[-1]:
        return input >= piece.start
    return (input >= piece.start) & (input < piece.stop)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    cut = _cut_of(weight)
    if cut is None:
        return NotImplemented
    biases = cut.split(bias) if bias is not None else [None] * len(cut.pieces)
    outputs = []
    for piece, part in zip(cut.pieces, biases, strict=True):

        def multiply(rows: Tensor, part: Tensor | None = part) -> Tensor:
            return F.linear(input, rows, part)

        outputs.append(piece(multiply))
    return torch.cat(outputs, dim=-1)


_IN_PIECES: dict[Any, Callable[..., Any]] = {F.embedding: _embedding, F.linear: _linear}
