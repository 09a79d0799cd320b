"""Random models whose blocks hand tensors over, keep their weights and write to them in random ways.

Judged by ``strange_programs``.

    PYTHONPATH=tests python -m strange_models --programs 1000
"""

from __future__ import annotations

import random
import types
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from strange_programs import Found, main
from tiny import least_budget
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import OffloadEngine, OffloadError

WIDTH = 16
NUM_STEPS = 4


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class OwnDict(dict[str, torch.Tensor]):
    pass


@dataclass
class Output:
    value: torch.Tensor
    more: Any = None


def _attribute(block: Block, value: torch.Tensor) -> None:
    block.__dict__["result"] = value


def _cache(block: Block, value: torch.Tensor) -> None:
    block.cache.setdefault(block.index, []).append(value)


HANDOVERS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "itself": (lambda block, value: value, lambda block, out: out),
    "tuple": (lambda block, value: (value, 3), lambda block, out: out[0]),
    "dataclass": (lambda block, value: Output(value), lambda block, out: out.value),
    "slots": (lambda block, value: Slots(value), lambda block, out: out.value),
    "namespace": (lambda block, value: types.SimpleNamespace(value=value), lambda block, out: out.value),
    "dict subclass": (lambda block, value: OwnDict(value=value), lambda block, out: out["value"]),
    "user dict": (lambda block, value: UserDict(value=value), lambda block, out: out["value"]),
    "distribution": (lambda block, value: torch.distributions.Normal(value, 1.0), lambda block, out: out.mean),
    "attribute": (_attribute, lambda block, out: block.__dict__.pop("result")),
    "cache": (_cache, lambda block, out: block.cache[block.index].pop()),
    "closure": (lambda block, value: lambda: value, lambda block, out: out()),
    "generator": (lambda block, value: iter([value]), lambda block, out: next(out)),
    "with its weight": (
        lambda block, value: Output(value, block.weight),
        lambda block, out: out.value + out.more.sum(),
    ),
}
"""What a block returns of its result, and how its caller finds it."""

PENALTIES: dict[str, Callable[[Block, torch.Tensor], torch.Tensor]] = {
    "of the weight": lambda block, value: block.weight.square().mean(),
    "of both": lambda block, value: (block.weight * value.mean()).logsumexp(-1).sum() * 1e-2,
    "of the result": lambda block, value: value.logsumexp(-1).square().mean() * 1e-2,
}
"""Auxiliary losses that a block puts into a list of the model's."""

KEPT: dict[str, Callable[[Block], Any]] = {
    "view": lambda block: block.weight.view(-1),
    "rows": lambda block: block.weight[1:3],
    "detached": lambda block: block.weight.detach(),
    "data": lambda block: block.weight.data,
    "parameter": lambda block: block.weight,
    "array": lambda block: block.weight.detach().numpy(),
    "dictionary": lambda block: {"w": [block.weight.t()]},
}
"""What a block keeps of its weight."""

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda weight: weight.data.mul_(0.9),
    "clamped": lambda weight: weight.data.clamp_(-0.2, 0.2),
    "permuted": lambda weight: weight.data.copy_(weight.data.flip(0).clone()),
    "an element": lambda weight: weight.data.view(-1)[5:6].add_(0.1),
    "array": lambda weight: weight.detach().numpy().__imul__(0.95),
    "under no_grad": lambda weight: _without_grad(lambda: weight.mul_(0.97)),
    "another tensor": lambda weight: setattr(weight, "data", weight.data * 0.9),
    "swapped rows": lambda weight: weight.data[:2].copy_(weight.data[:2].flip(0).clone()),
}
"""Ways to write to a weight within a forward."""


def _without_grad(write: Callable[[], Any]) -> None:
    with torch.no_grad():
        write()


def _as_tensor(kept: Any) -> torch.Tensor:
    return kept["w"][0] if isinstance(kept, dict) else torch.as_tensor(kept)


