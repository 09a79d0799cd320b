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
from offload import memory
from offload.config import LEAST_TILE_BYTES, OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import BudgetError
from offload.plan.plan import Plan
from offload.predict.model import Model
from offload.predict.workload import Workload

_FASTER = 1.05
"""A setting is better if it is faster by this, and faster in every round."""

_ROUNDS = 3
_WARM_UP = 2
_STEPS = 3
_ACTIVATIONS_SHARE = 0.5
"""Of the memory that the engine leaves free: what activations of a trial may take."""

_LOOP = ("batch", "together")
"""Settings of the training loop, not of the engine: sequences of a micro-batch, and whether ``engine.together`` runs
them."""

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
    """Trials, and the best settings. ``trials[0]`` are the defaults; ``options`` make the engine of what came out
    best, and ``loop`` says what its training loop does. ``faster``: so many times as fast as the defaults, where they
    took turns once more."""

    trials: tuple[Trial, ...]
    best: Options
    faster: float
    options: Options
    loop: Options

    @property
    def defaults_stand(self) -> bool:
        return not self.best


def tune(
    build: Callable[[], Model], workload: Workload, options: Options, say: Callable[[str], None] = lambda line: None
) -> Tuned:
    """Train the model for a few steps with each of the settings, which take turns over the rounds.

    ``build`` makes the model anew, without memory. ``options`` are given to every engine. What is tried follows from
    the plan of the defaults: a setting of transfers only if a step moves something, batches of another size only if
    the forecast of their activations fits. All of them have the same sequences in a step. ``say`` is told of each
    turn. Raises what ``OffloadEngine`` raises.
    """
    given = {**options, "precision": workload.precision, "optimizer": workload.optimizer}
    given |= {"moments_dtype": workload.moments_dtype, "master_dtype": workload.master_dtype}
    given |= {"gradient_accumulation_steps": workload.micro_batches}
    given |= {"activations": workload.activations} if workload.recomputed else {}
    given |= {"activation_memory": workload.activation_memory} if workload.activation_memory is not None else {}
    loop = {"batch": workload.batch, "together": workload.together}

    def turn(settings: Options, what: str) -> float:
        seconds, _ = _turn(build(), workload.sequence, {**given, **loop, **settings})
        say(f"{what}, {shown(settings)}: {seconds:.3f} s a step")
        return seconds

    seconds, plan = _turn(build(), workload.sequence, {**given, **loop})
    say(f"round 1 of {_ROUNDS}, {shown({})}: {seconds:.3f} s a step")
    candidates: list[Options] = [*_of_transfers(plan, options), *_of_activations(workload)]
    candidates += _of_batches(build(), workload, plan)
    rounds = [(settings, list[float]()) for settings in candidates]
    defaults = [seconds]
    for number in range(1, _ROUNDS + 1):
        if number > 1:
            defaults.append(turn({}, f"round {number} of {_ROUNDS}"))
        for settings, taken in list(rounds):
            try:
                taken.append(turn(settings, f"round {number} of {_ROUNDS}"))
            except BudgetError as error:
                say(f"{shown(settings)} is left out: it needs {error.needed_bytes} bytes")
                rounds.remove((settings, taken))
    trials = [Trial({}, tuple(defaults)), *(Trial(settings, tuple(taken)) for settings, taken in rounds)]
    best, faster = _confirmed(ahead_of_first(trials), turn)
    return Tuned(tuple(trials), best, faster, *_parted({**given, **loop, **best}))


def ahead_of_first(trials: Sequence[Trial]) -> list[Trial]:
    """Those that are faster than the first beyond noise; the fastest of them first."""
    return sorted((trial for trial in trials[1:] if _beats(trial, trials[0])), key=lambda trial: trial.median)


def _confirmed(ahead: Sequence[Trial], turn: Callable[[Options, str], float]) -> tuple[Options, float]:
    """The first that is ahead once more, and how much.

    Of many settings that are no better than the defaults one is faster three times by luck, and it is the one that is
    chosen. So its own rounds say nothing of it: it takes turns with the defaults again, each of which is first in turn.
    """
    for trial in ahead:
        defaults, own = list[float](), list[float]()
        for number in range(_ROUNDS):
            turns: list[tuple[Options, list[float]]] = [(trial.settings, own), ({}, defaults)]
            for settings, taken in reversed(turns) if number % 2 else turns:
                taken.append(turn(settings, f"once more, {number + 1} of {_ROUNDS}"))
            if own[-1] >= defaults[-1]:
                break
        first, again = Trial({}, tuple(defaults)), Trial(trial.settings, tuple(own))
        if len(own) == _ROUNDS and _beats(again, first):
            return trial.settings, first.median / again.median
    return {}, 1.0


