"""Computing expert by expert: the handle of a fused weight gives an expert's rows as a handle of their own.

What the model's own code multiplies with such rows is computed within the expert's unit, which is fetched for it. So
that code stays as it is, and its numbers are its own: the eager implementation of ``transformers``, or any other that
indexes the weight by one expert. What is done with the whole weight in another way works, too, on a copy of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offload.model.handle import Handle
from offload.model.handle_backing import View
from offload.model.installed_hooks import HookOfModel
from offload.model.piecewise import PiecewiseHandle, whole_of
from offload.units import FusedExperts, Piece, UnitSpec
from offload.units.experts import takes_implementation

_EAGER = "eager"


class ExpertsHandle(PiecewiseHandle):
    """The handle of a weight whose pieces are experts'."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            row = _row(*args)
            if row is not NotImplemented:
                return row
        elif func in _ROW_BY_ROW:
            rows = _rows(*args, **(kwargs or {}))
            if rows is not NotImplemented:
                return iter(rows) if func is Tensor.__iter__ else rows
        elif func in (torch.bmm, Tensor.bmm):
            products = _bmm(*args, **(kwargs or {}))
            if products is not NotImplemented:
                return products
        return super().__torch_function__(func, types, args, kwargs or {})


class ExpertHandle(Handle):
    """An expert's rows of a weight, without the first dimension."""

    _piece: Piece | None = None
    """A detached row has none, and is a value like any other."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for rows in (*args, *kwargs.values()) if func in _IN_UNIT else ():
            if isinstance(rows, ExpertHandle) and rows._piece is not None:
                return rows._piece(partial(_with_rows, func, rows, args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _with_rows(func: Any, rows: ExpertHandle, args: Any, kwargs: Any, weight: Tensor) -> Any:
    """A function of an expert's handle, of what it stands for."""
    own = weight.squeeze(0)
    values = [own if item is rows else item for item in args]
    return func(*values, **{name: own if item is rows else item for name, item in kwargs.items()})


def _row(weight: Any, index: Any) -> Any:
    """The rows of one expert, if that is what the index says."""
    whole = whole_of(weight)
    is_number = isinstance(index, int) or (
        isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point()
    )
    if whole is None or not is_number or isinstance(index, bool) or getattr(index, "dtype", None) is torch.bool:
        return NotImplemented
    number = int(index)
    with torch._C.DisableTorchFunctionSubclass():
        rows = weight[number]
    piece = whole.pieces[number]
    rows.__class__ = ExpertHandle
    rows._piece = piece
    rows._backing = View(weight.backing.piece(piece), _without_first, None)
    return rows


def _rows(weight: Any, dim: int = 0) -> Any:
    """The rows of each expert."""
    if whole_of(weight) is None or dim % weight.dim() != 0:
        return NotImplemented
    return tuple(_row(weight, number) for number in range(len(weight)))


def _without_first(value: Tensor) -> Tensor:
    return value.squeeze(0)


def _bmm(input: Any, mat2: Any, **other: Any) -> Any:
    """All experts, one after the other."""
    whole = whole_of(mat2)
    if whole is None or other or len(input) != len(whole.pieces):
        return NotImplemented
    products = []
    for part, piece in zip(input.split(1), whole.pieces, strict=True):

        def multiply(rows: Tensor, part: Tensor = part) -> Tensor:
            return torch.bmm(part, rows)

        products.append(piece(multiply))
    return torch.cat(products)


_ROW_BY_ROW = {Tensor.__iter__, Tensor.unbind, torch.unbind}

_IN_UNIT = {
    *(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
}
"""Operations of models on an expert's weights and biases, with a result that is no view of them."""


def announce_routes(
    units: Sequence[UnitSpec],
    announce: Callable[[Sequence[UnitSpec]], None],
    outside_of_graphs: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> Callable[[], None]:
    """Tell, before a layer computes with its fused experts, which of them its tokens are sent to: those whose numbers
    it is given. Returns the call that takes the hooks out."""
    of_layers: dict[FusedExperts, list[UnitSpec]] = {}
    for unit in units:
        if isinstance(unit.experts, FusedExperts):
            of_layers.setdefault(unit.experts, []).append(unit)

    def tell(members: Sequence[UnitSpec], module: Any, args: Any, kwargs: Any) -> None:
        numbers: set[int] = set()
        for item in (*args, *kwargs.values()):
            if isinstance(item, Tensor) and item.dtype in _OF_INDICES:
                numbers.update(item.unique().tolist())
        routed = [members[number] for number in sorted(numbers) if 0 <= number < len(members)]
        if routed:
            announce(routed)

    tell_outside = outside_of_graphs(tell, "the engine asks for experts when the router has chosen")
    hooks = [
        experts.module.register_forward_pre_hook(HookOfModel(tell_outside, members), with_kwargs=True)
        for experts, members in of_layers.items()
    ]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


_OF_INDICES = (torch.int64, torch.int32)


def compute_by_expert(experts: Iterable[FusedExperts]) -> Callable[[], None]:
    """Let models of ``transformers`` take the implementation that goes from one expert to the next. Returns the call
    that undoes it."""
    before: dict[int, tuple[Any, Any]] = {}
    for of in experts:
        if takes_implementation(of.module):
            config: Any = of.module.config
            before.setdefault(id(config), (config, config._experts_implementation))
            config._experts_implementation_internal = _EAGER

    def undo() -> None:
        for config, implementation in before.values():
            if config._experts_implementation == _EAGER:
                config._experts_implementation_internal = implementation

    return undo
