"""Metadata of a parameter beside its value: a class, a gradient, attributes and hooks from before the engine was made,
and strides (see ``strides``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.handle import Handle
from offload.model.strides import say_strides
from offload.units import ParameterSpec, UnitSpec

_Hooks = Mapping[int, Callable[[Any], Any]]


class ParameterMetadata:
    """Taken from the model's parameters, given to the handles that stand for them."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        """Raises ``ConfigError`` for hooks on a weight that will be used in pieces. Nothing has changed then."""
        self._kinds: dict[ParameterSpec, type[nn.Parameter]] = {}
        self._attributes: dict[ParameterSpec, dict[str, Any]] = {}
        self._gradients: dict[ParameterSpec, torch.Tensor] = {}
        self._hooks: dict[ParameterSpec, list[tuple[str, _Hooks, list[int]]]] = {}
        self._odd: dict[str, tuple[int, ...]] = {}
        """The strides of parameters that are not contiguous."""
        for unit in units:
            for spec in unit.parameters:
                self._take(spec)

    def give(self, handles: Mapping[ParameterSpec, nn.Parameter], in_use: Mapping[ParameterSpec, nn.Parameter]) -> None:
        """Give all of it to the handles. The ordinary parameters in use get the class, and have the attributes of the
        handle as their own, now and later. Warns of strides that are lost."""
        say_strides(self._odd)
        for spec, kind in self._kinds.items():
            handle = handles[spec]
            if isinstance(handle, Handle) and not isinstance(handle, kind):  # a weight in pieces has several specs
                handle.become_kind(kind)
            in_use[spec].__class__ = kind
        for spec, attributes in self._attributes.items():
            own = vars(handles[spec])
            own.update({name: value for name, value in attributes.items() if name not in own})
        for spec, parameter in in_use.items():
            if spec.packing is None and spec.piece is None and spec.outer is None:
                parameter.__dict__ = vars(handles[spec])
            else:  # has some that the tensor itself consists of
                vars(parameter).update(self._attributes.get(spec, {}), _backing=vars(handles[spec])["_backing"])
        for spec, gradient in self._gradients.items():
            handle = handles[spec]
            if handle.grad is None and handle.requires_grad:  # likewise
                handle.grad = gradient.to(handle.dtype)
        for spec, kinds in self._hooks.items():
            for method, hooks, keys in kinds:
                for key in keys:
                    getattr(handles[spec], method)(_while_registered(hooks, key))

    def _take(self, spec: ParameterSpec) -> None:
        parameter = spec.parameter
        if isinstance(parameter, Handle):
            return
        if spec.packing is None and not parameter.is_contiguous():
            self._odd[spec.name if spec.piece is None else spec.piece.whole.name] = parameter.stride()
        layout = spec.packing or spec.outer
        own = frozenset[str]() if layout is None else layout.own_attributes
        if type(parameter) is not nn.Parameter and layout is None:
            self._kinds[spec] = type(parameter)
        if attributes := {name: value for name, value in vars(parameter).items() if name not in own}:
            self._attributes[spec] = attributes
        if parameter.grad is not None:
            self._gradients[spec] = parameter.grad
        hooks: dict[str, Any] = {
            "register_hook": parameter._backward_hooks,
            "register_post_accumulate_grad_hook": parameter._post_accumulate_grad_hooks,  # type: ignore[attr-defined]
        }
        present = [(method, found, list(found)) for method, found in hooks.items() if found]
        if present and spec.piece is not None:
            raise ConfigError(
                f"parameter {spec.piece.whole.name} has hooks and is large: it would be used in pieces, and hooks "
                "would not see its gradient whole. Remove them (handle.remove())."
            )
        if present and not parameter.requires_grad:
            raise ConfigError(
                f"parameter {spec.name} has hooks and is frozen: none can be put on what stands in its place. "
                "Remove them (handle.remove()), or make the engine while it requires grad, and freeze it then."
            )
        if present:
            self._hooks[spec] = present


def _while_registered(hooks: _Hooks, key: int) -> Callable[[Any], Any]:
    """The hook, as long as its owner has not removed it."""
    hook = hooks[key]
    return lambda value: hook(value) if key in hooks else None
