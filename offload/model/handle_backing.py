"""The backing of a handle: the interface, and two simple kinds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.aliases import Alias


class Backing(Protocol):
    """The engine's side of a handle: ``read`` gives a copy of the value in host memory, ``write`` takes a new one.

    ``in_use`` are the ordinary parameters that stand in the place of a parameter's handle while their units are in use:
    one, or one for each piece.
    """

    name: str

    @property
    def in_use(self) -> Sequence[nn.Parameter]: ...

    def read(self) -> torch.Tensor: ...

    def write(self, value: torch.Tensor) -> None: ...

    def with_address(self) -> torch.Tensor | None:
        """The value in memory that stays the same as it, whoever looks there; None where there can be none."""


class BackingOfParameter(Backing, Protocol):
    """The same of a parameter. ``gradient`` is what ``parameter.grad`` gives and takes; one that is not ``trainable``
    has none."""

    gradient: torch.Tensor | None
    trainable: bool

    @property
    def gradient_so_far(self) -> torch.Tensor | None: ...

    def point_to(self, memory: Alias | None, value: torch.Tensor) -> None: ...


class View:
    """A view of another backing's value: one output of ``function`` applied to it."""

    def __init__(self, base: Backing, function: Callable[[torch.Tensor], Any], position: int | None) -> None:
        self.name = base.name
        self.in_use = base.in_use
        self.base = base
        self._function = function
        self._position = position

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        view = self._function(value)
        return view if self._position is None else view[self._position]  # type: ignore[no-any-return]

    def read(self) -> torch.Tensor:
        return self._of(self.base.read())

    def write(self, value: torch.Tensor) -> None:
        whole = self.base.read()
        self._of(whole).copy_(value)
        self.base.write(whole)

    def with_address(self) -> torch.Tensor | None:
        whole = self.base.with_address()
        return None if whole is None else self._of(whole)


class Memory:
    """Backing of a handle that looks at a tensor of the user's own now."""

    name = "a tensor"
    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def read(self) -> torch.Tensor:
        return self._value.clone()

    def write(self, value: torch.Tensor) -> None:
        self._value.copy_(value)

    def with_address(self) -> torch.Tensor:
        return self._value


def check_value(parameter: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Raise ``ConfigError`` if this would be another parameter."""
    if value.dtype != parameter.dtype or value.shape != parameter.shape:
        is_resized = value.shape != parameter.shape
        way = (
            "Resize it before, or in the model that engine.unwrap() gives"
            if is_resized
            else "Convert the model first, or set precision="
        )
        raise ConfigError(
            f"parameter {name} is {parameter.dtype} {tuple(parameter.shape)} and is held by the engine: it cannot "
            f"become {value.dtype} {tuple(value.shape)}. {way}."
        )


def check_gradient(parameter: torch.Tensor, value: Any) -> None:
    """Refuse what torch refuses as ``parameter.grad``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise RuntimeError(
            f"assigned grad is {value.dtype} {tuple(value.shape)}, and the parameter {parameter.dtype} "
            f"{tuple(parameter.shape)}"
        )
