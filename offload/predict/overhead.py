"""Seconds that the engine itself takes of the cores: a chain of tiny units is trained for a few steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.errors import BudgetError
from offload.plan.plan import Plan
from offload.predict.cores import num_records

_UNITS, _WIDTH = 16, 64
"""Each unit passes NVMe in a fraction of the time that the engine takes to ask for it."""
_WARM_UP, _STEPS = 4, 9
_PLENTY = 64 << 20


def unit_seconds() -> float:
    """Seconds of a core for a unit in a step, all of it in memory. Ranks that have met call this together: what they
    tell each other for a unit is part of it."""
    chain = _chain().to_empty(device="cpu")
    plain = _core_seconds(lambda x: chain(x).square().mean().backward())
    return max(_of_step(_PLENTY)[0] - plain, 0.0) / _UNITS


def record_seconds(path: Path) -> float:
    """Seconds of a core for a record on NVMe in a step. For one process."""
    in_memory, _ = _of_step(_PLENTY)
    with tempfile.TemporaryDirectory(dir=path) as folder:
        try:
            _of_step(1, nvme_path=folder)
        except BudgetError as least:
            moved, plan = _of_step(least.needed_bytes, nvme_path=folder)
    return max(moved - in_memory, 0.0) / sum(map(num_records, plan.units))


def _of_step(host_bytes: int, **options: Any) -> tuple[float, Plan]:
    """Seconds of cores that a step takes."""
    with offload.OffloadEngine(_chain(), precision="fp32", host_memory=host_bytes, **options) as engine:

        def step(x: Tensor) -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return _core_seconds(step), engine.plan


def _core_seconds(work: Callable[[Tensor], None]) -> float:
    x = torch.ones(1, _WIDTH)
    taken = []
    for _ in range(_WARM_UP + _STEPS):
        start = time.process_time()
        work(x)
        taken.append(time.process_time() - start)
    return statistics.median(taken[_WARM_UP:])


def _chain() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH)) for _ in range(_UNITS)))
