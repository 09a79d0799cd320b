"""The backing of a handle: the interface, and two simple kinds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

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


class BackingOfParameter(Backing, Protocol):
    """The same of a parameter. ``gradient`` is what ``parameter.grad`` gives and takes; one that is not ``trainable``
    has none."""

    gradient: torch.Tensor | None
    trainable: bool

    @property
    def gradient_so_far(self) -> torch.Tensor | None: ...

    def point_to(self, memory: Alias, value: torch.Tensor) -> None: ...


class View:
    """A view of another backing's value: one output of ``function`` applied to it."""

    def __init__(self, base: Backing, function: Callable[[torch.Tensor], Any], position: int | None) -> None:
        self.name = base.name
        self.in_use = base.in_use
        self._base = base
        self._function = function
        self._position = position

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        view = self._function(value)
        return view if self._position is None else view[self._position]  # type: ignore[no-any-return]

    def read(self) -> torch.Tensor:
        return self._of(self._base.read())

    def write(self, value: torch.Tensor) -> None:
        whole = self._base.read()
        self._of(whole).copy_(value)
        self._base.write(whole)


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
