"""Computing with large weights in pieces: the handle of such a weight takes ``F.embedding`` and ``F.linear`` over.

The module that owns the weight stays as it is and calls them with the handle, which does the work piece by piece. All
else that is done with the weight works, too, on a copy of the whole.

An embedding in pieces has the same bits as in one. The columns of a linear layer's output are worked out in several
products instead of one, and the gradient of its input is a sum of several: equal up to the rounding of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.model.backing import PiecewiseBacking
from offload.model.handle import Handle
from offload.units import Piece, WeightInPieces


class PiecewiseHandle(Handle):
    """The handle of a weight in pieces."""

    _backing: PiecewiseBacking

    @property
    def backing(self) -> PiecewiseBacking:
        return self._backing

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


def whole_of(weight: Any) -> WeightInPieces | None:
    """The value that a handle stands for, in pieces. A detached handle, or a view of one, is a value like any other."""
    return weight._backing.whole if isinstance(weight, PiecewiseHandle) and weight._is_managed else None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    whole = whole_of(weight)
    if whole is None or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    output: Tensor | None = None
    for piece in whole.pieces:
        mine = _mine(input, piece)
        local = torch.where(mine, input - piece.start, 0)
        padding = None if padding_idx is None else padding_idx % whole.shape[0] - piece.start
        if padding is not None and not 0 <= padding < piece.stop - piece.start:
            padding = None

        def look_up(rows: Tensor, local: Tensor = local, padding: int | None = padding) -> Tensor:
            return F.embedding(local, rows, padding, sparse=sparse)

        found = piece(look_up)
        output = found if output is None else torch.where(mine.unsqueeze(-1), found, output)
    return output


def _mine(input: Tensor, piece: Piece) -> Tensor:
    """Mask of the indices that are in the piece. Those that are in none belong to the first and the last, which refuse
    them."""
    if piece is piece.whole.pieces[0]:
        return input < piece.stop
    if piece is piece.whole.pieces[-1]:
        return input >= piece.start
    return (input >= piece.start) & (input < piece.stop)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    whole = whole_of(weight)
    if whole is None:
        return NotImplemented
    biases = whole.split(bias) if bias is not None else [None] * len(whole.pieces)
    outputs = []
    for piece, part in zip(whole.pieces, biases, strict=True):

        def multiply(rows: Tensor, part: Tensor | None = part) -> Tensor:
            return F.linear(input, rows, part)

        outputs.append(piece(multiply))
    return torch.cat(outputs, dim=-1)


_IN_PIECES: dict[Any, Callable[..., Any]] = {F.embedding: _embedding, F.linear: _linear}