def _beats(trial: Trial, defaults: Trial) -> bool:
    in_every_round = all(own < theirs for own, theirs in zip(trial.seconds, defaults.seconds, strict=True))
    return in_every_round and trial.median * _FASTER < defaults.median


def shown(settings: Options) -> str:
    """``tile_bytes=4194304``; "the defaults" for none."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "the defaults"


def _parted(settings: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the engine, and those of the loop."""
    of_loop = {name: settings[name] for name in _LOOP}
    return {name: value for name, value in settings.items() if name not in _LOOP}, of_loop


def _of_transfers(plan: Plan, options: Options) -> Iterator[Options]:
    """Settings that differ from the defaults in one thing that was not given, and bears on bytes from and to NVMe."""
    if not plan.step_read_bytes + plan.step_write_bytes:
        return
    if "io_backend" not in options:
        for backend in available_backends()[1:]:
            if backend != "portable":
                yield {"io_backend": backend}
    if "tile_bytes" not in options:
        of_plan = plan.staging.tile_bytes
        sizes = (of_plan // 4, of_plan // 2, of_plan * 2)
        yield from ({"tile_bytes": size} for size in sizes if size >= LEAST_TILE_BYTES)


def _of_activations(workload: Workload) -> Iterator[Options]:
    """Other parts of host memory as the buffer of activations on their way to NVMe; and that units keep theirs, or
    compute them once more, where memory allows it. The bits are the same."""
    if workload.activations != "nvme":
        return
    yield {"activations": "auto"}
    if workload.activation_memory is None:
        default = int(OffloadConfig.activation_memory)
        yield from ({"activation_memory": nbytes} for nbytes in (default // 2, default * 2))


def _of_batches(model: Model, workload: Workload, plan: Plan) -> Iterator[Options]:
    """Micro-batches that run together, and one batch of all of them, whose blocks are recomputed if they must be."""
    if workload.micro_batches == 1:
        return
    batch = workload.batch * workload.micro_batches
    as_one = {"batch": batch, "gradient_accumulation_steps": 1, **({"together": False} if workload.together else {})}
    kept = model.kept(workload.sequence, workload.dtype)
    free = _ACTIVATIONS_SHARE * max(memory.available_bytes() - plan.host_bytes, 0)

    def fits(*, recomputed: bool) -> bool:
        return kept.nbytes(batch, recomputed=recomputed) <= free

    if fits(recomputed=workload.recomputed):
        yield from () if workload.together else ({"together": True},)
        yield as_one
    if not workload.recomputed and fits(recomputed=True):
        yield {**as_one, "activations": "recompute"}


def _turn(model: Model, sequence: int, settings: Options) -> tuple[float, Plan]:
    """The median of a few steps of a new engine over random tokens, and its plan."""
    options, loop = _parted(settings)
    generator = torch.Generator().manual_seed(0)
    size = (options["gradient_accumulation_steps"], loop["batch"], sequence)
    with OffloadEngine(model.module, **options) as engine:

        def run(tokens: torch.Tensor) -> None:
            engine.backward(_loss(engine, model.module, tokens))

        seconds = []
        for _ in range(_WARM_UP + _STEPS):
            start = time.perf_counter()
            micro_batches = torch.randint(0, max(model.vocabulary, 1), size, generator=generator)
            if loop["together"]:
                engine.together(micro_batches, run)
            else:
                for tokens in micro_batches:
                    run(tokens)
            engine.step()
            seconds.append(time.perf_counter() - start)
        plan = engine.plan
        engine.close(discard=True)
    return statistics.median(seconds[_WARM_UP:]), plan


def _loss(engine: OffloadEngine, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own loss where it takes labels or targets; else a number that depends on all of its output."""
    names = inspect.signature(module.forward).parameters
    if "labels" in names:
        loss: torch.Tensor = engine(tokens, labels=tokens).loss
        return loss
    output = engine(tokens, tokens) if "targets" in names else engine(tokens)
    values: torch.Tensor = getattr(output, "logits", output)
    return values if values.dim() == 0 else values.float().square().mean()
