"""The three numbers of a batch: each two say the third, and in one process the first is the product of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.compat.deepspeed.kinds import AUTO
from offload.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of a step, samples of a forward, and forwards of a step."""

    train: int
    micro: int
    steps: int


def resolve(config: Mapping[str, Any]) -> Batch:
    """The batch that ``config`` says, with "auto" as if it were absent.

    Raises ``ConfigError`` if it says too little, or numbers that do not go together.
    """
    train, micro, steps = (_number(config, name) for name in (TRAIN, MICRO, STEPS))
    if train is None and micro is None:
        if AUTO not in (config.get(TRAIN), config.get(MICRO)):
            raise ConfigError(f"{TRAIN} or {MICRO} is needed: how many samples does a step take?")
        micro = 1
    if train is None:
        assert micro is not None
        return Batch(micro * (steps or 1), micro, steps or 1)
    if micro is None:
        return Batch(train, _divided(train, TRAIN, steps or 1, STEPS), steps or 1)
    if steps is None:
        return Batch(train, micro, _divided(train, TRAIN, micro, MICRO))
    if train != micro * steps:
        raise ConfigError(_contradiction(train, micro, steps))
    return Batch(train, micro, steps)


def _contradiction(train: int, micro: int, steps: int) -> str:
    said = f"{TRAIN}={train} is not {MICRO}={micro} x {STEPS}={steps} x 1 process"
    if train % micro == 0:
        return f"{said}: {STEPS}={train // micro} does the same in one process"
    return f"{said}: leave one of them out"


def _divided(whole: int, whole_name: str, part: int, part_name: str) -> int:
    if whole % part:
        raise ConfigError(f"{whole_name}={whole} is no multiple of {part_name}={part}")
    return whole // part


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value in (None, AUTO) else int(value)
