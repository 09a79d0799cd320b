"""Parameters of a class that computes in another way with ordinary values, such as torchao's for training in MXFP8.

Such a tensor wraps one other of the same shape and dtype, by ``__tensor_flatten__`` and ``__tensor_unflatten__``, and
is there for what its class makes of products. What the engine stores and updates is the tensor within. What the model
computes with is one of the class around the memory that the unit's weights are in; so are values that are read from
outside. Gradients and states are ordinary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Wrapping:
    """The class around a parameter's values, and what it wants to know. Made by ``wrappings_in``."""

    def __init__(self, tensor: Any) -> None:
        (self._name,), self._context = tensor.__tensor_flatten__()
        self.kind: Any = type(tensor)
        self.shape = self.own_shape = tensor.shape
        self.own_attributes = frozenset(vars(tensor))
        """Attributes that the tensor itself consists of."""

    def knows(self, name: str) -> bool:
        """Tensors of the class have the attribute or method."""
        return name in self.own_attributes or hasattr(self.kind, name)

    def over(self, own: torch.Tensor) -> torch.Tensor:
        """A tensor of the class over ``own``, without a copy."""
        inner = {self._name: own}
        wrapped: torch.Tensor = self.kind.__tensor_unflatten__(inner, self._context, own.shape, own.stride())
        return wrapped.detach()

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """The ordinary tensor of a value, over the same memory."""
        return getattr(value, self._name) if isinstance(value, self.kind) else value


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The first tensor that one which wraps others has, and has no more to wrap; any other one itself."""
    while (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        tensor = getattr(tensor, flatten()[0][0])
    return tensor


def wrappings_in(model: nn.Module) -> dict[int, Wrapping]:
    """The class around each parameter that wraps ordinary values, by the ``id`` of the parameter."""
    return {id(parameter): Wrapping(parameter) for parameter in model.parameters() if _wraps_values(parameter.detach())}


def _wraps_values(tensor: torch.Tensor) -> bool:
    if not hasattr(tensor, "__tensor_flatten__") or type(tensor).__module__.startswith("torch.distributed"):
        return False
    names = tensor.__tensor_flatten__()[0]
    if len(names) != 1:
        return False
    inner: torch.Tensor = getattr(tensor, names[0])
    same = (inner.shape, inner.dtype) == (tensor.shape, tensor.dtype)
    return same and type(inner) in (torch.Tensor, nn.Parameter) and inner.is_contiguous()
