#!/usr/bin/env python3
"""What commits and checkpoints cost a training run, in turns with the same run without them.

Two engines of one model at one budget take turns: one as it is, one with ``durable=k``, which commits each k-th step
(let ``--steps`` be a multiple of k). Then the plain one takes rounds of steps: without saving, with one
``save_checkpoint`` in the round, and with one ``torch.save`` of both state dicts, which is what training loops do.
Prints medians, minima and maxima.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _step_model import Shape

from offload import BudgetError, OffloadEngine


def measured(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def percent(ratios: list[float]) -> str:
    return f"{100 * statistics.median(ratios):+.1f} % ({100 * min(ratios):+.1f} to {100 * max(ratios):+.1f})"


Batch = tuple[torch.Tensor, torch.Tensor]


class Bench:
    def __init__(self, arguments: argparse.Namespace, path: Path) -> None:
        self._arguments = arguments
        self._path = path
        self.shape = Shape.parse(arguments.model, arguments.batch, arguments.context)
        self._budget: int | str = arguments.host_memory
        if self._budget == "least":
            self._budget = self._least()

    def engine(self, name: str, **options: object) -> OffloadEngine:
        folder = self._path / name
        folder.mkdir()
        return self._make(folder, self._budget, **options)

    def step(self, engine: OffloadEngine, batch: Batch) -> None:
        tokens, targets = batch
        engine.backward(engine(tokens, targets))
        engine.step()

    def steps(self, engine: OffloadEngine, batch: Batch, each: Callable[[int], None] = lambda index: None) -> float:
        start = time.perf_counter()
        for index in range(self._arguments.steps):
            self.step(engine, batch)
            each(index)
        return (time.perf_counter() - start) / self._arguments.steps

    def _make(self, folder: Path, budget: int | str, **options: object) -> OffloadEngine:
        arguments = self._arguments
        clipping = {"gradient_clipping": arguments.clip} if arguments.clip else {}
        return OffloadEngine(
            self.shape.model(), nvme_path=folder, host_memory=budget, precision=arguments.precision,
            **clipping, **options,
        )  # fmt: skip

    def _least(self) -> int:
        try:
            self._make(self._path, 1).close()
        except BudgetError as error:
            return error.needed_bytes
        raise SystemExit("one byte is enough")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="12x768", help="layers x width")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--host-memory", default="least")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--durable", type=int, default=1, help="commit each step of this number")
    parser.add_argument("--saves", type=int, default=None, help="turns with save_checkpoint and torch.save; as --turns")
    parser.add_argument("--path", default=None, help="directory on the disk to be measured")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as closing:
        path = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=arguments.path)))
        bench = Bench(arguments, path)
        batch = bench.shape.tokens(torch.Generator().manual_seed(0))
        plain, durable = bench.engine("plain"), bench.engine("durable", durable=arguments.durable)
        for engine in (plain, durable):
            bench.steps(engine, batch)
        name = f"durable={arguments.durable}"
        seconds: dict[str, list[float]] = {"plain": [], name: []}
        for _ in range(arguments.turns):
            seconds["plain"].append(bench.steps(plain, batch))
            seconds[name].append(bench.steps(durable, batch))
        durable.close()
        gc.collect()
        print(f"{arguments.model}, {arguments.precision}, host memory {plain.plan.host_bytes:,} bytes, on NVMe:")
        print(", ".join(f"{kind} {of['nvme']:,}" for kind, of in plain.plan.memory.items()))
        for kind, found in seconds.items():
            print(f"  step, {kind:<12} {measured(found)}")
        pairs = [b / a - 1 for a, b in zip(*seconds.values(), strict=True)]
        print(f"  {name} costs {percent(pairs)} of a step, by turn")

        saved, calls = path / "saved", []

        def checkpoint(index: int) -> None:
            if index == 1:
                start = time.perf_counter()
                plain.save_checkpoint(saved, "last")
                calls.append(time.perf_counter() - start)

        def copy(index: int) -> None:
            if index == 1:
                start = time.perf_counter()
                state = {"model": plain.state_dict(), "optimizer": plain.optimizer.state_dict()}
                torch.save(state, path / "copy.pt")
                copies.append(time.perf_counter() - start)

        copies: list[float] = []
        without, with_save, with_copy = [], [], []
        for _ in range(arguments.turns if arguments.saves is None else arguments.saves):
            without.append(bench.steps(plain, batch))
            with_save.append(bench.steps(plain, batch, checkpoint))
            with_copy.append(bench.steps(plain, batch, copy))
        shutil.rmtree(saved, ignore_errors=True)
        kinds = (("save_checkpoint", with_save, calls), ("torch.save of state dicts", with_copy, copies))
        for name, found, call in kinds if calls else ():
            extra = [(b - a) * arguments.steps / a for a, b in zip(without, found, strict=True)]
            print(f"  {name}: costs {percent(extra)} of a step; the call takes {measured(call)}")
        plain.close()


if __name__ == "__main__":
    main()
