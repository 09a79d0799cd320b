"""``parameter.grad`` of a parameter that rests in the engine.

A handle like any other, except that it knows two things without bringing the gradient in: its 2-norm, which was added
up while the gradient came, and its product with a number, which the update applies. So ``clip_grad_norm_``,
``GradScaler`` and pipelines of torch move no bytes.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch

from offload.model.handle import Backing, Handle

_aten = torch.ops.aten


class GradientBacking(Backing, Protocol):
    """The gradient of one parameter, ``spec``."""

    @property
    def spec(self) -> object: ...

    def norm(self) -> float: ...

    def is_finite(self) -> bool: ...

    def multiply(self, factor: float) -> None: ...


class GradientHandle(Handle):
    """See the module's docstring."""

    _backing: GradientBacking

    def is_of(self, spec: object) -> bool:
        """True if this is the gradient of the parameter ``spec``."""
        return self._backing.spec is spec

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        handle = args[0] if args else None
        if isinstance(handle, GradientHandle):
            if func is _aten.linalg_vector_norm.default and _is_2_norm(*args[1:], **kwargs):
                norm, dtype = handle._backing.norm(), kwargs.get("dtype") or handle.dtype
                return torch.full((), norm, dtype=dtype, device=handle.device)  # a copy would wait for the device
            if func in (_aten.mul_.Tensor, _aten.mul_.Scalar) and _is_number(args[1]):
                handle._backing.multiply(_number_in(args[1]))
                return handle
            if func in (_aten.div_.Tensor, _aten.div_.Scalar) and _is_number(args[1]):
                number = _number_in(args[1])
                handle._backing.multiply(1 / number if number else math.inf)
                return handle
        return super().__torch_dispatch__(func, types, args, kwargs)


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Do what ``torch.amp.GradScaler`` does to gradients before a step, without bringing them in."""
    number = float(factor)
    for gradient in gradients:
        if not isinstance(gradient, GradientHandle):
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, factor)
            continue
        if not gradient._backing.is_finite():
            found_inf.fill_(1.0)
        gradient._backing.multiply(number)


_last_number: tuple[weakref.ref[torch.Tensor], int, float] | None = None
"""The tensor that was read last, its version then, and what it held."""


def _number_in(value: Any) -> float:
    """The number that ``value`` is or holds. To read one tensor waits for a device, and ``clip_grad_norm_`` multiplies
    every gradient by the same one: it is read once."""
    global _last_number
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return float(value)
    last = _last_number
    if last is None or last[0]() is not value or last[1] != value._version:
        _last_number = last = weakref.ref(value), value._version, float(value)
    return last[2]


def _is_2_norm(ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> bool:
    return bool(ord == 2) and dim is None and not keepdim


def _is_number(value: Any) -> bool:
    return not isinstance(value, Handle) and (not isinstance(value, torch.Tensor) or value.numel() == 1)
