"""The section ``optimizer``: which optimizer of ours, or class of torch, is meant, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload import foreign, option_values
from offload.compat.deepspeed.checking import Row, check, joined, torch_rows, type_of
from offload.compat.deepspeed.keys import TABLE, Block, Effect, Key
from offload.compat.deepspeed.kinds import is_auto
from offload.compat.deepspeed.sources import Sources
from offload.errors import ConfigError
from offload.native_optimizers import NATIVE_OPTIMIZERS

_PATH = "optimizer.params"
_DEFAULT = "the default"

_ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
_LIONS = ("lion", "fusedlion", "deepspeedcpulion")
_ADAGRADS = ("adagrad", "deepspeedcpuadagrad")
_REFUSED = TABLE.texts("optimizers that are not there")
"""Types of DeepSpeed that are not there, and what to do instead."""

_NAMED = ("lr", "betas", "eps", "weight_decay")
"""Settings that are options of the engine by themselves."""

PARAMS: Mapping[str, Block] = {types: TABLE.block(types) for types in ("Adam, AdamW", "Lion", "Adagrad")}
"""The keys of ``optimizer.params``, by the types that have them."""


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer that is not built yet. ``kind`` is a name with a kernel, or a class of torch."""

    kind: str | type[torch.optim.Optimizer]
    settings: dict[str, Any]
    rows: tuple[Row, ...]

    def options(self) -> dict[str, Any]:
        """As options of ``OffloadConfig``."""
        options: dict[str, Any] = {"optimizer": self.kind}
        options |= {name: self.settings[name] for name in _NAMED if name in self.settings}
        others = {name: value for name, value in self.settings.items() if name not in _NAMED}
        return {**options, "optimizer_options": others} if others else options

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of torch over these parameters or groups. Raises ``ConfigError`` where torch has none."""
        kind = self.kind
        if isinstance(kind, str):
            torch_class = NATIVE_OPTIMIZERS[kind].torch_class
            if not torch_class:
                raise ConfigError(
                    f"optimizer.type={kind!r} trains all parameters alike, and model_parameters has groups, or not "
                    "all of them: set requires_grad instead, or use AdamW"
                )
            kind = getattr(torch.optim, torch_class)
        try:
            return kind(parameters, **self.settings)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model_parameters: {' '.join(str(error).split())}") from None


def optimizer_part(section: Mapping[str, Any], sources: Sources) -> OptimizerPart | None:
    """The optimizer of the section; None if it names none. Raises ``ConfigError`` for what is not there."""
    theirs, given = type_of(section, "optimizer", "AdamW"), section.get("params", {})
    if theirs is None:
        return None
    name = theirs.lower()
    if name in _REFUSED:
        raise ConfigError(f"optimizer.type={theirs!r} is not there: {_REFUSED[name]}")
    if name in _ADAMS:
        return _adam(name, given, sources)
    if name in _LIONS:
        return _kernel("lion", "Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, given, sources)
    if name in _ADAGRADS:
        return _kernel("adagrad", "Adagrad", {"lr": 1e-2, "weight_decay": 0.0}, given, sources)
    return _of_torch(theirs, given, sources)


def _adam(name: str, given: dict[str, Any], sources: Sources) -> OptimizerPart:
    part = _kernel("adamw", "Adam, AdamW", {"lr": 1e-3, "weight_decay": 0.0}, given, sources)
    settings = dict(part.settings)
    modes = [settings.pop(key) for key in ("adam_w_mode", "adamw_mode") if key in settings]
    if settings.pop("torch_adam", False) is True and given.get("weight_decay") is None and not modes.count(False):
        settings["weight_decay"] = 0.01  # what torch's AdamW has
    if settings.get("amsgrad") is False:
        del settings["amsgrad"]
    decoupled = name == "adamw" or False not in modes
    return OptimizerPart("adamw" if decoupled else "adam", settings, part.rows)


def _kernel(kind: str, types: str, defaults: dict[str, Any], given: dict[str, Any], sources: Sources) -> OptimizerPart:
    """Settings of a type that DeepSpeed has of its own, with its defaults."""
    checked = check(given, PARAMS[types], _PATH)
    settings = dict(defaults)
    for name, value in checked.values.items():
        spec = PARAMS[types].keys[name]
        if is_auto(value):
            settings |= _answer(name, sources)
            sources.resolved[joined(_PATH, name)] = settings.get(name, _DEFAULT)
        elif isinstance(spec, Key) and (spec.effect is Effect.HONOURED or name == "torch_adam"):
            settings[name] = value
    return OptimizerPart(kind, settings, checked.rows)


def _answer(name: str, sources: Sources) -> dict[str, Any]:
    """The setting that is "auto", where something says it."""
    found = sources.betas() if name == "betas" else sources.number(name)
    return {} if found is None else {name: found}


def _of_torch(theirs: str, given: dict[str, Any], sources: Sources) -> OptimizerPart:
    name = foreign.torch_name(theirs)
    if name is None:
        known = ["Adam", "AdamW", "Lion", "Adagrad", "SGD"]
        expected = f"one of {', '.join(known)}, or a class of torch.optim"
        option_values.refuse_name("optimizer.type", expected, theirs, theirs, known)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    rows = torch_rows(given, kind, _PATH, f"torch.optim.{name}")
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if is_auto(value):
            settings |= _answer(key, sources)
            sources.resolved[joined(_PATH, key)] = settings.get(key, _DEFAULT)
        elif value is not None:
            settings[key] = tuple(value) if isinstance(value, list) else value
    try:
        kind([nn.Parameter(torch.zeros(2, 2))], **settings)  # type: ignore[call-arg]
    except Exception as error:  # torch checks settings with what comes
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{_PATH}: {kind.__name__} cannot be built with {option_values.shown(settings)}: {said}"
        ) from None
    return OptimizerPart(kind, settings, rows)
