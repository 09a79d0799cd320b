"""The optimizer that users and schedulers see: parameter groups over handles; the states are the engine's.

[Note: One optimizer, one object] The optimizer that a user has built stays the object that it is, with its groups,
attributes, hooks and methods: its class becomes a subclass of its own whose ``step``, ``zero_grad``, ``state`` and
state dicts are the engine's (``OffloadOptimizer.over``). So whatever holds it, a scheduler or a trainer, holds the
engine's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.errors import ConfigError
from offload.optim.rule import Group, options_of
from offload.optimizer_state import States, StateView
from offload.progress import Progress
from offload.torch_internals import never_compiled

_POSITION = "engine"


class Steps(Protocol):
    """Engine, as the optimizer asks it."""

    def trains(self, parameter: nn.Parameter) -> bool: ...

    def accept(self, parameter: nn.Parameter) -> None: ...

    def take_step(self, loss_scale: float | None = None) -> None: ...

    def skip_step(self) -> None: ...

    def zero_grad(self, parameters: Collection[nn.Parameter]) -> None: ...


@dataclass(eq=False)
class _EngineSide:
    """The part of the engine behind the optimizer."""

    states: States
    progress: Progress
    view: Any
    """The states that ``optimizer.state`` gives."""
    engine: Steps | None = None
    """None while the engine is being made."""
    is_stepping: bool = False


class OffloadOptimizer(torch.optim.Optimizer):
    """Parameter groups as of any ``torch.optim.Optimizer``; ``step`` is the engine's ``step``."""

    _step_supports_amp_scaling = True
    """For ``torch.amp.GradScaler``: gradients may come as they are. For the time of a step it sets ``found_inf`` and
    ``grad_scale``, which they are to be divided by (None: it is done)."""

    _engine_side: _EngineSide

    def __init__(self, groups: list[Group], states: States, progress: Progress) -> None:
        self._engine_side = _EngineSide(states, progress, StateView(states))
        torch.optim.Optimizer.__init__(self, groups, options_of(groups[0]))

    @classmethod
    def over(
        cls, source: torch.optim.Optimizer, groups: list[Group], states: States, progress: Progress
    ) -> OffloadOptimizer:
        """Make ``source`` the engine's, over these groups. See [Note: One optimizer, one object]."""
        own = vars(source)
        own.pop("step", None)  # a scheduler's, which counts steps: ours does that, too
        entries = {key: value for key, value in source.state.items() if not isinstance(key, torch.Tensor)}
        own.pop("state", None)
        source.__class__ = _class_over(type(source))  # type: ignore[arg-type]
        optimizer = cast(OffloadOptimizer, source)
        optimizer._engine_side = _EngineSide(states, progress, StateView(states, entries))
        optimizer.param_groups = groups
        return optimizer

    def attach(self, engine: Steps) -> None:
        """Steps and new parameters are those of ``engine`` from now on."""
        self._engine_side.engine = engine

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of each parameter that has taken a step, as handles."""
        return self._engine_side.view

    @state.setter
    def state(self, value: Mapping[Any, dict[str, Any]]) -> None:
        self._engine_side.view.become(value)

    def step(self, closure: Callable[[], float] | None = None, **other: Any) -> float | None:  # type: ignore[override]
        """Take the step. As in ``torch.optim``, a ``closure`` computes the loss and its gradients before it, once.
        Raises ``ConfigError`` for other arguments, which only a step that is called once could see.

        With ``torch.amp.GradScaler`` the gradients are divided by its scale, and where one is infinite nothing happens.
        """
        if other:
            raise ConfigError(
                f"engine.optimizer.step() takes a closure alone, not {', '.join(other)}: set an option of param_groups "
                "before the step, which sees it there"
            )
        side = self._engine_side
        was_stepping, side.is_stepping = side.is_stepping, True
        try:
            loss: float | None = _step_with_hooks(self, closure)
            return loss
        finally:
            side.is_stepping = was_stepping
            self._opt_called = True  # what schedulers look at

    step.hooked = True  # type: ignore[attr-defined]  # torch calls no hooks beside
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers put none of their own in its place

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used; without ``set_to_none`` they become zeros."""
        if set_to_none:
            self._engine.zero_grad([parameter for group in self.param_groups for parameter in group["params"]])
        else:
            torch.optim.Optimizer.zero_grad(self, set_to_none=False)

    def add_param_group(self, param_group: Group) -> None:
        """As in ``torch.optim``, for parameters that the engine holds. Raises ``ConfigError`` for others."""
        if self._engine_side.engine is not None:
            params = param_group["params"]
            if not isinstance(params, set):  # which torch refuses
                params = [params] if isinstance(params, torch.Tensor) else list(params)
            for parameter in params:
                self._engine.accept(parameter[1] if isinstance(parameter, tuple) else parameter)
            param_group = {**param_group, "params": params}
        _class_of_user(self).add_param_group(self, param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "engine.optimizer cannot be copied or pickled: its states are stored in the engine. "
            "Save optimizer.state_dict()."
        )

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer, with ordinary tensors. Waits for the update.

        Beside the states it has the fp32 masters of 16-bit weights, and under ``"engine"`` the step and the loss scale:
        with the model's state dict that is all that a continuation with the same bits needs. What is stored on NVMe is
        copied to a nameless file there, so that it takes no memory; it goes when the tensors go.
        """
        side = self._engine_side
        resting, side.view = side.view, {**side.view.entries, **side.states.of_all()}
        try:
            return {**_class_of_user(self).state_dict(self), _POSITION: side.progress.state_dict()}
        finally:
            side.view = resting

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups' options and states, as ``state_dict`` gave them. Weights stay."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = copy.deepcopy(state_dict["param_groups"])
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups than the optimizer")
        self._take_options(groups)
        by_index: dict[Hashable, nn.Parameter] = {
            index: parameter
            for own, loaded in zip(self.param_groups, groups, strict=True)
            for index, parameter in zip(loaded["params"], own["params"], strict=True)
        }
        self.state = {by_index.get(key, key): states for key, states in state_dict["state"].items()}
        if _POSITION in state_dict:
            self._engine_side.progress.load_state_dict(state_dict[_POSITION])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _take_options(self, groups: Sequence[Group]) -> None:
        """Groups have the options that were loaded and no others, and after that what the user's class makes of them
        (``__setstate__``). An optimizer by name has no such class: it keeps its options, and decays as its name says.
        """
        kind, side = _class_of_user(self), self._engine_side
        self.param_groups = [dict(own) for own in self.param_groups]  # who holds one of before has that, as in torch
        for own, loaded in zip(self.param_groups, groups, strict=True):
            options = options_of(loaded)
            if kind is torch.optim.Optimizer:
                options.pop("decoupled_weight_decay", None)
            else:
                for name in own.keys() - options.keys() - {"params", "param_names"}:
                    del own[name]
            own.update(options)
        resting, side.view = side.view, {}  # states have been converted by then: it is not to bring them in
        try:
            kind.__setstate__(self, {})
        finally:
            side.view = resting

    @property
    def _engine(self) -> Steps:
        engine = self._engine_side.engine
        if engine is None:
            raise RuntimeError("the optimizer's engine is not made yet")
        return engine


@cache
def _class_over(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of the user's, under its name, with what is the engine's. It has no other base: only then may an
    object change its class."""
    own = {name: value for name, value in vars(OffloadOptimizer).items() if name not in ("__dict__", "__weakref__")}
    if kind.zero_grad is not torch.optim.Optimizer.zero_grad:
        del own["zero_grad"]  # a user's own may do something else, gradient by gradient
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _class_of_user(optimizer: OffloadOptimizer) -> type[torch.optim.Optimizer]:
    """The class that the engine's stands on."""
    return type(optimizer).__mro__[1]


@never_compiled
@torch.no_grad()
def _step(optimizer: OffloadOptimizer, closure: Callable[[], float] | None = None) -> float | None:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        optimizer._engine.take_step()
    elif not found_inf:
        scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
        optimizer._engine.take_step(1.0 if scale is None else float(scale))
    else:
        optimizer._engine.skip_step()
    return loss


_step_with_hooks = torch.optim.Optimizer.profile_hook_step(_step)
"""The same, between the hooks that users have registered."""


def refuse_others(own: OffloadOptimizer) -> RemovableHandle:
    """From now on, a step of another optimizer over parameters that the engine of ``own`` trains raises
    ``ConfigError``: it would change weights beside the engine, and keep its states in memory of its own. Returns what
    ends it."""
    of_engine = weakref.ref(own)

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = of_engine()
        if own is None:
            return
        if optimizer is own:
            if not own._engine_side.is_stepping:
                raise ConfigError(
                    f"this is the step that {type(own).__name__} had before the engine was made, and it would change "
                    "weights beside the engine: call optimizer.step(), which is another one since"
                )
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
