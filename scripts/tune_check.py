#!/usr/bin/env python3
"""``offload plan --tune`` on throttled drives: is what it says never slower than the defaults?

A small model in fp32, most of whose states are on NVMe, is tuned on each of ``--drives`` (READ/WRITE in MB/s): this
machine's drive under a cgroup that throttles the process (root). Where the defaults stand, the row has what came
closest to them. Else the answer and the defaults train in turns once more, for the median of each. All turns are of one
process, and the drive limits all of them.

    python scripts/tune_check.py --drives 200/200 120/40 40/40 --path DIR
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
from _cgroups import drive_limit
from torch import nn

from offload.config import OffloadConfig
from offload.predict import tuning
from offload.predict.model import Model
from offload.predict.workload import Workload

WIDTH, DEPTH, VOCABULARY = 256, 8, 512
MEGA = 1e6


def build() -> Model:
    blocks = (nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(DEPTH))
    module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    return Model("small", module, DEPTH, WIDTH, WIDTH, VOCABULARY)


def row(drive: str, folder: Path, micro_batches: int, host_memory: str, rounds: int) -> str:
    workload = Workload(batch=2, sequence=32, micro_batches=micro_batches, precision="fp32")
    options = {"nvme_path": [str(folder)], "host_memory": host_memory}
    found = tuning.tune(build, workload, options, lambda line: print("   ", line, flush=True))
    defaults, *others = found.trials
    closest = min(others, key=lambda trial: trial.median)
    cells = [drive, str(micro_batches), str(len(found.trials)), f"{defaults.median:.2f}"]
    cells.append(f"{tuning.shown(closest.settings)}: {closest.median:.2f}")
    if found.defaults_stand:
        return " | ".join([*cells, "the defaults stand", ""])
    settings = [{**found.options, **found.loop, **own} for own in (_defaults_of(found.best, workload), {})]
    turns = [[tuning._turn(build(), workload.sequence, each)[0] for each in settings] for _ in range(rounds)]
    before, after = (statistics.median(column) for column in zip(*turns, strict=True))
    return " | ".join([*cells, tuning.shown(found.best), f"{before:.2f} and {after:.2f}"])


def _defaults_of(settings: tuning.Options, workload: Workload) -> dict[str, object]:
    given = {"batch": workload.batch, "gradient_accumulation_steps": workload.micro_batches, "together": False}
    return {name: given[name] if name in given else getattr(OffloadConfig, name) for name in settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drives", nargs="+", default=["200/200", "120/40", "40/40"], metavar="READ/WRITE")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--host-memory", default="12MiB")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison afterwards")
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on the drive that is throttled")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for drive in given.drives:
        read, write = (float(rate) * MEGA for rate in drive.split("/"))
        for micro_batches in given.micro_batches:
            with (
                tempfile.TemporaryDirectory(dir=given.path) as folder,
                drive_limit(os.getpid(), Path(folder), read, write),
            ):
                rows.append(row(drive, Path(folder), micro_batches, given.host_memory, given.rounds))
            print(f"| {rows[-1]} |", flush=True)
    print("\n| read/write, MB/s | micro-batches | settings | defaults, s | closest, s | chosen | once more, s |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(f"| {each} |" for each in rows))


if __name__ == "__main__":
    main()
