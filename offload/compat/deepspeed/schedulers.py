"""The section ``scheduler``: which schedule is meant, and with which settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offload import option_values
from offload.compat.deepspeed import schedules
from offload.compat.deepspeed.checking import Row, check, joined, torch_rows, type_of
from offload.compat.deepspeed.keys import TABLE, Block
from offload.compat.deepspeed.kinds import is_auto
from offload.compat.deepspeed.sources import Sources
from offload.errors import ConfigError

_PATH = "scheduler.params"

_OURS: Mapping[str, type[LRScheduler]] = {
    kind.__name__: kind
    for kind in (
        schedules.WarmupLR,
        schedules.WarmupDecayLR,
        schedules.WarmupCosineLR,
        schedules.OneCycle,
        schedules.LRRangeTest,
    )
}

PARAMS: Mapping[str, Block] = {name: TABLE.block(name) for name in _OURS}
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
    name, given = type_of(section, "scheduler", "WarmupLR"), section.get("params", {})
    if name is None:
        return None
    if name in _OURS:
        return _ours(name, given, sources)
    if isinstance(found := getattr(torch.optim.lr_scheduler, name, None), type) and issubclass(found, LRScheduler):
        return _of_torch(name, found, given)
    expected = f"{option_values.one_of(list(_OURS))}, or a class of torch"
    option_values.refuse_name("scheduler.type", expected, name, name, _OURS)


def _ours(name: str, given: dict[str, Any], sources: Sources) -> SchedulerPart:
    kind = _OURS[name]
    checked = check(given, PARAMS[name], _PATH)
    params: dict[str, Any] = {}
    signature = inspect.signature(kind).parameters
    missing = []
    for key, value in checked.values.items():
        if key not in signature:  # what was refused, and asked for nothing
            continue
        if not is_auto(value):
            params[key] = value
            continue
        found = _auto(key, sources)
        stands_for = found if found is not None else signature[key].default
        if found is not None:
            params[key] = found
        elif key == "warmup_max_lr":
            params[key], stands_for = None, "the optimizer's lr"
        elif stands_for is inspect.Parameter.empty:
            missing.append(key)
            stands_for = "not known"
        sources.resolved[joined(_PATH, key)] = stands_for
    for key, parameter in list(signature.items())[1:]:
        if parameter.default is inspect.Parameter.empty and key not in checked.values:
            raise ConfigError(f"scheduler.type={name!r} needs {_PATH}.{key}")
    return SchedulerPart(name, kind, params, tuple(missing), checked.rows)


def _auto(key: str, sources: Sources) -> Any:
    if key == "warmup_num_steps":
        return sources.warmup_steps()
    if key == "total_num_steps":
        return sources.count(key)
    return 0.0 if key == "warmup_min_lr" else None


def _of_torch(name: str, kind: type[LRScheduler], given: dict[str, Any]) -> SchedulerPart:
    part = SchedulerPart(name, kind, dict(given), (), torch_rows(given, kind, _PATH, f"torch's {name}"))
    part.make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))  # raises what torch says of the settings
    return part
