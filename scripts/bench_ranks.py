#!/usr/bin/env python3
"""Steps of several ranks, on the CPU over gloo or on GPUs over NCCL: the engine in its three placements, FSDP2 and
DDP, in turns.

Each contender trains the same transformer on the same data, in the same processes, one after the other in every round:
the ratio of two is the median of the ratios within a round. Memory is not compared: the contenders share processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _step_model import Shape
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from offload import OffloadEngine

LR = 1e-3
CONTENDERS = ("engine, weights", "engine, gradients", "engine, states", "FSDP2", "DDP")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="8x512", help="layers x width")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="of each contender in a round; the first is not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29677)
    given = parser.parse_args()
    multiprocessing.spawn(_rank, (given,), given.ranks)
    return 0


def _rank(rank: int, given: argparse.Namespace) -> None:
    """One process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given.port), RANK=str(rank), WORLD_SIZE=str(given.ranks))
    torch.set_num_threads(max(torch.get_num_threads() // given.ranks, 1))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo")
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, float] = {}
    for turn in range(given.rounds):
        order = CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]
        for name in order:
            steps, losses[name] = _run(name, rank, given)
            seconds[name].append(statistics.median(steps[1:]))
        if rank == 0:
            print(f"round {turn + 1} of {given.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        _show(given, seconds, losses)
    distributed.destroy_process_group()


def _run(name: str, rank: int, given: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss, of all ranks."""
    shape = Shape.parse(given.model, given.batch, given.context)
    torch.manual_seed(0)
    model = shape.model()
    step, end = _CONTENDER[name.partition(",")[0]](model, name.rpartition(" ")[2], given.device)
    seconds = []
    loss = torch.zeros(())
    for index in range(given.steps):
        tokens, targets = shape.tokens(torch.Generator().manual_seed(1000 * index + rank))
        tokens, targets = tokens.to(given.device), targets.to(given.device)
        distributed.barrier()
        begun = time.perf_counter()
        loss = step(tokens, targets)
        if given.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    loss = loss.detach().clone()
    distributed.all_reduce(loss)
    end()
    return seconds, float(loss) / given.ranks


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _engine(model: nn.Module, shard: str, device: str) -> tuple[Step, Callable[[], object]]:
    engine = OffloadEngine(model, lr=LR, shard=shard, device=device)  # type: ignore[arg-type]

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step, engine.close


def _plain(model: nn.Module) -> tuple[Step, Callable[[], object]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: None


def _fsdp(model: nn.Module, _: str, device: str) -> tuple[Step, Callable[[], object]]:
    mesh = distributed.device_mesh.init_device_mesh(device, (distributed.get_world_size(),))
    model = model.to(device)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model)


def _ddp(model: nn.Module, _: str, device: str) -> tuple[Step, Callable[[], object]]:
    return _plain(DistributedDataParallel(model.to(device)))


_CONTENDER: dict[str, Any] = {"engine": _engine, "FSDP2": _fsdp, "DDP": _ddp}


def _show(given: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, float]) -> None:
    print(f"{given.ranks} ranks, {given.model}, batch {given.batch} x {given.context} a rank, seconds of a step:")
    print("  contender           median     min     max   of FSDP2's   last loss")
    for name in CONTENDERS:
        of_peer = statistics.median(own / peer for own, peer in zip(seconds[name], seconds["FSDP2"], strict=True))
        values = (statistics.median(seconds[name]), min(seconds[name]), max(seconds[name]))
        print(f"  {name:18}" + "".join(f"{value:8.3f}" for value in values) + f"{of_peer:11.2f}{losses[name]:14.5f}")
    print(json.dumps({"seconds": seconds, "losses": losses}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
