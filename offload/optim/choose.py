"""Choice of the rule that updates the weights, and of the parameter groups, from what ``optimizer=`` is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload import option_values
from offload.config import OPTIMIZERS, OffloadConfig
from offload.errors import ConfigError
from offload.native_optimizers import MATRIX_DEFAULTS, NATIVE_OPTIMIZERS, NativeOptimizer
from offload.optim.formats import Formats
from offload.optim.kernel_rule import KernelRule
from offload.optim.matrix_rule import MATRIX_OPTIMIZERS, MatrixRule
from offload.optim.matrix_steps import ADJUSTMENTS, Algorithm
from offload.optim.rule import Group, Rule, refuse_twice
from offload.optim.torch_rule import TorchRule
from offload.units import ParameterSpec, UnitSpec

_KERNEL_OF_CLASS: Mapping[type[torch.optim.Optimizer], str] = {
    getattr(torch.optim, native.torch_class): name for name, native in NATIVE_OPTIMIZERS.items() if native.torch_class
}
"""Classes for which there is a kernel. A subclass may do something else: it runs as it is."""


@dataclass(frozen=True)
class OptimizerChoice:
    """Choice of how the model is trained: ``groups`` are parameter groups without ``params``, each with its parameters.

    ``source`` is the optimizer that the user has built, or that was built of the class that was given.
    """

    rule: Rule
    groups: list[tuple[Group, list[ParameterSpec]]]
    source: torch.optim.Optimizer | None = None

    def states(self) -> dict[ParameterSpec, dict[str, Any]]:
        """The states that the user's optimizer has already: of the whole parameter, for each of its pieces."""
        if self.source is None:
            return {}
        specs = [spec for _, specs in self.groups for spec in specs]
        of_parameter = {spec: self.source.state.get(spec.parameter, {}) for spec in specs}
        return {spec: dict(states) for spec, states in of_parameter.items() if states}


def takes_elements(optimizer: object) -> bool:
    """``config.optimizer`` takes elements one by one, with a native kernel; or there is none."""
    if isinstance(optimizer, str):
        return optimizer in NATIVE_OPTIMIZERS
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    return optimizer is None or kind in _KERNEL_OF_CLASS


def whole_parameters(optimizer: object, model: nn.Module) -> frozenset[int] | None:
    """Return the parameters of the model, by their ``id``, at which ``config.optimizer`` looks as wholes; None: it may
    be all of them. Raises ``ConfigError`` for one that it cannot take."""
    if takes_elements(optimizer):
        return frozenset()
    if isinstance(optimizer, str):
        return MATRIX_OPTIMIZERS[optimizer].whole(model)
    if isinstance(optimizer, torch.optim.Optimizer) and _of_matrices_in_torch(optimizer) is not None:
        return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return None


def choose(
    config: OffloadConfig,
    units: Sequence[UnitSpec],
    given: Callable[[nn.Parameter], bool] = lambda parameter: True,
    *,
    whole: Collection[int] | None = None,
) -> OptimizerChoice | None:
    """The rule for ``config.optimizer``; None if nothing is trained. A name or a class is for the parameters that are
    ``given``: a model may have a ``parameters`` of its own, which leaves some out. ``whole`` is what
    ``whole_parameters`` gave for the model; nothing needs it where the optimizer takes elements.

    Raises ``ConfigError`` for options that the optimizer does not have, a parameter that is not the model's, or an
    optimizer that cannot run unit by unit.
    """
    optimizer = config.optimizer
    if optimizer is None:
        return None
    every = [spec for unit in units for spec in unit.parameters]
    if not isinstance(optimizer, torch.optim.Optimizer):
        every = [spec for spec in every if given(spec.parameter)]
    trainable = [spec for spec in every if spec.trainable]
    if isinstance(optimizer, str) and optimizer in MATRIX_OPTIMIZERS:
        return _of_matrices(config, optimizer, every, whole)
    if isinstance(optimizer, str):
        kernel = NATIVE_OPTIMIZERS[optimizer]
        settings = _known_options(config.optimizer_settings, kernel.defaults, optimizer)
        group = {**kernel.defaults, **_checked(settings, kernel.defaults)}
        return _native(config, kernel, [(group, trainable)])
    if isinstance(optimizer, type):
        built = _build(optimizer, config.optimizer_settings)
        groups = [(built.param_groups[0], trainable)]
    else:
        built = optimizer
        if config.optimizer_settings:
            raise ConfigError(
                f"{', '.join(config.optimizer_settings)}: the optimizer that was given is built already; set this there"
            )
        _refuse_that_of_an_engine(built)
        _refuse_replaced_step(built)
        specs: dict[int, list[ParameterSpec]] = {}
        for spec in trainable:
            specs.setdefault(id(spec.parameter), []).append(spec)
        refuse_twice(built.param_groups, lambda each: specs[id(each)][0].name if id(each) in specs else None)
        groups = [(group, _specs_of(group, specs)) for group in built.param_groups]
    if type(built) in _KERNEL_OF_CLASS:
        return _native(config, NATIVE_OPTIMIZERS[_KERNEL_OF_CLASS[type(built)]], groups, built)
    name = _of_matrices_in_torch(built)
    if name is not None:
        algorithms = dict.fromkeys((spec for _, specs in groups for spec in specs), MATRIX_OPTIMIZERS[name].inner)
        return _matrix(config, name, algorithms, groups, built)
    for option in ("moments_dtype", "master_dtype"):
        if getattr(config, option) != "fp32":
            raise ConfigError(
                f"{option}={getattr(config, option)!r} needs an optimizer with a kernel: {', '.join(OPTIMIZERS)}"
            )
    if isinstance(optimizer, type):
        _refuse_states(built)
    return OptimizerChoice(TorchRule(built, groups, Formats.of(config), config.gradient_dtype), groups, built)


