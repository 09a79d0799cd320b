"""Weights in the formats of files: tensors that hold a file's bytes, and are dequantised where they are used.

Each class wraps the tensors that a file has for one weight, and stands for the dequantised weight in the dtype of the
model. Frozen weights alone: there is a gradient for what is multiplied with them, and none for themselves. What
autograd keeps of one for backward is the wrapper, so that no dequantised weight outlives its use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from offload.errors import ConfigError
from offload.memory import passing_tensor

_AT_ONCE_NUMEL = 1 << 20
"""Elements that are worked out at a time: temporaries stay in a processor's cache, and small."""

_aten = torch.ops.aten


class QuantisedWeight(torch.Tensor):
    """A weight of ``shape`` and ``dtype`` that is made of several tensors of a file, its ``parts``: codes, their
    scales, and what else its class has a name for."""

    names: ClassVar[tuple[str, ...]] = ("codes", "scales")
    """Attributes that the parts are, in order."""

    codes: torch.Tensor
    scales: torch.Tensor
    settings: tuple[Any, ...]
    """Arguments of its class beside the parts."""

    def __new__(
        cls, parts: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype, settings: tuple[Any, ...] = ()
    ) -> Any:
        device = parts[0].device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(
        self, parts: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype, settings: tuple[Any, ...] = ()
    ) -> None:
        self.settings = settings
        for name, part in zip(self.names_with(settings), parts, strict=True):
            setattr(self, name, part)

    @classmethod
    def names_with(cls, settings: tuple[Any, ...]) -> tuple[str, ...]:
        """The names of the parts."""
        return cls.names

    joins: ClassVar[bool] = False
    """Weights that lie one below the other are one with more rows."""

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it is made of."""
        return tuple(getattr(self, name) for name in self.names_with(self.settings))

    @property
    def has_rows(self) -> bool:
        """Several weights that lie one after the other: each part has a row for each."""
        return self.dim() == 3 and all(part.dim() > 2 and len(part) == len(self) for part in self.parts)

    @property
    def grain(self) -> int:
        """Rows that are worked out together, at least."""
        return 1

    def work_out(self, start: int, stop: int) -> torch.Tensor:
        """The rows ``[start, stop)`` of one weight, each bound a multiple of ``grain``, as an ordinary tensor."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The weight as an ordinary tensor, in memory that goes back to the system with it. Takes a few MiB besides."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # which every look at a shape would go through
            if self.device.type == "cpu":
                out = passing_tensor(self.shape.numel() * self.dtype.itemsize).view(self.dtype).view(self.shape)
            else:
                out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.put_into(out)
        return out

    def factor(self, dtype: torch.dtype, *, in_backward: bool) -> torch.Tensor:
        """What is multiplied with something of this dtype, which is the weight's for all but weights of layers that
        cast."""
        return self.dequantize()

    @property
    def saved(self) -> torch.Tensor:
        """What a state dict holds of it."""
        return self

    def as_parameter(self) -> nn.Parameter:
        """What an ordinary model has for it."""
        return nn.Parameter(self, requires_grad=False)

    def put_into(self, out: torch.Tensor) -> None:
        """Fill ``out``, of this shape and dtype, with the weight."""
        if self.dim() > 2:
            for index in range(len(self)):
                self.select_first(index).put_into(out[index])
            return
        rows, columns = out.shape
        step = max(_AT_ONCE_NUMEL // columns // self.grain, 1) * self.grain
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            self.put_rows(start, stop, out[start:stop])

    def put_rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill ``out`` with the rows ``[start, stop)`` of one weight."""
        out.copy_(self.work_out(start, stop))

    def take_rows(self, indices: torch.Tensor) -> torch.Tensor | None:
        """The rows of one weight that an embedding looks up; None where they are not worked out by themselves."""
        return None

    def select_first(self, index: int) -> QuantisedWeight:
        """One of several weights that lie one after the other, without a copy."""
        return type(self)([part[index] for part in self.parts], self.shape[1:], self.dtype, self.settings)

    def rows(self, start: int, stop: int) -> QuantisedWeight:
        """Those of several weights from ``start`` to ``stop``, without a copy."""
        shape = torch.Size((stop - start, *self.shape[1:]))
        return type(self)([part[start:stop] for part in self.parts], shape, self.dtype, self.settings)

    def over(self, call: Callable[[torch.Tensor], torch.Tensor]) -> QuantisedWeight:
        """The same weight over what ``call`` makes of the tensors."""
        return type(self)([call(part) for part in self.parts], self.shape, self.dtype, self.settings)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.names_with(self.settings)), (self.dtype, *self.settings)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: torch.Size, outer_stride: Any
    ) -> QuantisedWeight:
        dtype, *settings = context
        parts = [inner[name] for name in cls.names_with(tuple(settings))]
        return cls(parts, torch.Size(outer_size), dtype, tuple(settings))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), QuantisedWeight):
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        written = _written(function, args, kwargs) if function._schema.is_mutable else None
        if written is not None:
            return _take_over(function, written, *args[1:])
        if isinstance(weight, QuantisedWeight):
            if function in (_aten.detach.default, _aten.alias.default):
                return weight.over(torch.Tensor.detach)
            if function is _aten.clone.default:
                return weight.over(torch.Tensor.clone)
            if function is _aten._to_copy.default and kwargs.get("dtype", weight.dtype) in (None, weight.dtype):
                device = kwargs.get("device") or weight.device
                return weight.over(lambda tensor: tensor.to(device, copy=True))
            if function is _aten.select.int and args[1] == 0 and weight.has_rows:
                return weight.select_first(args[2])
            if function is _aten.squeeze.dim and args[1] == 0 and weight.has_rows and len(weight) == 1:
                return weight.select_first(0)
            if function is _aten.slice.Tensor and weight.has_rows and args[1] == 0 and len(args) == 4:
                found = range(len(weight))[args[2] : args[3]]
                return weight.rows(found.start, found.stop)
            if function is _aten.embedding.default:
                looked_up = weight.take_rows(args[1])
                if looked_up is not None:
                    return looked_up
        return function(*tree_map(_ordinary, args), **tree_map(_ordinary, kwargs))


class _Linear(torch.autograd.Function):
    """``F.linear`` that keeps the weight as it is, and dequantises it for backward once more."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight.factor(x.dtype, in_backward=False), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        of_x = gradient @ weight.factor(gradient.dtype, in_backward=True) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, None, of_bias


def _linear(input: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> QuantisedWeight | None:
    """The weight that ``function`` writes to, if it does to one."""
    for position, argument in enumerate(function._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(given, QuantisedWeight) and argument.alias_info is not None and argument.alias_info.is_write:
            return given
    return None


def _take_over(function: Any, weight: QuantisedWeight, *args: Any) -> QuantisedWeight:
    """Copy a weight of the same format. Raises ``ConfigError`` for any other write: there are no codes for it."""
    other: Any = args[0] if args else None
    if function is not _aten.copy_.default or type(other) is not type(weight):
        raise ConfigError(
            f"{function} writes to a weight in the format of its file ({weight}), which has no codes for other values. "
            "To merge an adapter: save it, and merge it into the model that transformers loads. Nothing has changed"
        )
    if (other.shape, other.dtype, other.settings) != (weight.shape, weight.dtype, weight.settings):
        raise ConfigError(f"{weight} cannot become {other}, which is of other sizes or settings. Nothing has changed")
    for part, new in zip(weight.parts, other.parts, strict=True):
        part.copy_(new)
    return weight


def _ordinary(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantisedWeight) else value
