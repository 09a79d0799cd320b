"""Makes what stands in the user's model: handles for its parameters, hooks around its modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.access import ExternalAccess
from offload.model.aliases import Alias, Aliases
from offload.model.backing import ParameterBacking, PiecewiseBacking
from offload.model.distributed_handle import DistributedHandle
from offload.model.experts import ExpertsHandle
from offload.model.handle import Handle, make_handle
from offload.model.handle_backing import Backing
from offload.model.identity import take_over
from offload.model.packed_handle import PackedBacking, PackedHandle
from offload.model.piecewise import PiecewiseHandle
from offload.model.shared_memory import share_memory_of_handles
from offload.model.wrapped_handle import WrappedHandle
from offload.ranks.ranks import Ranks
from offload.spooled import Spooled
from offload.units import ParameterSpec, UnitSpec, WeightInPieces

_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True)
class Handles:
    """``of_model`` stand where the model has a parameter, one for all pieces of it; ``backings`` are those of each
    parameter or piece."""

    of_model: dict[ParameterSpec, nn.Parameter]
    backings: dict[ParameterSpec, ParameterBacking]
    aliases: Aliases

    def of_shards(self, ranks: Ranks) -> Handles:
        """The same by what this rank has of each parameter."""
        own = ranks.shard_of
        return Handles(
            {own[spec]: handle for spec, handle in self.of_model.items()},
            {own[spec]: backing for spec, backing in self.backings.items()},
            self.aliases,
        )

    def specs_by_parameter(self) -> dict[nn.Parameter, list[ParameterSpec]]:
        """The model's parameters, each with its spec, or those of its pieces in order."""
        found: dict[nn.Parameter, list[ParameterSpec]] = {}
        for spec, parameter in self.of_model.items():
            found.setdefault(parameter, []).append(spec)
        return found


def make_handles(
    units: Sequence[UnitSpec],
    shards: Sequence[UnitSpec],
    in_use: Sequence[Sequence[nn.Parameter]],
    access: ExternalAccess,
) -> Handles:
    """A handle for each parameter. ``in_use`` are the parameters in the window of each unit, ``shards`` what this rank
    has of it: the units themselves, where there is one.

    The objects that stood in the model are the handles from now on, as far as torch allows it (``identity.py``).
    """
    share_memory_of_handles(access)
    dtype, device = access.layout.dtype, access.device
    aliases = Aliases()
    backings = {
        spec: _backing(shard, own, access, parameter, aliases)
        for unit, shard, parameters in zip(units, shards, in_use, strict=True)
        for spec, own, parameter in zip(unit.parameters, shard.parameters, parameters, strict=True)
    }
    of_model: dict[ParameterSpec, nn.Parameter] = {}
    pieces: dict[WeightInPieces, list[ParameterSpec]] = {}
    for spec in backings:
        if spec.piece is not None:
            pieces.setdefault(spec.piece.whole, []).append(spec)
    of_experts = {s.piece.whole for unit in units if unit.experts for s in unit.parameters if s.piece is not None}
    for whole, specs in pieces.items():
        backing = PiecewiseBacking(whole, [backings[spec] for spec in specs])
        kind = ExpertsHandle if whole in of_experts else PiecewiseHandle
        handle = make_handle(backing, whole.shape, dtype, device, specs[0].trainable, kind)
        of_model.update(dict.fromkeys(specs, take_over(specs[0].parameter, handle, specs[0].owners)))
    for spec, own in backings.items():
        if spec.piece is None:
            handle = make_handle(own, spec.model_shape, dtype, device, spec.trainable, _kind(spec))
            of_model[spec] = take_over(spec.parameter, handle, spec.owners)
    return Handles({spec: of_model[spec] for spec in backings}, backings, aliases)


def _kind(spec: ParameterSpec) -> type[Handle]:
    if spec.distribution is not None:
        return DistributedHandle
    if spec.outer is not None:
        return WrappedHandle
    return Handle if spec.packing is None else PackedHandle


def _backing(
    unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess, in_use: nn.Parameter, aliases: Aliases
) -> ParameterBacking:
    if spec.packing is not None:
        return PackedBacking(unit, spec, spec.packing, access, in_use, aliases)
    return ParameterBacking(unit, spec, access, in_use, aliases)


def memory_of(units: Sequence[UnitSpec], dtype: torch.dtype, device: torch.device) -> dict[ParameterSpec, Alias]:
    """The memory under the parameters that will be taken over, of those that are of this kind already."""
    found = {}
    for spec in (spec for unit in units for spec in unit.parameters):
        is_plain = spec.packing is None and spec.outer is None and spec.parameter.device.type == "cpu"
        if is_plain and spec.parameter.dtype == dtype and device.type == "cpu":
            value, piece = spec.parameter.detach(), spec.piece
            if piece is not None:
                value = value[piece.start : piece.stop]
            found[spec] = Alias(value)
    return found


def give_ordinary_state_dicts(units: Sequence[UnitSpec], spooled: Spooled) -> Callable[[], None]:
    """Let state dicts hold ordinary tensors, so that code which saves them needs to know nothing of handles. They are
    ``spooled``: together they may be larger than memory. Returns the call that undoes it."""

    modules = {site.module for unit in units for spec in unit.parameters for site in spec.owners}
    hook = partial(_take_values, spooled)
    hooks = [module.register_state_dict_post_hook(hook) for module in modules]  # type: ignore[no-untyped-call]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


_last_copies: weakref.WeakKeyDictionary[Backing, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()
"""The copy of each value that the last state dict holds."""


def _take_values(spooled: Spooled, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, Handle) and not isinstance(value, nn.Parameter):  # which ``keep_vars=True`` asks for
            state_dict[prefix + name] = _value_in(state_dict, value, spooled)


def _value_in(state_dict: dict[str, Any], handle: Handle, spooled: Spooled) -> torch.Tensor:
    """The value of the handle. A tied weight is one tensor in one state dict: savers look for that."""
    last = _last_copies.get(handle.backing)
    copy = None if last is None else last()
    if copy is None or not any(other is copy for other in state_dict.values()):
        value = handle.saved()
        copy = spooled.keep(value) if type(value) is torch.Tensor else value  # wraps others
        _last_copies[handle.backing] = weakref.ref(copy)
    return copy


def convert_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Running statistics get the dtype of their layer's weights, which it mixes them with. Other buffers, such as the
    frequencies of rotary embeddings, keep theirs."""
    for module in model.modules():
        if not isinstance(module, _WITH_STATISTICS):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def move_to_device(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Bring buffers, and parameters that the engine does not manage, where the model computes. Returns the call that
    undoes what concerns recurrent modules.

    Tensors that are shared stay so. cuDNN likes the weights of recurrent modules in one piece, and torch would point
    the parameters to memory of its own, while the engine filled the old place: they are kept from it.
    """
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Handle):
                copy = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), copy)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module.__dict__["flatten_parameters"] = _nothing

    def undo() -> None:
        for module in recurrent:
            module.__dict__.pop("flatten_parameters", None)

    return undo


def _nothing() -> None:
    return None
