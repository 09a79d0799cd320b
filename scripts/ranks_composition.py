#!/usr/bin/env python3
"""One small model on eight ranks, over all ways to divide them: stages of a pipeline, replicas, shards, and parts of
parameters (tensor parallelism). Each must train as one process in memory does, to rounding, and all ranks that hold the
same parameters must hold the same bits of them."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from ranks import composition
from ranks.pool import Pool, RanksFailed

_LOSS_TOLERANCE, _WEIGHT_TOLERANCE = 1e-5, 2e-4
"""Relative, and absolute. Adam turns the rounding of a gradient that is nearly zero into a part of a step, of 1e-2."""


def cases(num_ranks: int) -> list[dict[str, Any]]:
    """Every way to divide so many ranks, in turns with the options."""
    schedules = itertools.cycle(["1f1b", "gpipe", "interleaved"])
    shards = itertools.cycle(["weights", "states", "gradients"])
    sequence = itertools.cycle([False, True])
    sizes = [size for size in (1, 2, 4, 8) if num_ranks % size == 0]
    return [
        {
            "pp": pp,
            "tp": tp,
            "replicas": replicas,
            "schedule": next(schedules) if pp == 2 else "1f1b",  # an interleaved one has two stages on each rank
            "shard": next(shards),
            "sequence": next(sequence) and tp == 2,  # the sequences have two elements
        }
        for pp, tp, replicas in itertools.product(sizes, repeat=3)
        if pp <= composition.BLOCKS and tp <= 4 and num_ranks % (pp * tp * replicas) == 0
        # a rank has a row for each micro-batch
        if composition.ROWS // (num_ranks // pp // tp) >= (composition.MICRO_BATCHES if pp > 1 else 1)
    ]


def differences(found: list[dict[str, Any]], expected: dict[str, Any]) -> list[str]:
    """What is wrong with a run."""
    wrong = []
    of_name: dict[str, torch.Tensor] = {}
    for rank, of_rank in enumerate(found):
        for what, own in (("losses", of_rank["losses"]), ("norms", of_rank["norms"])):
            close = all(abs(a - b) <= _LOSS_TOLERANCE * b for a, b in zip(own, expected[what], strict=False))
            if not close:
                wrong.append(f"rank {rank}: {what} are {own}, not {expected[what]}")
        for name, value in of_rank["weights"].items():
            if not torch.equal(of_name.setdefault(name, value), value):
                wrong.append(f"rank {rank}: {name} is another than on ranks before it")
            if (value - expected["weights"][name]).abs().max() > _WEIGHT_TOLERANCE:
                wrong.append(f"rank {rank}: {name} is off by {(value - expected['weights'][name]).abs().max():.2g}")
    if of_name.keys() != expected["weights"].keys():
        wrong.append("not all weights are there")
    if not any(of_rank["losses"] for of_rank in found):
        wrong.append("no rank has a loss")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8))
    arguments = parser.parse_args()
    expected, pool, num_wrong = composition.plain(), Pool(arguments.ranks), 0
    try:
        for case in cases(arguments.ranks):
            began, text = time.monotonic(), ", ".join(f"{name}={value}" for name, value in case.items())
            try:
                wrong = differences(pool(composition.composed, timeout_s=180, **case), expected)
            except RanksFailed as error:
                wrong = [str(error).strip().rpartition("\n")[2]]
            print(f"{text}: {'; '.join(wrong) or 'the same training'} ({time.monotonic() - began:.1f} s)", flush=True)
            num_wrong += bool(wrong)
    finally:
        pool.stop()
    print(f"{num_wrong} of {len(cases(arguments.ranks))} differ from one process")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
