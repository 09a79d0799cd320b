"""Random programs that look at weights through other tensors, and write to them at random moments.

Judged by ``strange_programs``.

    PYTHONPATH=tests python -m strange_aliases --programs 1000
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from strange_programs import Found, main
from tiny import least_budget
from torch import nn

from offload import OffloadEngine, OffloadError

WIDTH = 12
NUM_STEPS = 4


class Net(nn.Module):
    """Layers that call ``self.within`` in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.__dict__["within"] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            self.within.get(index, lambda: None)()
        return x


def _flat(model: Net, index: int) -> Any:
    flat = torch.cat([parameter.data.reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def _buffer(model: Net, index: int) -> Any:
    layer = model.layers[index]
    layer.register_buffer("alias", layer.weight.data)
    return layer.alias


def _assigned(model: Net, index: int) -> Any:
    alias = model.layers[index].weight.data.clone()
    model.layers[index].weight.data = alias
    return alias


def _becomes_transposed(model: Net, index: int) -> Any:
    alias = model.layers[index].weight.data
    alias.t_()
    return alias


ALIASES: dict[str, Callable[[Net, int], Any]] = {
    "flat": _flat,
    "buffer": _buffer,
    "data": lambda model, index: model.layers[index].weight.data,
    "rows": lambda model, index: model.layers[index].weight.data[2:5],
    "transposed": lambda model, index: model.layers[index].weight.detach().t(),
    "becomes transposed": _becomes_transposed,
    "assigned": _assigned,
    "view": lambda model, index: model.layers[index].weight.view(-1).detach(),
    "parameter": lambda model, index: model.layers[index].weight,
    "bias": lambda model, index: model.layers[index].bias.data,
}
"""Ways to get a tensor that looks at a weight."""

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda alias: alias.mul_(0.9),
    "an element": lambda alias: alias.view(-1)[3:4].add_(0.2) if alias.is_contiguous() else alias[0].add_(0.2),
    "clamped": lambda alias: alias.clamp_(-0.2, 0.2),
    "copied": lambda alias: alias.copy_(alias.flip(0).clone()),
    "filled in part": lambda alias: alias[1:2].fill_(0.05),
    "by an array": lambda alias: alias.mul_(torch.from_numpy(alias.clone().numpy()).abs() * 0.1 + 0.9),
    "by elements": lambda alias: alias.apply_(lambda element: element * 0.99),
}


def draw(seed: int) -> dict[str, Any]:
    """The program of a number: aliases with the step before which they are made (0: before the engine), and acts."""
    chance = random.Random(seed)
    aliases = [
        (chance.choice(list(ALIASES)), chance.randrange(4), chance.choice([0, 0, 1, 2]))
        for _ in range(chance.randint(1, 3))
    ]
    acts = [
        (
            chance.randrange(NUM_STEPS),
            chance.choice(["before forward", "before backward", "before step", "after step", "in another forward"]),
            chance.randrange(len(aliases)),
            chance.choice([*WRITES, "read", "read"]),
        )
        for _ in range(chance.randint(2, 6))
    ]
    return {"seed": seed, "aliases": aliases, "acts": acts}


def run(program: dict[str, Any], place: str, folder: Path) -> Found:
    """Train the program's model there."""
    found, engine = Found(), None
    torch.manual_seed(program["seed"])
    model = Net()
    held: dict[int, Any] = {}

    def make(step: int) -> None:
        for number, (how, index, when) in enumerate(program["aliases"]):
            if when == step:
                held[number] = ALIASES[how](model, index)

    def act(step: int, moment: str) -> None:
        for at, of, number, what in program["acts"]:
            if (at, of) == (step, moment) and number in held:
                with torch.no_grad():
                    if what != "read":
                        WRITES[what](held[number])
                    found.numbers.append(held[number].double().sum().item())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(0)
            if place == "torch":
                optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            else:
                options: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.01}
                if place == "nvme":
                    options.update(host_memory=least_budget(Net(), folder, **options), nvme_path=folder)
                engine = OffloadEngine(model, **options)
                optimizer = engine.optimizer
            for step in range(NUM_STEPS):
                if step:
                    make(step)
                act(step, "before forward")
                model.within = {3: lambda step=step: act(step, "in another forward")}
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
                loss = model(x).square().mean()
                model.within = {}
                act(step, "before backward")
                loss.backward()
                found.numbers.append(loss.item())
                act(step, "before step")
                optimizer.step()
                optimizer.zero_grad()
                act(step, "after step")
            found.weights = [parameter.detach().clone() for parameter in model.parameters()]
    except Exception as error:
        found.error, found.is_typed, found.message = type(error).__name__, isinstance(error, OffloadError), str(error)
    finally:
        if engine is not None:
            engine.close()
    return found


if __name__ == "__main__":
    main(draw, run, str(__doc__))