def _of_matrices_in_torch(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name that torch's optimizer of matrices has here; None for any other."""
    kinds = {getattr(torch.optim, kind.torch_class, None): name for name, kind in MATRIX_OPTIMIZERS.items()}
    return kinds.get(type(optimizer))


def _native(
    config: OffloadConfig,
    kernel: NativeOptimizer,
    groups: list[tuple[Group, list[ParameterSpec]]],
    source: torch.optim.Optimizer | None = None,
) -> OptimizerChoice:
    if any(group.get("differentiable") for group, _ in groups):
        raise ConfigError(
            "differentiable=True: there are no gradients through a step of an optimizer that updates weights where "
            "they are stored, as there are none in torch where parameters are leaves. Build it without"
        )
    dtypes = config.dtype, config.gradient_dtype
    rule = KernelRule(kernel, [group for group, _ in groups], Formats.of(config), dtypes, config.moments_dtype)
    return OptimizerChoice(rule, groups, source)


def _of_matrices(
    config: OffloadConfig, name: str, specs: Sequence[ParameterSpec], whole: Collection[int] | None
) -> OptimizerChoice:
    defaults = MATRIX_DEFAULTS[name]
    settings = _known_options(config.optimizer_settings, defaults, name)
    algorithms = MATRIX_OPTIMIZERS[name].algorithms(specs, whole)
    group = {**defaults, **_checked(settings, defaults)}
    return _matrix(config, name, algorithms, [(group, list(algorithms))])


def _matrix(
    config: OffloadConfig,
    name: str,
    algorithms: Mapping[ParameterSpec, Algorithm],
    groups: list[tuple[Group, list[ParameterSpec]]],
    source: torch.optim.Optimizer | None = None,
) -> OptimizerChoice:
    dtypes = config.dtype, config.gradient_dtype
    rule = MatrixRule(name, algorithms, Formats.of(config), dtypes, config.moments_dtype)
    for group, specs in groups:
        for spec in specs:
            rule.check_options(spec, group)
    return OptimizerChoice(rule, groups, source)


def _known_options(settings: dict[str, Any], known: Any, name: str) -> dict[str, Any]:
    for option in settings:
        if option not in known:
            raise ConfigError(f"optimizer {name!r} has no option {option!r}; it has: {', '.join(known)}")
    return settings


def _checked(settings: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a kernel, each of the kind that its default is. Raises ``ConfigError``."""
    checks: dict[type, Callable[[str, Any], Any]] = {
        bool: option_values.as_flag,
        int: option_values.as_count,
        float: option_values.as_number,
        str: partial(option_values.as_choice, allowed=ADJUSTMENTS),
        tuple: option_values.as_betas,
    }
    return {name: checks[type(defaults[name])](name, value) for name, value in settings.items()}


def _build(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of this class over a stand-in, for its groups' options and defaults."""
    parameters = inspect.signature(kind).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        _known_options(settings, list(parameters)[1:], kind.__name__)
    try:
        return kind([nn.Parameter(torch.zeros(2, 2))], **settings)  # type: ignore[call-arg]
    except Exception as error:  # it is not ours: it may raise anything
        said = " ".join(str(error).split())
        raise ConfigError(
            f"optimizer {kind.__name__} cannot be built with {option_values.shown(settings)}: {said}"
        ) from error


def _refuse_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ConfigError`` if one that was built over a stand-in has states of it: they are made once, as it is built,
    and parameters would have none."""
    of_parameter = [states for key, states in optimizer.state.items() if isinstance(key, nn.Parameter) and states]
    if of_parameter:
        name = type(optimizer).__name__
        raise ConfigError(
            f"optimizer {name} makes states of parameters as it is built ({', '.join(map(str, of_parameter[0]))}): "
            f"build it over the model's parameters, and give what is built: optimizer={name}(model.parameters(), ...)"
        )


def _refuse_that_of_an_engine(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ConfigError`` if an engine has it, or had: states and steps are that engine's."""
    if hasattr(optimizer, "_engine_side"):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} is, or was, another engine's, where its states are. Build a new one "
            "over model.parameters(). Its load_state_dict takes up what optimizer.state_dict() gave before that engine "
            "was closed"
        )


def _refuse_replaced_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ConfigError`` if somebody else than a scheduler has put a ``step`` of his own on the optimizer."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: its step was replaced on the object, by one that calls the step of "
            "before, which is not the engine's. Replace the step of engine.optimizer, once the engine is made, or use "
            "register_step_pre_hook and register_step_post_hook"
        )


def _specs_of(group: Group, specs: dict[int, list[ParameterSpec]]) -> list[ParameterSpec]:
    found: list[ParameterSpec] = []
    for index, parameter in enumerate(group["params"]):
        if not parameter.requires_grad:
            continue
        if id(parameter) not in specs:
            raise ConfigError(
                f"the optimizer's parameter {index}, {tuple(parameter.shape)}, is not one of the model's. Build the "
                "optimizer over model.parameters() before the model is wrapped."
            )
        found += specs[id(parameter)]
    return found
