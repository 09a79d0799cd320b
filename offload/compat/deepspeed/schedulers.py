"""The section ``scheduler``: which schedule is meant, and with which settings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offload import option_values
from offload.compat.deepspeed import schedules
from offload.compat.deepspeed.checking import Row, check, joined
from offload.compat.deepspeed.keys import (
    ONE_CYCLE_PARAMS,
    RANGE_TEST_PARAMS,
    WARMUP_COSINE_PARAMS,
    WARMUP_DECAY_PARAMS,
    WARMUP_PARAMS,
    Block,
    Effect,
)
from offload.compat.deepspeed.kinds import AUTO
from offload.compat.deepspeed.sources import Sources
from offload.errors import ConfigError

_PATH = "scheduler.params"

_OURS: Mapping[str, tuple[type[LRScheduler], Block]] = {
    "WarmupLR": (schedules.WarmupLR, WARMUP_PARAMS),
    "WarmupDecayLR": (schedules.WarmupDecayLR, WARMUP_DECAY_PARAMS),
    "WarmupCosineLR": (schedules.WarmupCosineLR, WARMUP_COSINE_PARAMS),
    "OneCycle": (schedules.OneCycle, ONE_CYCLE_PARAMS),
    "LRRangeTest": (schedules.LRRangeTest, RANGE_TEST_PARAMS),
}

PARAMS: Mapping[str, Block] = {name: block for name, (_, block) in _OURS.items()}
"""The keys of ``scheduler.params``, by type."""


@dataclass(frozen=True)
class SchedulerPart:
    """A schedule that waits for its optimizer."""

    name: str
    kind: Any
    params: dict[str, Any]
    missing: tuple[str, ...]
    """Keys that are "auto", which nothing says and which have no default."""
    rows: tuple[Row, ...]
    resolved: dict[str, Any]
    """What "auto" has become, by key."""

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        """The scheduler. Raises ``ConfigError`` as ``check_complete``, and for rates of other groups."""
        self.check_complete()
        try:
            return self.kind(optimizer, **self.params)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"scheduler {self.name} cannot be built: {' '.join(str(error).split())}") from None

    def check_complete(self) -> None:
        """Raise ``ConfigError`` if nothing says what an "auto" is."""
        if self.missing:
            raise ConfigError(
                f'{_PATH}.{self.missing[0]} is "auto", and nothing says it: write the number, or give args with '
                "max_steps to initialize"
            )


def scheduler_part(section: Mapping[str, Any], sources: Sources) -> SchedulerPart | None:
    """The schedule of the section; None if it names none. Raises ``ConfigError`` for what is not there."""
    given: dict[str, Any] = section.get("params", {})
    if "type" not in section:
        if given:
            raise ConfigError('scheduler.params is given without scheduler.type: write "type": "WarmupLR"')
        return None
    name = section["type"]
    if name in _OURS:
        return _ours(name, given, sources)
    if isinstance(found := getattr(torch.optim.lr_scheduler, name, None), type) and issubclass(found, LRScheduler):
        return _of_torch(name, found, given)
    option_values.refuse(
        "scheduler.type", f"{option_values.one_of(list(_OURS))}, or a class of torch", name, _near(name)
    )


def _ours(name: str, given: dict[str, Any], sources: Sources) -> SchedulerPart:
    kind, block = _OURS[name]
    checked = check(given, block, _PATH)
    params: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    signature = inspect.signature(kind).parameters
    missing = []
    for key, value in checked.values.items():
        if key not in signature:  # what was refused, and asked for nothing
            continue
        if not (isinstance(value, str) and value == AUTO):
            params[key] = value
            continue
        found = _auto(key, sources)
        if found is not None:
            params[key] = found
        elif key == "warmup_max_lr":
            params[key] = None  # the optimizer's lr
        elif signature[key].default is inspect.Parameter.empty:
            missing.append(key)
        default = "the optimizer's lr" if key == "warmup_max_lr" else signature[key].default
        resolved[joined(_PATH, key)] = found if found is not None else "not known" if key in missing else default
    for key, parameter in list(signature.items())[1:]:
        if parameter.default is inspect.Parameter.empty and key not in checked.values:
            raise ConfigError(f"scheduler.type={name!r} needs {_PATH}.{key}")
    return SchedulerPart(name, kind, params, tuple(missing), checked.rows, resolved)


def _auto(key: str, sources: Sources) -> Any:
    if key == "warmup_num_steps":
        return sources.warmup_steps()
    if key == "total_num_steps":
        return sources.count(key)
    return 0.0 if key == "warmup_min_lr" else None


def _of_torch(name: str, kind: type[LRScheduler], given: dict[str, Any]) -> SchedulerPart:
    known = list(inspect.signature(kind).parameters)[1:]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f", did you mean {near[0]!r}?" if near else f", known are: {', '.join(known)}"
            raise ConfigError(f"unknown key {option_values.shown(key)} in {_PATH}{hint}")
    part = SchedulerPart(name, kind, dict(given), (), tuple(
        Row(joined(_PATH, key), option_values.shown(value), Effect.HONOURED, f"{key} of torch's {name}")
        for key, value in given.items()
    ), {})  # fmt: skip
    part.make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))  # raises what torch says of the settings
    return part


def _near(name: str) -> str | None:
    folded = {known.lower(): known for known in _OURS}
    near = difflib.get_close_matches(name.lower(), folded, 1)
    return repr(folded[near[0]]) if near else None
