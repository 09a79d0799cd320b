#!/usr/bin/env python
"""What the forecast says of a step of several ranks, against steps on the CPUs of this machine, over gloo.

    python scripts/scale_check.py --nvme-path /mnt/nvme --save runs.json
    python scripts/scale_check.py --cases 2:8x512:1:all:weights --steps 8
    python scripts/scale_check.py --again runs.json       # predictions anew, for steps that were taken before

Each run has processes of its own. Before its steps they look at the machine all at once: compute with as many processes
as there are ranks, updates, checksums, the drive, both collectives and their rounds. No constant is fitted to steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _scale_worker import Case, work
from torch import multiprocessing

from offload.predict.machine import Cores, DeviceMachine, Machine
from offload.predict.network import Network
from offload.predict.prediction import Prediction, predict
from offload.report.report import Bandwidths


@dataclass(frozen=True)
class Run:
    """What was seen: a rank's machine before the run, and the seconds of its steps. ``memory`` is the engine's plan."""

    case: Case
    machine: Machine
    seconds: list[float]
    memory: dict[str, dict[str, int]]

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Run:
        machine = dict(saved["machine"])
        machine |= {"cores": Cores(**machine["cores"]), "nvme": Bandwidths(**machine["nvme"])}
        machine |= {"device": DeviceMachine(**machine["device"]), "network": Network(**machine["network"])}
        machine |= {"assumptions": tuple(machine["assumptions"])}
        return cls(Case(**saved["case"]), Machine(**machine), saved["seconds"], saved["memory"])

    def prediction(self) -> Prediction:
        return predict(self.case.model(), self.machine, self.case.workload)


def main() -> None:
    arguments = _arguments()
    if arguments.again:
        runs = [Run.from_json(saved) for saved in json.loads(arguments.again.read_text())]
    else:
        runs = []
        for run in _taken(arguments):
            runs.append(run)
            if arguments.save:  # each time: a long check may be cut off
                arguments.save.write_text(json.dumps([asdict(run) for run in runs]))
    if not runs:
        sys.exit("nothing ran to its end")
    print(_table(runs))


def _taken(arguments: argparse.Namespace) -> Iterator[Run]:
    context = multiprocessing.get_context("spawn")
    for case in arguments.cases or _grid(arguments.size, arguments.batch):
        answer = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as meeting:
            given = (case, arguments.nvme_path, f"{meeting}/store", arguments.warm_up, arguments.steps, answer)
            try:
                multiprocessing.spawn(work, given, nprocs=case.ranks)
            except multiprocessing.ProcessRaisedException as failure:
                print(f"{case.name}: {failure}", file=sys.stderr, flush=True)
                continue
        run = Run(case, *answer.get())
        print(_row(run), file=sys.stderr, flush=True)
        yield run


def _grid(size: str, batch: int) -> Iterator[Case]:
    for ranks in (1, 2, 4):
        for budget, shard in (("all", "states"), ("all", "weights"), ("least", "weights")):
            if ranks > 1 or shard == "weights":
                yield Case(ranks, size, batch, budget, shard)


def _row(run: Run) -> str:
    case, prediction = run.case, run.prediction()
    assert prediction.plan is not None
    other = "" if prediction.plan.memory == run.memory else " (another plan)"
    spread = f"{statistics.median(run.seconds):.3f} ({min(run.seconds):.3f} to {max(run.seconds):.3f})"
    shard = case.shard if case.ranks > 1 else ""
    return (
        f"| {case.ranks} | {case.size} | {case.batch} | {case.budget} | {shard} | {spread} "
        f"| {prediction.seconds:.3f} ({prediction.limit}){other} | {_ratio(run):.2f} |"
    )


def _ratio(run: Run) -> float:
    """Predicted over measured."""
    return run.prediction().seconds / statistics.median(run.seconds)


def _table(runs: list[Run]) -> str:
    titles = "ranks | model | batch a rank | budget | shard | measured, s | predicted, s | predicted over measured"
    within = sum(1 for run in runs if abs(_ratio(run) - 1) <= 0.1)
    worst = max(runs, key=lambda run: abs(_ratio(run) - 1))
    return "\n".join(
        [
            f"| {titles} |",
            "|" + "---|" * len(titles.split("|")),
            *map(_row, runs),
            "",
            f"{within} of {len(runs)} runs are within 10 %; the worst is {_ratio(worst):.2f} ({worst.case.name}).",
        ]
    )


def _case(text: str) -> Case:
    """``2:8x512:1:all:weights``."""
    ranks, *size, batch, budget, shard = text.split(":")
    return Case(int(ranks), ":".join(size), int(batch), budget, shard)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=_case, metavar="RANKS:SIZE:BATCH:BUDGET:SHARD", help="default: all")
    parser.add_argument("--size", default="8x512", help="of the model, LAYERSxWIDTH (default: 8x512)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank (default: 1)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a run that are not counted (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run (default: 6)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a directory on the SSD")
    parser.add_argument("--save", type=Path, help="write what was seen to this file, for --again")
    parser.add_argument("--again", type=Path, help="predict anew for what --save has written, and take no steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
