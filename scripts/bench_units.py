#!/usr/bin/env python3
"""What the engine takes for a small unit in one step, beyond plain PyTorch: all in RAM, a model of many linear layers.

Two models of the same seed take turns: one plain, with torch's fused AdamW, and one in an engine. Each turn is some
steps of each. CPU time is that of the process, the update thread's included. Calls are those of Python functions, in
all threads, that one more unit adds to a step: they are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from offload import OffloadEngine

Calls = Counter[str]
"""Calls of Python functions, by thread, file and function."""


def model_of(num_layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Callable[[], None]:
    """A function that takes one step of training."""

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_of(model: nn.Module, folder: str) -> OffloadEngine:
    return OffloadEngine(model, nvme_path=folder, host_memory="2GiB", optimizer="adamw", lr=1e-3)


class CallCounter:
    """Counts calls of Python functions in all threads that begin within it. Enter it before the engine is made."""

    def __init__(self) -> None:
        self.calls: Calls = Counter()
        self._counts = False

    def __enter__(self) -> CallCounter:
        threading.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def of(self, call: Callable[[], object], settle: Callable[[], object]) -> Calls:
        """Calls of ``call``, and of what goes on in other threads until ``settle`` returns."""
        settle()
        self.calls = Counter()
        sys.setprofile(self._see)
        self._counts = True
        try:
            call()
            settle()
        finally:
            self._counts = False
            sys.setprofile(None)
        return self.calls

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._counts and event == "call":
            code = frame.f_code
            thread = threading.current_thread().name
            self.calls[f"{thread} {code.co_filename.rpartition('/')[2]} {code.co_name}"] += 1


def calls_of_step(num_layers: int, width: int, batch: int) -> tuple[Calls, Calls]:
    """Python calls of one step after the first few: in an engine, and plain."""
    inputs = torch.randn(batch, width)
    plain = model_of(num_layers, width)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    with CallCounter() as counter, tempfile.TemporaryDirectory() as folder:
        of_plain = _counted(counter, steps_of(plain, optimizer, inputs), lambda: None)
        with engine_of(model_of(num_layers, width), folder) as engine:
            step = steps_of(engine.module, engine.optimizer, inputs)
            return _counted(counter, step, lambda: time.sleep(0.2)), of_plain


def _counted(counter: CallCounter, step: Callable[[], None], settle: Callable[[], object]) -> Calls:
    for _ in range(3):
        step()
    gc.collect()
    return counter.of(step, settle)


def calls_of_unit(width: int = 16, batch: int = 4, least: int = 20) -> tuple[Counter[str], float]:
    """Python calls that one more unit adds to a step, beyond those of plain PyTorch: by function, and all of them."""
    few, many = calls_of_step(least, width, batch), calls_of_step(2 * least, width, batch)
    added = [Counter({name: many[of][name] - few[of][name] for name in many[of]}) for of in (0, 1)]
    by_function = Counter({name: count for name, count in added[0].items() if count})
    return by_function, (sum(added[0].values()) - sum(added[1].values())) / least


def measure(step: Callable[[], None], num_steps: int) -> list[float]:
    """CPU seconds of the process for each of so many steps, the update's included, by pairs of steps."""
    seconds = []
    for _ in range(num_steps):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--functions", type=int, default=0, help="list as many functions by their calls a unit")
    arguments = parser.parse_args()
    by_function, calls = calls_of_unit()
    print(f"Python calls a unit and step beyond plain PyTorch: {calls:.1f}")
    for name, count in by_function.most_common(arguments.functions):
        print(f"  {count / 20:6.2f} {name}")
    torch.set_num_threads(1)
    inputs = torch.randn(arguments.batch, arguments.width)
    plain = model_of(arguments.units, arguments.width)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    model = model_of(arguments.units, arguments.width)
    with tempfile.TemporaryDirectory() as folder, engine_of(model, folder) as engine:
        steps = steps_of(engine.module, engine.optimizer, inputs), steps_of(plain, optimizer, inputs)
        for step in steps:
            measure(step, 4)
        turns: list[tuple[float, float]] = []
        for _ in range(arguments.turns):
            time.sleep(0.1)  # the last update is over
            ours = measure(steps[0], arguments.steps)
            time.sleep(0.1)
            turns.append((statistics.median(ours), statistics.median(measure(steps[1], arguments.steps))))
        over = [(ours - theirs) / arguments.units * 1e6 for ours, theirs in turns]
        ratios = [ours / theirs for ours, theirs in turns]
        for what, values, unit in (("overhead a unit", over, "us"), ("step / plain step", ratios, "")):
            low, middle, high = min(values), statistics.median(values), max(values)
            print(f"{what}: {middle:.2f} {unit} ({low:.2f} to {high:.2f}), medians of {arguments.turns} turns")


if __name__ == "__main__":
    main()
