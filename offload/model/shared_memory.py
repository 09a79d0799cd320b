"""``tensor.data = parameter.data``: an ordinary tensor gets the memory of a parameter that rests in the engine.

A handle has no memory, and torch asks it for nothing else: the tensor would look at address 0. So the assignment itself
is watched, while there are handles. The tensor gets the memory of an alias of the parameter (see ``aliases``), which
a copy is from then on.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from offload.access import ExternalAccess
from offload.errors import ConfigError
from offload.model.aliases import Alias
from offload.model.backing import ParameterBacking
from offload.model.handle import Handle
from offload.torch_internals import data

_accesses: set[int] = set()
"""Those of the handles that there are."""


class _Watched:
    """The property ``data`` of tensors whose class has none of its own."""

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        return data if tensor is None else data.__get__(tensor, kind)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        data.__set__(tensor, _memory_of(value) if isinstance(value, Handle) else value)


def share_memory_of_handles(access: ExternalAccess) -> None:
    """Have tensors that a handle is assigned to share its value, in the whole process, as long as somebody refers to
    ``access``: its handles do."""
    _accesses.add(id(access))
    weakref.finalize(access, _forget, id(access)).atexit = False
    torch.Tensor.data = _Watched()  # type: ignore[assignment]


def _forget(access: int) -> None:
    _accesses.discard(access)
    if not _accesses and isinstance(vars(torch.Tensor).get("data"), _Watched):
        del torch.Tensor.data


def _memory_of(handle: Handle) -> torch.Tensor:
    backing = handle.backing
    if isinstance(backing, ParameterBacking):
        value = handle.value()
        known = backing.newest_alias()
        if known is not None:
            return known
        if backing.follow(Alias(value)):
            return value
    raise ConfigError(
        f"tensor.data = parameter.data, of {backing.name}: the two would be one memory, which the engine sees to for "
        "whole parameters where the CPU computes. Take a copy: tensor.data = parameter.detach().clone()"
    )
