"""Blocks and loops of odd kinds, whose activations go over the tiers: each by PyTorch alone, by the engine that keeps
all, and in every mode, in RAM or with the least budget and the rest on NVMe.

The bits of the engine that keeps are asked for, and numbers near PyTorch's, or one typed error.

    PYTHONPATH=tests python -m strange_activations
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from strange_blocks import BATCH, BLOCKS, NUM_BLOCKS, ROWS, WIDTH
from strange_programs import Found as Outcome
from tiny import least_budget
from torch import nn
from torch.nn import functional as F

from offload import OffloadEngine, OffloadError, cross_entropy_in_tiles


@dataclasses.dataclass
class Found(Outcome):
    trace: str = ""
    left: tuple[int, int] = (0, 0)
    """Bytes in the pool of activations after the last step, in memory and on NVMe."""


class Model(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for kind in kinds)
        self.blocks[-1].__dict__["is_last"] = True
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        world: dict[str, Any] = {"losses": []}
        for index, block in enumerate(self.blocks):
            world["index"] = index
            x = block.call(x, world)
        x = self.norm(x)
        if targets is not None:
            return cross_entropy_in_tiles(self.head, x, targets, rows=24) + sum(world["losses"])
        self.__dict__["losses"] = world["losses"]
        return self.head(x)


# Loops: what a step does.


@dataclasses.dataclass
class Step:
    model: Model
    call: Any
    engine: OffloadEngine | None
    optimizer: Any
    index: int
    generator: torch.Generator
    numbers: list[float]

    def batch(self, batch: int = BATCH, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 50, (batch, rows + 1), generator=self.generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.call(tokens).flatten(0, 1), targets.flatten())
        return loss + sum(self.model.__dict__.pop("losses"))

    def end(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.index == 0:
                self.numbers.append(parameter.grad.double().sum().item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        self.numbers.append(loss.item())


def plain(step: Step) -> None:
    step.backward(step.loss(*step.batch()))
    step.end()


def accumulating(step: Step) -> None:
    for batch in (BATCH, 2, BATCH):
        step.backward(step.loss(*step.batch(batch)) / 3)
    step.end()


def two_graphs(step: Step) -> None:
    first, second = step.loss(*step.batch()), step.loss(*step.batch())
    step.backward(first)
    step.backward(second)
    step.end()


def two_graphs_at_once(step: Step) -> None:
    step.backward(step.loss(*step.batch()) + step.loss(*step.batch()))
    step.end()


def twice(step: Step) -> None:
    loss = step.loss(*step.batch())
    step.backward(loss, retain_graph=True)
    step.backward(loss)
    step.end()


def other_sizes(step: Step) -> None:
    step.backward(step.loss(*step.batch(BATCH + step.index, ROWS - 8 * step.index)))
    step.end()


def evaluating_between(step: Step) -> None:
    loss = step.loss(*step.batch())
    step.model.eval()
    with torch.no_grad():
        step.numbers.append(step.call(step.batch()[0]).double().sum().item())
    step.model.train()
    step.backward(loss)
    step.end()


def training_flag(step: Step) -> None:
    loss = step.loss(*step.batch())
    step.model.eval()
    step.backward(loss)
    step.end()
    step.model.train()


def generating_between(step: Step) -> None:
    loss = step.loss(*step.batch())
    with torch.no_grad():
        tokens = step.batch()[0]
        for _ in range(3):
            tokens = torch.cat([tokens[:, 1:], step.call(tokens)[:, -1:].argmax(-1)], 1)
    step.numbers.append(float(tokens.sum()))
    step.backward(loss)
    step.end()


def inference_between(step: Step) -> None:
    with torch.inference_mode():
        step.numbers.append(step.call(step.batch()[0]).double().sum().item())
    plain(step)


def gradient_of_the_input(step: Step) -> None:
    x = torch.randn(BATCH, ROWS, WIDTH, generator=step.generator, requires_grad=True)
    (gradient,) = torch.autograd.grad(step.call(x).square().mean(), x)
    step.numbers += gradient.flatten()[:8].tolist()
    step.model.__dict__.pop("losses", None)
    plain(step)


def penalty(step: Step) -> None:
    x = torch.randn(BATCH, ROWS, WIDTH, generator=step.generator, requires_grad=True)
    loss = step.call(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    step.model.__dict__.pop("losses", None)
    step.backward(loss + gradient.square().mean())
    step.end()


def forgotten(step: Step) -> None:
    step.loss(*step.batch())
    output = step.call(step.batch()[0])
    plain(step)
    step.numbers.append(output.double().sum().item())


def kept_graphs(step: Step) -> None:
    step.model.__dict__.setdefault("kept", []).append(step.call(step.batch()[0]))
    plain(step)


def interrupted_backward(step: Step) -> None:
    loss = step.loss(*step.batch())

    def stop(gradient: torch.Tensor) -> None:
        raise KeyError("stop")

    logits = step.call(step.batch()[0])
    logits.register_hook(stop)
    step.model.__dict__.pop("losses", None)
    with contextlib.suppress(KeyError):
        logits.sum().backward()
    step.backward(loss)
    step.end()


def interrupted_in_the_middle(step: Step) -> None:
    block = step.model.blocks[1]
    handle = block.register_full_backward_pre_hook(lambda module, gradient: {}["stop"])
    loss = step.loss(*step.batch())
    with contextlib.suppress(KeyError):
        loss.backward()
    handle.remove()
    step.optimizer.zero_grad()
    del loss
    plain(step)


def interrupted_forward(step: Step) -> None:
    handle = step.model.blocks[2].register_forward_pre_hook(lambda module, args: {}["stop"])
    with contextlib.suppress(KeyError):
        step.call(step.batch()[0])
    handle.remove()
    plain(step)


def in_another_thread(step: Step) -> None:
    loss = step.loss(*step.batch())
    thread = threading.Thread(target=step.backward, args=(loss,))
    thread.start()
    thread.join()
    step.end()


def anomalies(step: Step) -> None:
    with torch.autograd.detect_anomaly():
        plain(step)


def cast(step: Step) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = step.loss(*step.batch())
    step.backward(loss)
    step.end()


def saved_on_cpu(step: Step) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = step.loss(*step.batch())
    step.backward(loss)
    step.end()


def in_tiles_of_rows(step: Step) -> None:
    step.backward(step.call(*step.batch()))
    step.end()


def own_loss(step: Step) -> None:
    logits = step.call(step.batch()[0])
    step.model.__dict__.pop("losses", None)
    logits.backward(torch.ones_like(logits) / logits.numel())
    step.numbers.append(logits.mean().item())
    step.end()


def for_some_parameters(step: Step) -> None:
    step.backward(step.loss(*step.batch()), inputs=[*step.model.blocks[1].parameters(), *step.model.head.parameters()])
    step.end()


def weights_saved(step: Step) -> None:
    loss = step.loss(*step.batch())
    state = {name: value.clone() for name, value in step.model.state_dict().items()}
    step.backward(loss)
    step.end()
    if step.index == 1:
        step.model.load_state_dict(state)


def frozen_in_turns(step: Step) -> None:
    for index, block in enumerate(step.model.blocks):
        block.requires_grad_(index != step.index)
    plain(step)


def together(step: Step) -> None:
    def run(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = F.cross_entropy(step.call(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        return loss.item()

    batches = [step.batch(), step.batch(2), step.batch(BATCH, 16)]
    step.numbers += map(run, batches) if step.engine is None else step.engine.together(batches, run)
    step.model.__dict__.pop("losses", None)
    step.end()


def together_in_tiles(step: Step) -> None:
    def run(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        loss = step.call(*batch)
        loss.backward()
        return loss.item()

    batches = [step.batch() for _ in range(3)]
    step.numbers += map(run, batches) if step.engine is None else step.engine.together(batches, run)
    step.end()


LOOPS: dict[str, Callable[[Step], None]] = {
    loop.__name__: loop
    for loop in (
        plain, accumulating, two_graphs, two_graphs_at_once, twice, other_sizes, evaluating_between, training_flag,
        generating_between, inference_between, gradient_of_the_input, penalty, forgotten, kept_graphs,
        interrupted_backward, interrupted_in_the_middle, interrupted_forward, in_another_thread, anomalies, cast,
        saved_on_cpu, in_tiles_of_rows, own_loss, for_some_parameters, weights_saved, frozen_in_turns, together,
        together_in_tiles,
    )
}  # fmt: skip

MODES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "host": {"activations": "host", "activation_memory": "8MiB"},
    "nvme": {"activations": "nvme", "activation_memory": "64KiB"},
    "auto": {"activations": "auto", "activation_memory": "64KiB"},
    "by unit": {
        "activations": {"blocks.0*": "recompute", "blocks.1*": "nvme", "blocks.2*": "keep", "*": "host"},
        "activation_memory": "8MiB",
    },
}


@dataclasses.dataclass(frozen=True)
class Program:
    kinds: tuple[str, ...]
    loop: str
    num_steps: int = 3

    def __str__(self) -> str:
        return f"{'+'.join(dict.fromkeys(self.kinds))}, {self.loop}"


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _drop_graphs(model: Model) -> None:
    """Leave what the model keeps of its graphs: a backward of some inputs frees only what the nodes have saved that
    ran, and in PyTorch the rest lives as long as somebody holds the graph."""
    model.__dict__.pop("kept", None)
    model.__dict__.pop("losses", None)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                del module.__dict__[name]


def run(program: Program, mode: str | None, place: str, folder: Path) -> Found:
    """Train the program's model: by PyTorch alone, or in a mode, in RAM or on NVMe."""
    found = Found()
    _seed()
    model = Model(list(program.kinds))
    engine = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mode is None:
                optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
                call: Any = model
            else:
                options = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01, **MODES[mode]}
                if place == "nvme":
                    options["host_memory"] = least_budget(Model(list(program.kinds)), folder, **options)
                _seed()
                call = engine = OffloadEngine(model, nvme_path=folder, **options)
                optimizer = engine.optimizer
            _seed()
            generator = torch.Generator().manual_seed(1)
            for index in range(program.num_steps):
                LOOPS[program.loop](Step(model, call, engine, optimizer, index, generator, found.numbers))
            found.numbers += [random.random(), float(numpy.random.rand()), torch.rand(()).item()]
            found.numbers += [float(getattr(block, "count", 0)) for block in model.blocks]
            found.weights = [parameter.detach().clone().float() for parameter in model.parameters()]
            found.weights += [buffer.detach().clone().float() for buffer in model.buffers()]
    except Exception as error:
        found.error, found.is_typed, found.message = type(error).__name__, isinstance(error, OffloadError), str(error)
        found.trace = traceback.format_exc()
    finally:
        if engine is not None:
            pools = engine._session.parts.activations.pools
            _drop_graphs(model)
            if found.error is None:
                for pool in pools:
                    pool.drain()
                    if pool.taken_bytes or pool.nvme_bytes:
                        found.left = (pool.taken_bytes, pool.nvme_bytes)
            try:
                engine.close()
            except Exception as error:
                found.error = found.error or f"at the end: {type(error).__name__}"
                found.message = found.message or str(error)
    return found


