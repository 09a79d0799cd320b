"""``parameter.grad`` of a parameter that is stored in the engine.

A handle like any other, except that it knows two things without bringing the gradient in: its 2-norm, which was added
up while the gradient came, and its product with a number, which the update applies. So ``clip_grad_norm_``,
``GradScaler`` and pipelines of torch move no bytes. A second product, or a quotient, is put off where it gives the same
bits: where one of the numbers is a power of two.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import torch

from offload.model.handle import Handle
from offload.model.handle_backing import Backing
from offload.torch_internals import graph_task
from swapper import OffloadError

_aten = torch.ops.aten


class GradientBacking(Backing, Protocol):
    """The gradient of one parameter, of this ``origin``, as long as it is that."""

    @property
    def origin(self) -> object: ...

    @property
    def is_kept(self) -> bool: ...

    def own_tensor(self) -> torch.Tensor: ...

    def begin_anew(self, value: torch.Tensor) -> bool: ...

    def zero(self) -> None: ...

    def norm(self) -> float: ...

    def is_finite(self) -> bool: ...

    def puts_off(self, factor: float) -> bool: ...

    def multiply(self, factor: float) -> None: ...


class GradientHandle(Handle):
    """See the module's docstring."""

    _backing: GradientBacking

    @property
    def is_kept(self) -> bool:
        """It can be read: no step has used it, or it is stored in memory."""
        return self._backing.is_kept

    def own_tensor(self) -> torch.Tensor:
        """The gradient as an ordinary tensor, which parameters can have in common."""
        return self._backing.own_tensor()

    def is_of(self, backing: GradientBacking | None) -> bool:
        """True if this is the gradient that ``backing`` has."""
        return backing is not None and self._backing.origin == backing.origin

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return super().__repr__()
        except OffloadError as error:
            return f"<{type(self).__name__}: {error}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if func is _aten._foreach_zero_.default:
            return _zero(*args)
        handle = args[0] if args else None
        if isinstance(handle, GradientHandle):
            if func is _aten.linalg_vector_norm.default and _is_2_norm(*args[1:], **kwargs):
                norm, dtype = handle._backing.norm(), kwargs.get("dtype") or handle.dtype
                return torch.full((), norm, dtype=dtype, device=handle.device)  # a copy would wait for the device
            if func in (_aten.mul_.Tensor, _aten.mul_.Scalar) and _is_number(args[1]):
                number = _number(args[1])
                if handle._backing.puts_off(number):
                    handle._backing.multiply(number)
                    return handle
            if func is _aten.add_.Tensor and graph_task() != -1 and handle._backing.begin_anew(args[1]):
                return handle
            if func is _aten.zero_.default:
                handle._backing.zero()
                return handle
            if func in (_aten.div_.Tensor, _aten.div_.Scalar) and _is_number(args[1]):
                number = _number(args[1])
                if is_power_of_two(number) and handle._backing.puts_off(1 / number):
                    handle._backing.multiply(1 / number)
                    return handle
        return super().__torch_dispatch__(func, types, args, kwargs)


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Do what ``torch.amp.GradScaler`` does to gradients before a step, without bringing them in."""
    number = _number(factor)
    for gradient in gradients:
        if not isinstance(gradient, GradientHandle):
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, factor)
            continue
        if not gradient._backing.is_finite():
            found_inf.fill_(1.0)
        if gradient._backing.puts_off(number):
            gradient._backing.multiply(number)
        else:
            gradient._backing.write(gradient._backing.read() * number)


def _zero(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.zero_()


def is_power_of_two(number: float) -> bool:
    """A product with it is exact, as long as it is neither too large nor too small for its dtype."""
    return math.frexp(abs(number))[0] == 0.5


def _is_2_norm(ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> bool:
    return bool(ord == 2) and dim is None and not keepdim


_last: tuple[weakref.ref[torch.Tensor], int, float] | None = None
"""The number of a device that was read last, and its version then."""


def _number(value: Any) -> float:
    """The number. One of a device is read once, however many gradients it is for: each read waits for the device."""
    global _last
    if not isinstance(value, torch.Tensor) or _is_here(value):
        return float(value)
    if _last is None or _last[0]() is not value or _last[1] != value._version:
        _last = weakref.ref(value), value._version, float(value)
    return _last[2]


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_number(value: Any) -> bool:
    return not isinstance(value, Handle) and (not isinstance(value, torch.Tensor) or value.numel() == 1)
