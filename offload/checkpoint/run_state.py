"""State that a continuation needs beside the records of units: progress, parameter groups, what else the model has, and
what is known of gradients that were accumulated."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload.checkpoint.model_state import get_model_state, newcomers, set_model_state
from offload.errors import ConfigError, warn
from offload.memory import on_cpu
from offload.model.handle import Handle
from offload.optim.rule import Rule, options_of
from offload.optimizer import OffloadOptimizer
from offload.option_values import shown
from offload.progress import Progress
from offload.tiers.gradients.store import GradientStore
from offload.units import ParameterSpec, UnitSpec
from offload.update.verdict import Verdict
from swapper import OffloadError

TakeGradients = Callable[[dict[str, list[float]]], None]
"""Brings in the gradients that were accumulated, of which this is known, by parameter."""


@dataclass(frozen=True)
class Training:
    """The parts of an engine that trains which a checkpoint looks at."""

    optimizer: OffloadOptimizer
    specs: Mapping[nn.Parameter, Sequence[ParameterSpec]]
    rule: Rule
    verdict: Verdict
    gradients: GradientStore


class RunState:
    """Says where a run stands, and takes it over. No update may run while it does the latter."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitSpec],
        progress: Progress,
        gradient_dtype: torch.dtype,
        wait_for_updates: Callable[[], None],
        training: Training | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._model_state = get_model_state(model)
        """As it was when it was last asked for: the last commit may come when the model is gone."""
        self._units = units
        self.progress = progress
        self._gradient_dtype = gradient_dtype
        self.wait_for_updates = wait_for_updates
        self._training = training

    def get(self) -> dict[str, Any]:
        """All that a continuation needs beside weights and states, and what belongs to the user's objects."""
        model = self._model()
        if model is not None:
            self._model_state = get_model_state(model)
        elif self._model_state["extra"]:  # tensors are the model's own, and these are what they once were
            raise ConfigError(
                "the last step cannot be committed: the model is gone, and with it the extra states of "
                f"{', '.join(self._model_state['extra'])}. Call engine.close() while there is the model"
            )
        scale = self.progress.loss_scale
        training = self._training
        state: dict[str, Any] = {
            "step": self.progress.global_step,
            "num_backwards": self.progress.num_backwards,
            "has_other_gradients": self.progress.has_other_gradients,
            "loss_scale": None if scale is None else (scale.value, scale.num_good_steps),
            "gradient_dtype": self._gradient_dtype,
            **self._model_state,
            **self.of_optimizer(),
            "gradients": {},
        }
        for gradients in () if training is None else map(training.gradients.of, self._units):
            for spec, known in gradients.items():
                own = known.sum_squares if math.isnan(known.own_squares) else known.own_squares
                state["gradients"][spec.name] = (own, known.scale, known.first_asked)
        return state

    def warn_of_newcomers(self, objects: Iterable[Any], way: str) -> None:
        """Warn of weights that are not saved with the engine's, nor with ``objects``; ``way`` says how to have them."""
        model = self._model()
        own = [item for item in objects if isinstance(item, nn.Module)]
        saved = {id(parameter) for module in own for parameter in module.parameters()}
        found = {} if model is None else newcomers(model)
        names = [name for name, parameter in found.items() if id(parameter) not in saved]
        if names:
            warn(
                f"{len(names)} parameters that came into the model after the engine was made ({names[0]}, ...) are not "
                f"saved; where they replaced others, those are. Change the model before the engine is made, or {way}."
            )

    @property
    def model(self) -> nn.Module:
        """The model. Raises ``OffloadError`` if it is gone."""
        model = self._model()
        if model is None:
            raise OffloadError("the model is gone: there is nothing to save or load")
        return model

    def of_optimizer(self) -> dict[str, Any]:
        """``groups``: the options of each parameter group, and the names of its parameters. ``states``: by parameter
        the steps that it has taken, and what lies in no tile. ``shared``: what the optimizer keeps beside both, if it
        does. Empty if nothing is trained."""
        training = self._training
        if training is None:
            return {"groups": [], "states": {}}
        rule = training.rule
        if not rule.repeatable:
            self.wait_for_updates()  # which change what it keeps beside its tiles
        groups = []
        for group in training.optimizer.param_groups:
            names = [spec.name for parameter in group["params"] for spec in training.specs[parameter]]
            groups.append({"options": options_of(group), "parameters": names})
        steps = training.verdict.num_steps.items()
        with on_cpu():
            states = {spec.name: {"steps": step, **rule.loose_states(spec, step)} for spec, step in steps}
        shared = rule.get_shared()
        return {"groups": groups, "states": states} | ({"shared": shared} if shared else {})

    def set(self, state: dict[str, Any], take_gradients: TakeGradients) -> None:
        """Take over what ``get`` gave, of a run with the same parameter groups."""
        progress = self.progress
        progress.global_step = state["step"]
        if state["loss_scale"] is not None and progress.loss_scale is not None:
            progress.loss_scale.value, progress.loss_scale.num_good_steps = state["loss_scale"]
        model = self._model()
        if model is not None:
            set_model_state(model, state)
            for parameter in model.parameters():
                if isinstance(parameter, Handle):  # a graph from before needs the values of before
                    increment_version(parameter._backing.in_use)
        if self._training is None or not state["groups"]:
            return
        self._set_training(state, self._training)
        take_gradients(state["gradients"])
        progress.num_backwards, progress.has_other_gradients = state["num_backwards"], state["has_other_gradients"]

    def check(self, state: dict[str, Any]) -> None:
        """Raise ``ConfigError`` for options that parameter groups here cannot have. Nothing has changed."""
        training = self._training
        if training is None:
            return
        for index, (own, saved) in enumerate(zip(training.optimizer.param_groups, state["groups"], strict=False)):
            for name, value in saved["options"].items():
                if name in own and not _alike(own[name], value):
                    raise ConfigError(
                        f"option {name} of parameter group {index} is {shown(value)} there and {shown(own[name])} "
                        "here. Nothing has changed"
                    )
            specs = [spec for parameter in own["params"] for spec in training.specs[parameter]]
            if specs:
                training.rule.check_options(specs[0], {**own, **saved["options"]})

    def _set_training(self, state: dict[str, Any], training: Training) -> None:
        for own, saved_group in zip(training.optimizer.param_groups, state["groups"], strict=True):
            own.update(saved_group["options"])
        num_steps = {}
        for unit in self._units:
            for spec in unit.trainable:
                of_spec = dict(state["states"].get(spec.name, {}))
                steps = of_spec.pop("steps", 0)
                if steps:
                    training.rule.set_loose_states(spec, of_spec)
                    num_steps[spec] = steps
                else:
                    training.rule.forget_states(spec)
        training.verdict.num_steps = num_steps
        if "shared" in state:
            training.rule.set_shared(state["shared"])
        training.optimizer.zero_grad()


def _alike(own: Any, saved: Any) -> bool:
    """The two can be values of one option."""
    if own is None or saved is None:
        return True
    if isinstance(own, (tuple, list)):
        is_list = isinstance(saved, (tuple, list)) and len(own) == len(saved)
        return is_list and all(map(_alike, own, saved))
    if isinstance(own, bool):
        return isinstance(saved, (bool, int)) and saved in (False, True)
    if isinstance(own, (int, float, torch.Tensor)):
        return isinstance(saved, (int, float)) or (isinstance(saved, torch.Tensor) and saved.numel() == 1)
    return isinstance(saved, type(own))
