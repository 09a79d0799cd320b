"""The hooks that stand in a model, and how they get there and out of it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError
from offload.model.outside_of_graphs import outside_of_graphs
from offload.model.unit_in_model import UnitInModel
from offload.torch_internals import itself, same_number
from offload.units import ParameterSpec, UnitSpec


class NotScriptable(ConfigError, AttributeError, explained=False):
    """A hook has no name. ``torch.jit.script`` is the one that cannot do without."""


class HookOfModel(partial[Any]):
    """A hook that belongs to its model: in a ``deepcopy`` of the module it does nothing."""

    @property
    def __name__(self) -> str:
        raise NotScriptable(
            "torch.jit.script cannot compile the engine's hooks. Script the model that engine.unwrap() gives, or one "
            "that is built anew and has loaded model.state_dict()."
        )

    def __deepcopy__(self, memo: Any) -> HookOfModel:
        return HookOfModel(_nothing)

    def __reduce__(self) -> Any:
        return HookOfModel, (_nothing,)


class TakesGradients(Protocol):
    """Taker of the gradients that autograd leaves at parameters."""

    def take_gradient(self, unit: UnitInModel, spec: ParameterSpec, parameter: torch.Tensor) -> None:
        """The parameter has its gradient: one of the unit's, or the handle in its place."""


def _take_gradient(
    hooks: weakref.ref[TakesGradients], unit: weakref.ref[UnitInModel], index: int, parameter: torch.Tensor
) -> None:
    """Weakly: the collector does not see into hooks of tensors."""
    if (taker := hooks()) is not None and (owner := unit()) is not None:
        taker.take_gradient(owner, owner.spec.parameters[index], parameter)


_take_gradient_outside = outside_of_graphs(_take_gradient, "the engine takes gradients as they come")
"""A compiled function may call a backward, and the compiler looks at what that calls."""


def _nothing(*args: Any) -> None:
    return None


class InstalledHooks:
    """All hooks of one engine."""

    def __init__(self) -> None:
        self._numbered: list[Sequence[Any]] = []
        """The two hooks of the first unit at a module, of the second one, ...: those at other modules have their
        numbers."""
        self._num_units_at: Counter[nn.Module] = Counter()
        """Of each module so far: hooks of one module need numbers of their own."""
        self._removers: list[Any] = []

    def in_model(self, unit: UnitInModel, handles: Mapping[ParameterSpec, nn.Parameter], taker: TakesGradients) -> None:
        """Put the hooks of a unit into the model: those ``around`` its modules, and those of its gradients."""
        self.at_unit(unit.spec, *unit.around)
        for index, (parameter, spec) in enumerate(zip(unit.parameters, unit.spec.parameters, strict=True)):
            unit.sites += [(module, name, handles[spec], parameter) for module, name in spec.sites]
            leaves: tuple[nn.Parameter, ...] = parameter, handles[spec]
            if spec.piece is not None:
                spec.piece.weight, spec.piece.around, leaves = parameter, unit.around, leaves[1:]
            if not spec.trainable:
                continue
            hook = HookOfModel(_take_gradient_outside, weakref.ref(taker), weakref.ref(unit), index)
            if spec.piece is not None:
                spec.piece.on_gradient = hook
            self.at_gradients(leaves, hook)

    def at_unit(self, unit: UnitSpec, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Put a unit's hooks around the forward of its modules."""
        for module in unit.modules:
            # Before all others: one that raises must not leave our hook after the forward without ours before it.
            first = partial(module.register_forward_pre_hook, before, prepend=True)
            last = partial(module.register_forward_hook, after, always_call=True)
            num_before = self._num_units_at[module]
            self._num_units_at[module] += 1
            known = self._numbered[num_before] if num_before < len(self._numbered) else (None, None)
            of_module = [same_number(other, hook) for other, hook in zip(known, (first, last), strict=True)]
            self._numbered[num_before : num_before + 1] = [of_module]
            self._removers += of_module

    def at_gradients(self, parameters: Iterable[nn.Parameter], hook: Callable[[torch.Tensor], None]) -> None:
        """Call ``hook`` when one of these has its gradient."""
        with itself():  # the handle's own method would do both
            for parameter in parameters:
                self._removers.append(torch.Tensor.register_post_accumulate_grad_hook(parameter, hook))

    def add(self, hook: Any) -> None:
        """One that stands in the model already, with a ``remove`` of its own."""
        self._removers.append(hook)

    def remove(self) -> None:
        """Take them out of the model."""
        for hook in self._removers:
            hook.remove()
        self._removers.clear()
