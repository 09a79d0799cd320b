"""The training that every specimen goes through: under plain PyTorch, and under the engine.

Five steps of two micro-batches each, clipped, with two parameter groups and a schedule that moves the learning rates
and the first beta. Dropout stays on: all generators are seeded before every micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload import BudgetError, OffloadEngine
from zoo.specimen import Specimen

NUM_STEPS = 5
NUM_MICRO_BATCHES = 2
CLIPPING = 1.0
ADAMW = {"lr": 1e-2, "eps": 1e-5}


@dataclass(frozen=True)
class Outcome:
    """What a training left behind: its losses, and by name its parameters, buffers and optimizer states."""

    losses: list[float]
    tensors: dict[str, Tensor]


def built(specimen: Specimen) -> nn.Module:
    _seed(0)
    return specimen.build().train()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def in_torch(specimen: Specimen, disturb: Callable[[Tensor], None] | None = None) -> Outcome:
    """Plain PyTorch. ``disturb`` is called with every parameter before each step."""
    model = built(specimen)
    optimizer = _optimizer(model)
    schedule = _schedule(optimizer)
    losses = []
    for micro_losses in _micro_losses(specimen, model):
        if disturb is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    disturb(parameter)
        for loss in micro_losses:
            (loss / NUM_MICRO_BATCHES).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Outcome(losses, tensors_of(model) | _states(optimizer))


def in_engine(specimen: Specimen, **options: Any) -> Outcome:
    """The engine. With ``nvme_path`` it gets the least ``host_memory`` that works, so with a device.

    A budget that is a float is so many times the least.
    """
    for place, budget in (("device", "device_memory"), ("nvme_path", "host_memory")):
        factor = options.get(budget, 1.0)
        if place in options and isinstance(factor, float):
            options[budget] = int(factor * _least_budget(specimen, options, budget))
    model = built(specimen)
    with _engine(model, options) as engine:
        schedule = _schedule(engine.optimizer)
        losses = []
        for micro_losses in _micro_losses(specimen, engine):
            for loss in micro_losses:
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            schedule.step()
        return Outcome(losses, tensors_of(model) | _states(engine.optimizer))


def _engine(model: nn.Module, options: dict[str, Any]) -> OffloadEngine:
    return OffloadEngine(
        model,
        optimizer=_optimizer(model),
        precision="fp32",
        gradient_clipping=CLIPPING,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        **options,
    )


def _least_budget(specimen: Specimen, options: dict[str, Any], budget: str) -> int:
    try:
        _engine(built(specimen), {**options, budget: 1}).close()
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError("one byte of memory was enough")


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Matrices decay; vectors do not, and learn at half the rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **ADAMW)


def _schedule(optimizer: Any) -> torch.optim.lr_scheduler.OneCycleLR:
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=NUM_STEPS + 1)


def _states(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name} of parameter {index}": torch.as_tensor(value).clone()
        for index, states in optimizer.state_dict()["state"].items()
        for name, value in states.items()
    }


def _micro_losses(specimen: Specimen, call: Callable[..., Any]) -> Iterator[Iterator[Tensor]]:
    """For each step, the losses of its micro-batches, each computed when it is asked for."""
    generator = torch.Generator().manual_seed(1)

    def of_step(step: int) -> Iterator[Tensor]:
        for micro in range(NUM_MICRO_BATCHES):
            batch = specimen.draw(generator)
            _seed(1000 * step + micro)
            yield specimen.loss(call(**batch))

    return (of_step(step) for step in range(NUM_STEPS))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