SETTINGS = [
    ("keep", "nvme"), ("recompute", "ram"), ("host", "ram"), ("nvme", "nvme"), ("auto", "nvme"), ("by unit", "nvme"),
]  # fmt: skip


def judge(program: Program, folder: Path, settings: list[tuple[str, str]] = SETTINGS) -> tuple[list[str], set[str]]:
    """What is wrong with the program, and the typed errors that it had."""
    plain = run(program, None, "ram", folder)
    kept = run(program, "keep", "ram", folder)
    wrong, typed = [], set()
    outcomes = {("keep", "ram"): kept} | {setting: run(program, *setting, folder) for setting in settings}
    for (mode, place), found in outcomes.items():
        name = f"{mode}, {place}"
        if found.is_typed:
            typed.add(f"{name}: {found.message}")
        elif found.error != plain.error:
            wrong.append(
                f"{name}: {found.error}, {plain.error} in PyTorch: {found.message[:400]}\n{found.trace[-1500:]}"
            )
        elif found.error is None:
            apart = _apart(plain, found)
            if not apart < 2e-3:
                wrong.append(f"{name}: other numbers than PyTorch's: {apart}")
            if kept.error is None and not (
                repr(found.numbers) == repr(kept.numbers) and all(map(torch.equal, found.weights, kept.weights))
            ):
                wrong.append(f"{name}: other bits than keep in RAM: {_apart(kept, found)}")
            if any(found.left):
                wrong.append(f"{name}: left in the pool: {found.left}")
    if plain.error:
        wrong.append(f"PyTorch alone: {plain.error} {plain.message[:300]}\n{plain.trace[-700:]}")
    return wrong, typed


