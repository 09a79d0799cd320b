"""The handle of a parameter whose class computes in another way with its values (see ``offload.units.wrapped``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.model.handle import Handle
from offload.torch_internals import map_leaves

_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm", "_scaled_grouped_mm")
"""Names of functions that such a class may do as a whole, and autograd would take apart."""


class WrappedHandle(Handle):
    """Handle by which products are asked of the class, outside of the unit's forward, too."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", None) in _PRODUCTS:
            return func(*map_leaves(_in_graph, args), **map_leaves(_in_graph, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._backing.knows(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)

    def _as_ordinary(self, value: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(value, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else value


class _Value(torch.autograd.Function):
    """The value of a handle, whose gradient is the handle's."""

    @staticmethod
    def forward(ctx: Any, handle: WrappedHandle) -> torch.Tensor:
        return handle.value()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _in_graph(item: Any) -> Any:
    return _Value.apply(item) if isinstance(item, WrappedHandle) else item