@dataclass(frozen=True)
class BlockPlan:
    handover: str
    core: str
    penalty: str | None = None
    kept: str | None = None
    write: str | None = None
    write_in: frozenset[int] = frozenset()
    """Forwards in which it writes, by their numbers."""
    writes_after: bool = False
    """Once it has computed."""
    saved: str | None = None
    """Hooks of saved tensors within it."""


@dataclass(frozen=True)
class Program:
    """A model, and a loop."""

    seed: int
    blocks: tuple[BlockPlan, ...]
    around: str
    """What is around the forward of the middle blocks."""
    loop: tuple[str, ...]
    """What each step does beside a forward and a backward."""
    uses_kept: str | None
    """What the loop does with what a block keeps."""


CORES = ("linear", "twice", "elementwise", "norm", "function")


def draw(seed: int) -> Program:
    """The program of a number."""
    chance = random.Random(seed)
    blocks = []
    writer = chance.randrange(8)
    keeper = chance.randrange(8)
    for index in range(chance.randint(3, 6)):
        writes, keeps = index == writer, index == keeper
        blocks.append(
            BlockPlan(
                handover=chance.choice(list(HANDOVERS)),
                core=chance.choice(CORES),
                penalty=chance.choice([None, None, *PENALTIES]),
                kept=chance.choice(list(KEPT)) if keeps else None,
                write=chance.choice(list(WRITES)) if writes else None,
                write_in=frozenset(chance.sample(range(1, 7), chance.randint(1, 3))) if writes else frozenset(),
                writes_after=chance.random() < 0.3,
                saved=chance.choice([None] * 8 + ["cpu", "half"]),
            )
        )
    extras = ["nothing", "nothing", "evaluate", "two forwards", "gradient of the input", "accumulate"]
    return Program(
        seed,
        tuple(blocks),
        chance.choice(["nothing", "nothing", "checkpoint", "reentrant checkpoint", "cpu", "enable_grad"]),
        tuple(chance.choice(extras) for _ in range(NUM_STEPS)),
        chance.choice([None, "read", "penalty", "write"]) if keeper < len(blocks) else None,
    )


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


_SAVED: dict[str, Callable[[], Any]] = {
    "cpu": torch.autograd.graph.save_on_cpu,
    "half": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor,
        lambda kept: kept.float() if kept.is_floating_point() else kept,
    ),
}


