"""The hooks that stand in a model, and how they get there and out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.torch_internals import same_number
from offload.units import UnitSpec


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

    def at_unit(self, unit: UnitSpec, before: HookOfModel, after: HookOfModel) -> None:
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
        for parameter in parameters:  # the handle's own method would do both
            self._removers.append(torch.Tensor.register_post_accumulate_grad_hook(parameter, hook))

    def add(self, hook: Any) -> None:
        """One that stands in the model already, with a ``remove`` of its own."""
        self._removers.append(hook)

    def remove(self) -> None:
        """Take them out of the model."""
        for hook in self._removers:
            hook.remove()
        self._removers.clear()
