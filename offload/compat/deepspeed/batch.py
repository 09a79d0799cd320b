"""The three numbers of a batch: each two say the third, and the first is the product of the others and the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.compat.deepspeed.kinds import AUTO
from offload.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of a step of all ranks, samples of a forward, and forwards of a step of each rank."""

    train: int
    micro: int
    steps: int


def resolve(config: Mapping[str, Any], ranks: int) -> Batch:
    """The batch that ``config`` says for so many ranks, with "auto" as if it were absent.

    Raises ``ConfigError`` if it says too little, or numbers that do not go together.
    """
    train, micro, steps = (_number(config, name) for name in (TRAIN, MICRO, STEPS))
    if train is None and micro is None:
        if AUTO not in (config.get(TRAIN), config.get(MICRO)):
            raise ConfigError(f"{TRAIN} or {MICRO} is needed: how many samples does a step take?")
        micro = 1
    if train is None:
        assert micro is not None
        return Batch(micro * (steps or 1) * ranks, micro, steps or 1)
    if micro is None:
        return Batch(train, _divided(train, steps or 1, STEPS, ranks), steps or 1)
    if steps is None:
        return Batch(train, micro, _divided(train, micro, MICRO, ranks))
    if train != micro * steps * ranks:
        raise ConfigError(_contradiction(train, micro, steps, ranks))
    return Batch(train, micro, steps)


def _contradiction(train: int, micro: int, steps: int, ranks: int) -> str:
    said = f"{TRAIN}={train} is not {MICRO}={micro} x {STEPS}={steps} x {_processes(ranks)}"
    if train % (micro * ranks) == 0:
        return f"{said}: {STEPS}={train // (micro * ranks)} does the same in {_processes(ranks)}"
    return f"{said}: leave one of them out"


def _divided(train: int, part: int, part_name: str, ranks: int) -> int:
    if train % (part * ranks):
        raise ConfigError(f"{TRAIN}={train} is no multiple of {part_name}={part} x {_processes(ranks)}")
    return train // (part * ranks)


def _processes(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} processes"


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value in (None, AUTO) else int(value)