class Block(nn.Module):
    def __init__(self, plan: BlockPlan, index: int, aux: list[torch.Tensor], cache: dict[int, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.plan, self.index, self.num_calls = plan, index, 0
        self.__dict__.update(aux=aux, cache=cache)

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        plan = self.plan
        writes = plan.write is not None and self.num_calls in plan.write_in
        if writes and not plan.writes_after:
            WRITES[plan.write](self.weight)
        if plan.saved is None:
            value = self._compute(x)
        else:
            with _SAVED[plan.saved]():
                value = self._compute(x)
        if plan.penalty is not None:
            self.aux.append(PENALTIES[plan.penalty](self, value))
        if plan.kept is not None:
            self.__dict__["kept"] = KEPT[plan.kept](self)
        if writes and plan.writes_after:
            WRITES[plan.write](self.weight)
        return HANDOVERS[plan.handover][0](self, value)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        core = self.plan.core
        if core == "linear":
            return torch.tanh(F.linear(x, self.weight, self.bias))
        if core == "twice":
            return F.linear(F.gelu(F.linear(x, self.weight)), self.weight.t(), self.bias)
        if core == "elementwise":
            return x * self.weight[0] + torch.sigmoid(x) * self.weight.mean(0) + self.bias
        if core == "norm":
            return F.layer_norm(x, (WIDTH,), self.weight[0] + 1, self.bias) + x
        return Product.apply(x, self.weight).exp().clamp(max=4) + self.bias  # type: ignore[no-any-return]


class Strange(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.__dict__.update(aux=[], cache={})
        self.blocks = nn.ModuleList(
            Block(plan, index, self.aux, self.cache) for index, plan in enumerate(program.blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *middle, last = self.blocks
        x = _through(first, x)
        around = self.program.around

        def run(x: torch.Tensor) -> torch.Tensor:
            for block in middle:
                x = _through(block, x)
            return x

        if around == "cpu":
            with torch.autograd.graph.save_on_cpu():
                x = run(x)
        elif around == "enable_grad" and torch.is_grad_enabled():
            with torch.no_grad(), torch.enable_grad():
                x = run(x)
        elif around.endswith("checkpoint") and torch.is_grad_enabled() and not self._has_effects(middle):
            x = checkpoint(run, x, use_reentrant=around.startswith("reentrant"))
        else:
            x = run(x)
        return _through(last, x)

    def _has_effects(self, blocks: list[Block]) -> bool:
        """Which come twice where they are recomputed."""
        return any(block.plan.penalty or block.plan.write or block.plan.saved for block in blocks)


def _through(block: Block, x: torch.Tensor) -> torch.Tensor:
    return HANDOVERS[block.plan.handover][1](block, block(x))


def run(program: Program, place: str, folder: Path) -> Found:
    """Train the program's model there."""
    found = Found()
    torch.manual_seed(program.seed)
    model = Strange(program)
    engine = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if place == "torch":
                optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
                call: Any = model
            else:
                options: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01}
                if place == "nvme":
                    options["host_memory"] = least_budget(Strange(program), folder, **options)
                    options["nvme_path"] = folder
                call = engine = OffloadEngine(model, **options)
                optimizer = engine.optimizer
            for step, extra in enumerate(program.loop):
                _step(program, model, call, optimizer, step, extra, found)
            found.weights = [parameter.detach().clone() for parameter in model.parameters()]
    except Exception as error:
        found.error, found.is_typed, found.message = type(error).__name__, isinstance(error, OffloadError), str(error)
    finally:
        if engine is not None:
            engine.close()
    return found


def _step(program: Program, model: Strange, call: Any, optimizer: Any, step: int, extra: str, found: Found) -> None:
    generator = torch.Generator().manual_seed(1000 * program.seed + step)
    x = torch.randn(3, WIDTH, generator=generator)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        model.aux.clear()
        loss = call(x).square().mean()
        loss = sum(model.aux, loss)
        model.aux.clear()
        return loss

    if extra == "evaluate":
        with torch.no_grad():
            found.numbers.append(loss_of(x).item())
    if extra == "gradient of the input":
        wanted = x.clone().requires_grad_()
        found.numbers += torch.autograd.grad(loss_of(wanted), wanted)[0].flatten().tolist()[:8]
    losses = [loss_of(x.requires_grad_())]
    if extra == "two forwards":
        losses.append(loss_of(x + 1))
    for loss in losses:
        loss = _with_kept(program, model, loss, found, step)
        loss.backward()
        found.numbers.append(loss.item())
    if extra == "accumulate":
        loss_of(2 * x).backward()
    optimizer.step()
    optimizer.zero_grad()
    _look_at_kept(program, model, found, step)


def _keeper(model: Strange) -> Block | None:
    return next((block for block in model.blocks if "kept" in block.__dict__), None)


def _with_kept(program: Program, model: Strange, loss: torch.Tensor, found: Found, step: int) -> torch.Tensor:
    block = _keeper(model)
    if program.uses_kept == "penalty" and block is not None:
        return loss + _as_tensor(block.kept).square().mean()
    return loss


def _look_at_kept(program: Program, model: Strange, found: Found, step: int) -> None:
    block = _keeper(model)
    if block is None:
        return
    if program.uses_kept == "read":
        found.numbers.append(_as_tensor(block.kept).double().sum().item())
    if program.uses_kept == "write" and step == 1:
        with torch.no_grad():
            _as_tensor(block.kept).mul_(0.5)


if __name__ == "__main__":
    main(draw, run, str(__doc__))
