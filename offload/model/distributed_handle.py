"""Handles of parameters that are ``DTensor``, and of their gradients: values are ``DTensor`` over memory of their own.

``isinstance(handle, DTensor)`` is false, but what the class knows is known to the handle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.model.gradient_handle import GradientHandle
from offload.model.handle import Handle


class _OfDistributed(Handle):
    """Mixin by which what ``DTensor`` knows beside ``torch.Tensor`` (``to_local``, ``full_tensor``) is asked of the
    value."""

    def __getattr__(self, name: str) -> Any:
        from torch.distributed.tensor import DTensor

        if name.startswith("_") or not hasattr(DTensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)

    def _as_ordinary(self, value: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(value, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else value


class DistributedHandle(_OfDistributed):
    """Of a parameter."""


class DistributedGradientHandle(_OfDistributed, GradientHandle):
    """Of a gradient. Its norm is that of the whole."""
