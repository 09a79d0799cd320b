"""Programs in which the last rank does something else than the others; each rank returns what it was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks.programs import Program, batch, loss_of, raised
from torch import nn
from torch.distributed import distributed_c10d

from offload import OffloadEngine


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))


def _freeze(of: nn.Module) -> None:
    of[0].weight.requires_grad_(False)


def _narrow(of: nn.Module) -> None:
    of[2].to(torch.bfloat16)


def _other_buffer(of: nn.Module) -> None:
    of.register_buffer("mean", torch.zeros(3))


def _other_shape(of: nn.Module) -> None:
    of[2] = nn.Linear(16, 9)


@dataclass(frozen=True)
class Options:
    """Options that the last rank has for itself, and what all ranks say of it. ``change`` is of its model; ``groups``:
    the optimizer is built of so many groups there."""

    said: str
    own: Any = None
    change: Callable[[nn.Module], Any] = lambda _: None
    groups: int = 1


OPTIONS = {
    "lr": Options("lr of parameter group 0 is 0.001 on rank 0, 0.5 on rank 1", {"lr": 0.5}),
    "betas": Options("betas of parameter group 0", {"betas": (0.8, 0.9)}),
    "optimizer": Options("the optimizer is 'adamw' on rank 0, 'lion' on rank 1", {"optimizer": "lion"}),
    "precision": Options("precision is 'fp32' on rank 0, 'bf16' on rank 1", {"precision": "bf16"}),
    "shard": Options("shard is 'auto' on rank 0, 'weights' on rank 1", {"shard": "weights"}),
    "clipping": Options("gradient_clipping is 0.0 on rank 0, 1.0 on rank 1", {"gradient_clipping": 1.0}),
    "moments": Options("moments_dtype is 'fp32' on rank 0, 'int8' on rank 1", {"moments_dtype": "int8"}),
    "accumulation": Options("gradient_accumulation_steps is 1", {"gradient_accumulation_steps": 2}),
    "frozen": Options("requires_grad of 0.weight is True on rank 0, False on rank 1", change=_freeze),
    "dtype": Options("the dtype of 2.weight is 'torch.float32' on rank 0, 'torch.bfloat16'", change=_narrow),
    "buffer": Options("the buffer of mean is nothing on rank 0, '(3,) torch.float32'", change=_other_buffer),
    "shape": Options("ranks 0 and 1 have different models (2.weight (8, 16), 2.weight (9, 16))", change=_other_shape),
    "groups": Options("the number of parameter groups is 1 on rank 0, 2 on rank 1", groups=2),
}


def other_options(rank: int, size: int, name: str, folder: Path) -> tuple[str, bool]:
    """What is said, and whether the model has its parameters still."""
    case, own, options = OPTIONS[name], model(), {"precision": "fp32", "rank_timeout": 10}
    if rank == size - 1:
        case.change(own)
        options.update(case.own or {})
    if case.groups > 1:
        parameters = list(own.parameters())
        cut = len(parameters) // 2 if rank == size - 1 else len(parameters)
        options["optimizer"] = torch.optim.AdamW(
            [{"params": each} for each in (parameters[:cut], parameters[cut:]) if each]
        )
    before = [parameter.data_ptr() for parameter in own.parameters()]
    said = raised(lambda: OffloadEngine(own, **options))
    return said, before == [parameter.data_ptr() for parameter in own.parameters()]


@dataclass(frozen=True)
class Step:
    """What the last rank does before the second step, and what the others do."""

    said: str
    act: Callable[[OffloadEngine], Any]
    others: Callable[[OffloadEngine], Any] = lambda _: None


def _set(**options: Any) -> Callable[[OffloadEngine], Any]:
    return lambda engine: engine.optimizer.param_groups[0].update(options)


def _freeze_later(engine: OffloadEngine) -> None:
    engine.module.gain.requires_grad_(False)


def _drop_one(engine: OffloadEngine) -> None:
    del engine.optimizer.param_groups[0]["params"][0]


def _weight(value: float) -> Callable[[OffloadEngine], Any]:
    return lambda engine: engine.module.gain.data.fill_(value)


def _gradient(value: float) -> Callable[[OffloadEngine], Any]:
    return lambda engine: setattr(engine.module.gain, "grad", torch.full_like(engine.module.gain, value))


def _states(factor: float) -> Callable[[OffloadEngine], Any]:
    def load(engine: OffloadEngine) -> None:
        found = engine.optimizer.state_dict()
        found["state"][0]["exp_avg"] = found["state"][0]["exp_avg"] * factor
        engine.optimizer.load_state_dict(found)

    return load


def _scheduler(engine: OffloadEngine) -> None:
    torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5).step()


STEPS = {
    "lr": Step(
        "step 2: the ranks differ in what must be the same on all of them: lr of parameter group 0", _set(lr=0.5)
    ),
    "a scheduler": Step("lr of parameter group 0 is 0.01 on rank 0, 0.005 on rank 1", _scheduler),
    "clipping by hand": Step("the factor of the gradient of ", lambda engine: engine.clip_grad_norm_(1e-3)),
    "requires_grad": Step("requires_grad of gain is True on rank 0, False on rank 1", _freeze_later),
    "a weight": Step("a change of gain: the ranks differ", _weight(2.0), _weight(3.0)),
    "a gradient": Step("a change of the gradient of gain: the ranks differ", _gradient(2.0), _gradient(3.0)),
    "states": Step("a change of optimizer states: the ranks differ", _states(1.0), _states(0.5)),
    "a group": Step("the list of parameters of parameter group 0", _drop_one),
}


def other_step(rank: int, size: int, name: str, folder: Path) -> str:
    def loop() -> None:
        with Program(options={"rank_timeout": 10, "shard": "weights"}).make(folder) as engine:
            for step in range(2):
                tokens, targets = batch(step, 0, rank, size)
                engine.backward(loss_of(engine(tokens), targets))
                if step and name == "clipping by hand":
                    engine.clip_grad_norm_(1e9)  # which all of them do
                if step:
                    (STEPS[name].act if rank == size - 1 else STEPS[name].others)(engine)
                engine.step()

    return raised(loop)


def refused_and_made_again(rank: int, size: int, own: dict[str, Any]) -> tuple[list[str], list[int], list[int], float]:
    """What is said of options that the last rank alone has; after each time, the groups that torch has and the threads
    of gloo in this process; and the loss of an engine that is made then."""
    said: list[str] = []
    groups: list[int] = []
    threads: list[int] = []
    for _ in range(4):
        options = {"precision": "fp32", "rank_timeout": 10, **(own if rank == size - 1 else {})}
        said.append(raised(lambda options=options: OffloadEngine(model(), **options)))
        groups.append(len(distributed_c10d._world.pg_map))
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        threads.append(sum("gloo" in name for name in names))
    with OffloadEngine(model(), precision="fp32", rank_timeout=10) as engine:
        loss = engine(torch.ones(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    return said, groups, threads, float(loss)