def _apart(left: Found, right: Found) -> float:
    if len(left.numbers) != len(right.numbers):
        return float("inf")
    apart = [abs(a - b) / (1 + abs(a)) for a, b in zip(left.numbers, right.numbers, strict=True)]
    apart += [(a - b).abs().max().item() for a, b in zip(left.weights, right.weights, strict=True) if a.numel()]
    return max((float("inf") if number != number else number for number in apart), default=0.0)


def programs(num_random: int = 0, first: int = 0) -> Iterator[Program]:
    """Each block with the plain loop, each loop with plain blocks, and so many random ones."""
    for kind in BLOCKS:
        yield Program((kind,) * NUM_BLOCKS, "plain")
    for loop in LOOPS:
        yield Program(("Kind", "Draws", "Statistics", "Kind"), loop)
    for seed in range(first, first + num_random):
        chance = random.Random(seed)
        yield Program(tuple(chance.choice(list(BLOCKS)) for _ in range(NUM_BLOCKS)), chance.choice(list(LOOPS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num = num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for program in programs(options.random, options.first):
            if options.only and not any(word in str(program) for word in options.only):
                continue
            wrong, typed = judge(program, Path(folder))
            num += 1
            num_wrong += bool(wrong)
            said: dict[str, list[str]] = {}
            for each in [*wrong, *sorted(typed)]:
                where, _, what = each.partition(": ")
                said.setdefault(what, []).append(where)
            if said:
                print(f"== {program}", "WRONG" if wrong else "")
                for what, where in said.items():
                    print("  ", "; ".join(where), "|", what, flush=True)
    print(f"{num} programs, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
