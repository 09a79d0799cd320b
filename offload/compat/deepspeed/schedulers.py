"""The section ``scheduler``: which schedule is meant, and with which settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offload import option_values
from offload.compat.deepspeed import kinds, schedules
from offload.compat.deepspeed.checking import Row, check, joined, torch_rows
from offload.compat.deepspeed.keys import Block, block, honoured, refused
from offload.compat.deepspeed.kinds import AUTO
from offload.compat.deepspeed.sources import Sources
from offload.errors import ConfigError

_PATH = "scheduler.params"

_TYPE = honoured("warmup_type", kinds.choice("log", "linear"), "warmup_type; log if it is absent")
_STEPS = honoured("warmup_num_steps", kinds.COUNT, "warmup_num_steps; 1000 if it is absent, at least 2")
_TOTAL = honoured("total_num_steps", kinds.COUNT)
_LAST = refused("last_batch_iteration", kinds.INTEGER, "load_checkpoint resumes the schedule: leave it out", -1)

_WARMUP_PARAMS = block(
    honoured("warmup_min_lr", kinds.RATES),
    honoured("warmup_max_lr", kinds.RATES, "warmup_max_lr; the optimizer's lr if it is absent or auto"),
    _STEPS,
    _TYPE,
    _LAST,
)
_WARMUP_DECAY_PARAMS = block(
    _WARMUP_PARAMS.keys,
    honoured("warmup_max_lr", kinds.RATES, "warmup_max_lr; 0.001 if it is absent, the optimizer's lr if auto"),
    _TOTAL,
)
_WARMUP_COSINE_PARAMS = block(
    _TOTAL,
    honoured("warmup_min_ratio", kinds.SHARE),
    _STEPS,
    honoured("cos_min_ratio", kinds.SHARE, "cos_min_ratio; 0.0001 if it is absent"),
    _TYPE,
    _LAST,
)
_ONE_CYCLE_PARAMS = block(
    honoured("cycle_min_lr cycle_max_lr decay_lr_rate decay_mom_rate", kinds.NUMBER),
    honoured("cycle_first_step_size cycle_second_step_size", kinds.COUNT),
    honoured("cycle_first_stair_count cycle_second_stair_count decay_step_size", kinds.NATURAL),
    honoured("cycle_momentum", kinds.FLAG),
    honoured("cycle_min_mom cycle_max_mom", kinds.SHARE),
    _LAST,
)
_RANGE_TEST_PARAMS = block(
    honoured("lr_range_test_min_lr", kinds.RATES),
    honoured("lr_range_test_step_size", kinds.COUNT),
    honoured("lr_range_test_step_rate", kinds.NUMBER),
    honoured("lr_range_test_staircase", kinds.FLAG),
    _LAST,
)

_OURS: Mapping[str, tuple[type[LRScheduler], Block]] = {
    "WarmupLR": (schedules.WarmupLR, _WARMUP_PARAMS),
    "WarmupDecayLR": (schedules.WarmupDecayLR, _WARMUP_DECAY_PARAMS),
    "WarmupCosineLR": (schedules.WarmupCosineLR, _WARMUP_COSINE_PARAMS),
    "OneCycle": (schedules.OneCycle, _ONE_CYCLE_PARAMS),
    "LRRangeTest": (schedules.LRRangeTest, _RANGE_TEST_PARAMS),
}

PARAMS: Mapping[str, Block] = {name: params for name, (_, params) in _OURS.items()}
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
    """Values that stand for "auto", by key."""

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
    expected = f"{option_values.one_of(list(_OURS))}, or a class of torch"
    option_values.refuse_name("scheduler.type", expected, name, name, _OURS)


def _ours(name: str, given: dict[str, Any], sources: Sources) -> SchedulerPart:
    kind, known = _OURS[name]
    checked = check(given, known, _PATH)
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
    part = SchedulerPart(name, kind, dict(given), (), torch_rows(given, kind, _PATH, f"torch's {name}"), {})
    part.make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))  # raises what torch says of the settings
    return part
