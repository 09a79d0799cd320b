"""The few settings that matter, tried by short real steps of the model: the defaults stand unless one beats them."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aio_ext import available_backends
from offload.engine import OffloadEngine
from offload.predict.model import Model
from offload.predict.workload import Workload

_FASTER = 1.05
"""A setting is better if it is faster by this, and faster in every round."""

_ROUNDS = 3
_WARM_UP = 2
_STEPS = 3
_MIB = 1 << 20

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """Settings beside those that were given, and the median step of each round, in seconds."""

    settings: Options
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Tuned:
    """Trials, and the best of them. ``trials[0]`` are the defaults; ``options`` make the engine of what came out
    best."""

    trials: tuple[Trial, ...]
    best: Trial
    options: Options

    @property
    def defaults_stand(self) -> bool:
        return not self.best.settings


def tune(
    build: Callable[[], Model], workload: Workload, options: Options, say: Callable[[str], None] = lambda line: None
) -> Tuned:
    """Train the model for a few steps with each of the settings, which take turns over the rounds.

    ``build`` makes the model anew, without memory. ``options`` are given to every engine. ``say`` is told of each
    turn. Raises what ``OffloadEngine`` raises.
    """
    given = {**options, "precision": workload.precision, "optimizer": workload.optimizer}
    given |= {"moments_dtype": workload.moments_dtype, "gradient_accumulation_steps": workload.micro_batches}
    candidates = list(_candidates(options))
    seconds: list[list[float]] = [[] for _ in candidates]
    for number in range(_ROUNDS):
        for settings, taken in zip(candidates, seconds, strict=True):
            taken.append(_turn(build(), workload, {**given, **settings}))
            say(f"round {number + 1} of {_ROUNDS}, {shown(settings)}: {taken[-1]:.3f} s a step")
    trials = tuple(Trial(settings, tuple(taken)) for settings, taken in zip(candidates, seconds, strict=True))
    best = best_of(trials)
    return Tuned(trials, best, {**given, **best.settings})


def best_of(trials: Sequence[Trial]) -> Trial:
    """The fastest of those that beat the first beyond noise; else the first."""
    defaults = trials[0]
    better = [
        trial
        for trial in trials[1:]
        if trial.median * _FASTER < defaults.median
        and all(own < theirs for own, theirs in zip(trial.seconds, defaults.seconds, strict=True))
    ]
    return min(better, key=lambda trial: trial.median, default=defaults)


def shown(settings: Options) -> str:
    """``tile_bytes=4194304``; "the defaults" for none."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "the defaults"


def _candidates(options: Options) -> Iterator[Options]:
    """The defaults, and what differs from them in one thing that was not given."""
    yield {}
    if not options.get("nvme_path"):
        return
    if "io_backend" not in options:
        for backend in available_backends()[1:]:
            if backend != "portable":
                yield {"io_backend": backend}
    if "tile_bytes" not in options:
        yield from ({"tile_bytes": size * _MIB} for size in (2, 4, 16))


def _turn(model: Model, workload: Workload, options: Options) -> float:
    """The median of a few steps of a new engine over random tokens."""
    generator = torch.Generator().manual_seed(0)
    size = (workload.batch, workload.sequence)
    with OffloadEngine(model.module, **options) as engine:
        seconds = []
        for _ in range(_WARM_UP + _STEPS):
            start = time.perf_counter()
            for _ in range(workload.micro_batches):
                tokens = torch.randint(0, max(model.vocabulary, 1), size, generator=generator)
                engine.backward(_loss(engine, model.module, tokens))
            engine.step()
            seconds.append(time.perf_counter() - start)
        engine.close(discard=True)
    return statistics.median(seconds[_WARM_UP:])


def _loss(engine: OffloadEngine, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own loss where it takes labels or targets; else a number that depends on all of its output."""
    names = inspect.signature(module.forward).parameters
    if "labels" in names:
        loss: torch.Tensor = engine(tokens, labels=tokens).loss
        return loss
    output = engine(tokens, tokens) if "targets" in names else engine(tokens)
    values: torch.Tensor = getattr(output, "logits", output)
    return values if values.dim() == 0 else values.float().square().mean()
