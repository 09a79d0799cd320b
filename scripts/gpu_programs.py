#!/usr/bin/env python3
"""Random training programs on a GPU, at small budgets and with all of it resident: the same bits, and no memory left.

    python scripts/gpu_programs.py [--seed 0] [--seconds 60] [--jobs 8]

The programs are those of ``device_schedules.py``: nested units, checkpoints, tied weights, frozen parts, accumulation,
clipping, evaluation, writes through handles, activations elsewhere. Each runs with all of it on the GPU; with the least
of its memory, or a little more, and the rest in RAM; and with the least of both, and the rest on NVMe.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used

import torch
from _device_around import Around, loss_of
from device_schedules import Program, _equal, least

from offload import OffloadEngine


class _Around(Around):
    def forward_and_backward(self, engine: OffloadEngine, tokens: torch.Tensor, step: int) -> float:
        loss = loss_of(engine(tokens), tokens.cuda())
        engine.backward(loss)
        return loss.item()


def check(seed: int, folder: Path) -> list[str]:
    """Run one program at each budget; what was wrong."""
    program, rng, around = Program(seed), random.Random(seed + 3), _Around()

    def make(**budgets: Any) -> OffloadEngine:
        options = program.options() | (program.activations if budgets else {})
        return OffloadEngine(program.model(), device="cuda", nvme_path=folder, **options, **budgets)

    with make() as engine:
        expected = program.run(engine, around)
    del engine
    gc.collect()
    device_memory = int(least(make, "device_memory") * rng.choice((1, 1.3, 3, 4, 5)))
    host_memory = int(least(make, "host_memory", device_memory=device_memory) * rng.choice((1, 1, 1.3, 2)))
    wrong = []
    for budgets in ({"device_memory": device_memory}, {"device_memory": device_memory, "host_memory": host_memory}):
        before = torch.cuda.memory_allocated()
        with make(**budgets) as engine:
            if not _equal(program.run(engine, around), expected):
                wrong.append(f"other bits than with all on the GPU: {budgets}")
        del engine
        gc.collect()
        if (left := torch.cuda.memory_allocated() - before) > 0:
            wrong.append(f"{left} bytes are left on the GPU: {budgets}")
    return wrong


def _work(seeds: range, deadline: float, folder: Path) -> tuple[int, list[str]]:
    """The programs that ran, and what was wrong."""
    torch.set_num_threads(1)  # models are small, and threads that wait for one another take the time of others
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong, count = [], 0
    check(seeds[0], folder)  # in each process torch keeps a little for its first products
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        try:
            found = check(seed, folder)
        except Exception:
            found = [traceback.format_exc()]
        wrong += [f"seed {seed}: {line}" for line in found]
        for line in found:
            print(f"FAILED {seed} - {line}", flush=True)
        count += 1
    return count, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count up")
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="at a time")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(options.jobs) as pool,
    ):
        shares = [range(options.seed + job, 1 << 62, options.jobs) for job in range(options.jobs)]
        done = pool.starmap(_work, [(share, deadline, Path(folder)) for share in shares])
    wrong = [line for _, lines in done for line in lines]
    print(f"{sum(count for count, _ in done)} programs from seed {options.seed}: {len(wrong)} went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
