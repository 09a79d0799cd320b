"""Mapping of an engine to the tree of a ``torch.distributed.checkpoint``: names, shapes and ranges of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from offload.checkpoint.tensors import Place
from offload.errors import ConfigError
from offload.optim.moments import scale_name
from offload.optim.rule import Rule
from offload.units import ParameterSpec, UnitSpec

TreePath = tuple[str, ...]
"""Path of something in the tree: the names from its root on."""

STATES = ("optimizer", "state")
"""Path of the states of parameters, below the root."""

GROUPS = ("optimizer", "param_groups")

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that ``get_state_dict`` leaves out: of compiled modules, and of those with activation checkpoints."""


def place_of(spec: ParameterSpec) -> Place:
    """For a parameter, a piece of one, and a rank's shard of either."""
    if spec.piece is None:
        return Place(spec.name, spec.whole_shape, spec.start)
    whole = spec.piece.whole
    return Place(whole.name, whole.shape, spec.start + spec.piece.start * math.prod(whole.shape[1:]))


def state_names(rule: Rule, spec: ParameterSpec) -> list[str]:
    """The states that rest in tiles, without the scales of codes: as others know them."""
    names = rule.names(spec)
    scales = {scale_name(name) for name in names}
    return [name for name in names if name not in scales]


def state_shape(rule: Rule, spec: ParameterSpec, name: str) -> torch.Size:
    """The shape of a state of the whole parameter."""
    whole = spec.whole or spec
    shape = rule.shape(whole, name)
    return place_of(spec).shape if shape == whole.shape else shape


def key_of(path: TreePath) -> str:
    """The name that torch gives to what is at this path of the tree."""
    return ".".join(map(str, path))


def fqn(name: str) -> str:
    """The name that others know a parameter or buffer by."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """The names that others know each parameter and buffer by, by any name that the model has for it. The first one is
    that of the optimizer's states; tied ones have several."""
    tensors = list(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    found: dict[torch.Tensor, dict[str, None]] = {}
    for name, tensor in tensors:
        found.setdefault(tensor, {})[fqn(name)] = None
    return {name: list(found[tensor]) for name, tensor in tensors}


def refuse_others(units: Sequence[UnitSpec]) -> None:
    """Raise ``ConfigError`` for parameters that are not ordinary numbers, all of them here."""
    for spec in (spec for unit in units for spec in unit.parameters):
        if spec.packing is not None:
            raise ConfigError(f"{spec.name} is quantised, and a DCP has ordinary numbers: use save_checkpoint")
        if spec.distribution is not None:
            raise ConfigError(
                f"{spec.name} is a DTensor, of which each rank has a part: use save_checkpoint, or save "
                "engine.state_dict() by torch.distributed.checkpoint"
            )
