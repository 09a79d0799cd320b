"""The optimizer that users and schedulers see: parameter groups over handles; the states are the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError
from offload.optim.rule import Group


class Steps(Protocol):
    """What the optimizer asks of the engine. States are by parameter, as in ``torch.optim``."""

    def take_step(self) -> None: ...

    def drop_gradients(self) -> None: ...

    def optimizer_states(self) -> dict[nn.Parameter, dict[str, Any]]: ...

    def set_optimizer_states(self, states: dict[nn.Parameter, dict[str, Any]]) -> None: ...


class OffloadOptimizer(torch.optim.Optimizer):
    """Parameter groups as of any ``torch.optim.Optimizer``; ``step`` is the engine's ``step``.

    The groups are those of ``source``, if it is given: its ``step`` and ``zero_grad`` are this one's from now on, so
    that a scheduler that was built on it keeps working.
    """

    def __init__(self, groups: list[Group], engine: Steps, source: torch.optim.Optimizer | None = None) -> None:
        super().__init__(groups, {})
        self._engine = engine
        if source is not None:
            self.defaults = source.defaults
            source.state.clear()
            source.step = _Forward(self, source)  # type: ignore[method-assign,assignment]
            source.zero_grad = self.zero_grad  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the step. A closure is refused: it would run the model again in the middle of it."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure) is not supported: compute the loss, then call step()")
        self._engine.take_step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        self._engine.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer, with ordinary tensors: it holds all states in memory. Waits for the update."""
        self.state.update(self._engine.optimizer_states())  # type: ignore[arg-type]
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups' options and states, as ``state_dict`` gave them. Weights stay."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        for own, loaded in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in loaded.items() if name != "params"})
        by_index = {
            index: parameter
            for own, loaded in zip(self.param_groups, groups, strict=True)
            for index, parameter in zip(loaded["params"], own["params"], strict=True)
        }
        self._engine.set_optimizer_states(
            {by_index[index]: states for index, states in state_dict["state"].items() if index in by_index}
        )


class _Forward:
    """The ``step`` of the optimizer that the user had built."""

    def __init__(self, target: OffloadOptimizer, source: torch.optim.Optimizer) -> None:
        self._target = target
        self._source = source

    def __call__(self, closure: Callable[[], float] | None = None) -> float | None:
        self._source._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        return self._target.step(closure)
