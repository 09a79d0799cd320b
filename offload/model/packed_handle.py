"""The handle of a quantised parameter. Its value is a tensor of the quantised class, over memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offload.access import ExternalAccess
from offload.errors import ConfigError
from offload.memory import tensor_at
from offload.model.aliases import Aliases
from offload.model.backing import ParameterBacking
from offload.model.handle import Handle, value_of
from offload.quantised import QuantisedWeight
from offload.torch_internals import map_leaves
from offload.units import Packing, ParameterSpec, UnitSpec


class PackedBacking(ParameterBacking):
    """Backs such a handle."""

    def __init__(
        self,
        unit: UnitSpec,
        spec: ParameterSpec,
        packing: Packing,
        access: ExternalAccess,
        in_use: nn.Parameter,
        aliases: Aliases,
    ) -> None:
        super().__init__(unit, spec, access, in_use, aliases)
        self.packing = packing

    def read(self) -> torch.Tensor:
        """A copy of the value, of the quantised class."""
        with self._access.failure, self._access.weights(self._unit) as address:
            return self.packing.copied(self._content(address).to(self._access.device))

    def write(self, value: torch.Tensor) -> None:
        """Take over the bytes of a value that is quantised in the same way. Raises ``ConfigError`` for others."""
        if not self.packing.fits(value):
            raise ConfigError(
                f"parameter {self.name} is a quantised {self.packing.kind.__name__} and is held by the engine: it "
                f"cannot become a {type(value).__name__} of {value.dtype} {tuple(value.shape)} that is quantised "
                "otherwise or not at all. Change the model that engine.unwrap() gives, and make an engine again."
            )
        content = self.packing.pack(value.detach())
        with self._access.failure, self._access.weights_to_change(self._unit) as address:
            self._content(address).copy_(content)

    def _content(self, address: int) -> torch.Tensor:
        start = self._spec.offset * self._access.layout.formats.weights
        return tensor_at(address + start, self.packing.nbytes, torch.uint8)


class PackedHandle(Handle):
    """Handle by which what the class of the value knows beside ``torch.Tensor`` (such as ``dequantize``) is asked of
    the value."""

    _backing: PackedBacking

    def value(self) -> torch.Tensor:
        """As of any handle. It is on the model's device already: such tensors need not know how to move."""
        return self._backing.read()

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:  # which the class does as a whole, and torch would take apart
            return func(*map_leaves(value_of, args), **map_leaves(value_of, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._backing.packing.knows(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value(), name)

    def dequantize(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the value does it."""
        dequantize: Callable[..., torch.Tensor] = self.value().dequantize
        return dequantize(*args, **kwargs)

    def _as_ordinary(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, nn.Parameter):
            return value
        return value.as_parameter() if isinstance(value, QuantisedWeight) else nn.Parameter(value, requires_grad=False)

    def saved(self) -> torch.Tensor:
        value = super().saved()
        return value.saved if isinstance(value, QuantisedWeight) else value
