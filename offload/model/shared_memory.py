"""``tensor.data = parameter.data``: an ordinary tensor gets the memory of a parameter that rests in the engine.

A handle has no memory, and torch asks it for nothing else: the tensor would look at address 0. So the assignment itself
is watched. The tensor gets a copy, which is an alias of the parameter from then on: see ``aliases``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from offload.errors import ConfigError
from offload.model.aliases import Alias
from offload.model.backing import ParameterBacking
from offload.model.handle import Handle
from offload.torch_internals import data, watch_data


@cache
def share_memory_of_handles() -> None:
    """Have tensors that a handle is assigned to share its value, in the whole process."""
    watch_data(_set)


def _set(tensor: torch.Tensor, value: Any) -> None:
    data.__set__(tensor, _memory_of(value) if isinstance(value, Handle) else value)


def _memory_of(handle: Handle) -> torch.Tensor:
    backing = handle.backing
    if isinstance(backing, ParameterBacking):
        value = handle.value()
        if backing.follow(Alias(value)):
            return value
    raise ConfigError(
        f"tensor.data = parameter.data, of {backing.name}: the two would be one memory, which the engine sees to for "
        "whole parameters where the CPU computes. Take a copy: tensor.data = parameter.detach().clone()"
    )
