"""State of a model beside the weights that an engine holds: what else a state dict has, and the config.

Buffers, parameters that are no floating-point numbers (the engine leaves them in the model) and extra states rest in
the description of a checkpoint, see ``METADATA_BYTES_MAX``. So do values that a module without parameters puts into its
state dict by itself: a metric of ``torchmetrics`` keeps its persistent states in attributes.
"""

from __future__ import annotations

import contextlib
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
    """``buffers``: tensors by their names in a state dict, the model's own. ``extra``: extra states, and what modules
    without parameters put into a state dict by themselves. ``configs``: the content of files."""
    buffers = dict(_tensors(model))
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    for prefix, module in _with_own_state_dict(model):
        own = {_join(prefix, name): value for name, value in module.state_dict().items()}
        extra |= {name: value for name, value in own.items() if name not in buffers and name not in extra}
    return {"buffers": buffers, "extra": extra, "configs": configs_of(model)}


def set_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take over buffers and extra states, in place. They have been compared: see ``first_difference``."""
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name in state["buffers"]:
                values = state["buffers"][name]  # dense ones, in a description
                tensor.copy_(values if tensor.layout is torch.strided else values.to_sparse(layout=tensor.layout))
    extra = state.get("extra", {})
    for prefix, module in _with_own_state_dict(model):
        known = {name: value for name, value in module.state_dict().items() if _join(prefix, name) in extra}
        own = {name: _beside(value, extra[_join(prefix, name)]) for name, value in known.items()}
        if own:
            with _taking(prefix):
                module.load_state_dict(own, strict=False)
    for name, module in _with_extra_state(model):
        if name in extra:
            with _taking(name):
                module.set_extra_state(extra[name])


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


def _with_own_state_dict(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules without parameters whose class says what a state dict has of them."""
    found: set[nn.Module] = set()
    for prefix, module in model.named_modules():
        if module in found or not _writes_state_dict(module) or next(module.parameters(), None) is not None:
            continue
        found.update(module.modules())
        yield prefix, module


def _writes_state_dict(module: nn.Module) -> bool:
    kind = type(module)
    return kind.state_dict is not nn.Module.state_dict or kind._save_to_state_dict is not nn.Module._save_to_state_dict


def _beside(here: Any, there: Any) -> Any:
    """What was saved, on the device of what it replaces."""
    are_tensors = isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor)
    return there.to(here.device) if are_tensors else there


@contextlib.contextmanager
def _taking(name: str) -> Iterator[None]:
    """Around code of the user's that takes what a checkpoint has."""
    try:
        yield
    except Exception as error:
        raise OffloadError(f"{name} does not take the extra state that the checkpoint has: {error!r}") from error


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
