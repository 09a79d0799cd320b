"""State of a model beside the weights that an engine holds: what else a state dict has, and the config.

Buffers, parameters that are no floating-point numbers (the engine leaves them in the model) and extra states rest in
the description of a checkpoint, see ``METADATA_BYTES_MAX``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.checkpoint.hugging_face import configs_of
from offload.model.handle import Handle
from swapper import OffloadError

_EXTRA = "_extra_state"
"""Name in a state dict of what ``nn.Module.get_extra_state`` gives, behind the module's."""


def get_model_state(model: nn.Module) -> dict[str, Any]:
    """``buffers``: tensors by their names in a state dict, the model's own. ``extra``: extra states. ``configs``: the
    content of files."""
    return {
        "buffers": dict(_tensors(model)),
        "extra": {name: module.get_extra_state() for name, module in _with_extra_state(model)},
        "configs": configs_of(model),
    }


def set_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take over buffers and extra states, in place. They have been compared: see ``first_difference``."""
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name in state["buffers"]:
                values = state["buffers"][name]  # dense ones, in a description
                tensor.copy_(values if tensor.layout is torch.strided else values.to_sparse(layout=tensor.layout))
    for name, module in _with_extra_state(model):
        if name in state.get("extra", {}):
            try:
                module.set_extra_state(state["extra"][name])
            except Exception as error:
                raise OffloadError(
                    f"{name} does not take the extra state that the checkpoint has: {error!r}"
                ) from error


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """In what the state of a saved model is not one of this model, if in anything."""
    saved, own = there["buffers"], here["buffers"]
    for name, tensor in own.items():
        if name not in saved:
            return f"{name} is in this model and not there"
        if (tuple(tensor.shape), tensor.dtype) != (tuple(saved[name].shape), saved[name].dtype):
            return f"{name} is {_kind(saved[name])} there and {_kind(tensor)} here"
    missing = next((name for name in saved if name not in own), None)
    return None if missing is None else f"{missing} is there and not in this model"


def newcomers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that came into the model after the engine was made: neither the engine's records nor this state has
    them, and what has their name there is what was replaced."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, Handle) and parameter.is_floating_point()
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a state dict has, and parameters that the engine left in the model, which are frozen."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Handle) and not parameter.is_floating_point():
                yield _join(prefix, name), parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _join(prefix, name), buffer


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield _join(prefix, _EXTRA), module


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
