"""The optimizer that users and schedulers see: parameter groups over handles; the states are the engine's."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.errors import ConfigError
from offload.optim.rule import Group, options_of
from offload.progress import Progress
from offload.torch_internals import never_compiled

_POSITION = "engine"


class Steps(Protocol):
    """Engine, as the optimizer asks it."""

    def trains(self, parameter: nn.Parameter) -> bool: ...

    def accept(self, parameter: nn.Parameter) -> None: ...

    def take_step(self, loss_scale: float | None = None) -> None: ...

    def zero_grad(self, parameters: Collection[nn.Parameter]) -> None: ...


class States(Protocol):
    """The states that rest in the engine, by parameter as in ``torch.optim``."""

    def of_all(self) -> dict[nn.Parameter, dict[str, Any]]: ...

    def replace_all(self, states: dict[nn.Parameter, dict[str, Any]]) -> None: ...

    def parameters(self) -> list[nn.Parameter]: ...

    def of(self, parameter: nn.Parameter) -> dict[str, Any]: ...

    def replace(self, parameter: nn.Parameter, states: dict[str, Any]) -> None: ...


class OffloadOptimizer(torch.optim.Optimizer):
    """Parameter groups as of any ``torch.optim.Optimizer``; ``step`` is the engine's ``step``.

    The groups are those of ``source``, if it is given: its ``step`` and ``zero_grad`` are this one's from now on, so
    that a scheduler that was built on it keeps working.
    """

    _step_supports_amp_scaling = True
    """For ``torch.amp.GradScaler``: gradients may come as they are. For the time of a step it sets ``found_inf`` and
    ``grad_scale``, which they are to be divided by (None: it is done)."""

    def __init__(
        self,
        groups: list[Group],
        states: States,
        progress: Progress,
        source: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(groups, options_of(groups[0]) if source is None else source.defaults)
        self._states = states
        self._progress = progress
        self._source = source
        self.state = _StateView(states)  # type: ignore[assignment]
        if source is not None:
            source.state = self.state
            source.step = _Forward(self)  # type: ignore[method-assign,assignment]
            for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
                setattr(source, name, getattr(self, name))

    def attach(self, engine: Steps) -> None:
        """Steps and new parameters are those of ``engine`` from now on."""
        self._engine = engine

    @never_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the step. As in ``torch.optim``, a ``closure`` computes the loss and its gradients before it, once.

        With ``torch.amp.GradScaler`` the gradients are divided by its scale, and where one is infinite nothing happens.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            self._engine.take_step()
        elif not found_inf:
            scale: torch.Tensor | None = getattr(self, "grad_scale", None)
            self._engine.take_step(1.0 if scale is None else float(scale))
        if self._source is not None:
            self._source._opt_called = True  # type: ignore[attr-defined]  # what schedulers on it look at
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used; without ``set_to_none`` they become zeros."""
        if set_to_none:
            self._engine.zero_grad([parameter for group in self.param_groups for parameter in group["params"]])
        else:
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: Group) -> None:
        """As in ``torch.optim``, for parameters that the engine holds. Raises ``ConfigError`` for others."""
        engine: Steps | None = getattr(self, "_engine", None)
        if engine is not None:
            params = param_group["params"]
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            for parameter in params:
                engine.accept(parameter[1] if isinstance(parameter, tuple) else parameter)
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "engine.optimizer cannot be copied or pickled: its states rest in the engine. Save optimizer.state_dict()."
        )

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer, with ordinary tensors. Waits for the update.

        Beside the states it has the fp32 masters of 16-bit weights, and under ``"engine"`` the step and the loss scale:
        with the model's state dict that is all that a continuation with the same bits needs. What rests on NVMe is
        copied to a nameless file there, so that it takes no memory; it goes when the tensors go.
        """
        resting = self.state
        self.state = defaultdict(dict, self._states.of_all())  # type: ignore[arg-type]
        try:
            return {**super().state_dict(), _POSITION: self._progress.state_dict()}
        finally:
            self.state = resting

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
        self._states.replace_all(
            {by_index[index]: states for index, states in state_dict["state"].items() if index in by_index}
        )
        if _POSITION in state_dict:
            self._progress.load_state_dict(state_dict[_POSITION])


class _StateView(MutableMapping[nn.Parameter, dict[str, Any]]):
    """``optimizer.state``: the states of each parameter that has taken a step, as handles."""

    def __init__(self, states: States) -> None:
        self._states = states

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._states.of(parameter)

    def __setitem__(self, parameter: nn.Parameter, states: dict[str, Any]) -> None:
        self._states.replace(parameter, states)

    def __delitem__(self, parameter: nn.Parameter) -> None:
        raise ConfigError(
            "optimizer states rest in the engine and cannot be taken out. To begin anew: "
            'optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})'
        )

    def clear(self) -> None:
        """Make all states what they are before the first step."""
        self._states.replace_all({})

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._states.parameters())

    def __len__(self) -> int:
        return len(self._states.parameters())


def refuse_others(own: OffloadOptimizer) -> RemovableHandle:
    """From now on, a step of another optimizer over parameters that the engine of ``own`` trains raises
    ``ConfigError``: it would change weights beside the engine, and keep its states in memory of its own. Returns what
    ends it."""
    of_engine = weakref.ref(own)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = of_engine()
        if own is None or optimizer is own:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        num_held = sum(map(own._engine.trains, parameters))
        if num_held:
            raise ConfigError(
                f"{type(optimizer).__name__} was built over {num_held} parameters that an OffloadEngine holds and "
                "updates. Use engine.optimizer in its place, or build it before the engine and hand it over: "
                "OffloadEngine(model, optimizer=optimizer)."
            )

    return register_optimizer_step_pre_hook(refuse)


class _Forward:
    """The ``step`` of the optimizer that the user had built."""

    _wrapped_by_lr_sched = True
    """Schedulers put a step of their own in place of one without this mark, or warn that theirs is gone."""

    def __init__(self, target: OffloadOptimizer) -> None:
        self._target = target

    def __call__(self, closure: Callable[[], float] | None = None) -> float | None:
        loss: float | None = self._target.step(closure)
        return loss
