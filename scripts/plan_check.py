#!/usr/bin/env python
"""What ``offload plan`` predicts against steps that are taken: sizes, budgets, clipping, batches and backends.

    python scripts/plan_check.py --nvme-path /mnt/nvme --save runs.json
    python scripts/plan_check.py --cases 12x768:least:never:1:io_uring --steps 8
    python scripts/plan_check.py --cases 12x768:600MiB:never:1:io_uring:bf16
    python scripts/plan_check.py --again runs.json        # predictions anew, for steps that were taken before

Each run is a process of its own (the worker of ``bench_step.py``). Before each run the machine is looked at as
``offload plan`` does, so that a slow minute of a shared machine hits both. The least budget is the engine's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from _step_model import VOCABULARY, Shape
from _step_process import Turns, WorkerFailed

from offload.option_values import parse_bytes
from offload.predict.machine import Cores, DeviceMachine, Machine
from offload.predict.model import Model
from offload.predict.network import Network
from offload.predict.overhead import record_seconds, unit_seconds
from offload.predict.prediction import Prediction, least_host_bytes, predict
from offload.predict.probe import probe
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

BOUNDS = {"never": 1e9, "always": 1e-3}
"""Bounds of the gradient norm by what they do."""

STATE_BYTES = {"fp32": 16, "bf16": 14}
"""Of a parameter: weight, gradient, two moments and what a master has beside the weight."""

CONTEXT = 128

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Case:
    """A run. ``budget`` is "all", "half", "least" or bytes such as "600MiB", ``clipping`` a key of ``BOUNDS``."""

    size: str
    budget: str
    clipping: str
    batch: int
    backend: str
    precision: Precision = "fp32"

    @classmethod
    def parse(cls, text: str) -> Case:
        """``12x768:least:never:1:io_uring``; ``:bf16`` behind it for another precision than fp32."""
        size, budget, clipping, batch, backend, *precision = text.split(":")
        return cls(size, budget, clipping, int(batch), backend, *precision)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return (
            f"{self.size}, {self.precision}, {self.budget}, clipped {self.clipping}, batch {self.batch}, {self.backend}"
        )

    @property
    def shape(self) -> Shape:
        return Shape.parse(self.size, self.batch, CONTEXT)

    @property
    def workload(self) -> Workload:
        clipped = self.clipping == "always"
        return Workload(
            batch=self.batch, sequence=CONTEXT, precision=self.precision, clipped=clipped,
            gradient_clipping=BOUNDS[self.clipping],
        )  # fmt: skip

    def model(self) -> Model:
        shape = self.shape
        with torch.device("meta"):
            module = shape.model()
        return Model(self.size, module, shape.layers, shape.width, shape.width, VOCABULARY)


@dataclass(frozen=True)
class Run:
    """What was seen: the machine before it, and the seconds of its steps."""

    case: Case
    machine: Machine
    turn: dict[str, Any]

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Run:
        machine = saved["machine"] | {
            "cores": Cores(**saved["machine"]["cores"]),
            "nvme": Bandwidths(**saved["machine"]["nvme"]),
            "device": DeviceMachine(**saved["machine"]["device"]),
            "network": Network(**saved["machine"]["network"]),
            "assumptions": tuple(saved["machine"]["assumptions"]),
        }
        return cls(Case(**saved["case"]), Machine(**machine), saved["turn"])

    @property
    def seconds(self) -> list[float]:
        return list(self.turn["seconds"])

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
    turns = Turns(None)
    with tempfile.TemporaryDirectory(prefix="plan-check-", dir=arguments.nvme_path) as folder:
        for case in arguments.cases or _grid():
            machine = _machine(case, folder)
            request: dict[str, Any] = {
                "system": "engine", "shape": asdict(case.shape), "precision": case.precision, "nvme_path": folder,
                "device": "cpu", "device_memory": "auto", "clipping": BOUNDS[case.clipping],
                "io_backend": case.backend, "host_memory": machine.host_bytes,
            }  # fmt: skip
            try:
                run = Run(case, machine, turns.take(request, arguments.warm_up, arguments.steps))
            except WorkerFailed as failure:
                print(f"{case.name}: {failure}", file=sys.stderr, flush=True)
                continue
            print(_row(run), file=sys.stderr, flush=True)
            yield run


def _machine(case: Case, folder: str) -> Machine:
    """This machine as it is now, with the budget of the case."""
    model, workload = case.model(), case.workload
    machine = probe([Path(folder)], model, workload, host_bytes=0, backend=case.backend)
    machine = replace(machine, unit_seconds=unit_seconds(), record_seconds=record_seconds(Path(folder)))
    state_bytes = STATE_BYTES[case.precision] * model.num_parameters
    named = {"all": 2 * state_bytes, "half": state_bytes // 2, "least": 0}
    budget = named[case.budget] if case.budget in named else int(parse_bytes("--cases", case.budget))
    return replace(machine, host_bytes=max(budget, least_host_bytes(model, machine, workload)))


def _grid() -> Iterator[Case]:
    """All combinations of the smaller models, with one backend; some of the larger one, and of the other backend."""
    for budget in ("all", "half", "least"):
        for clipping in BOUNDS:
            for size in ("4x384", "8x512"):
                yield Case(size, budget, clipping, 1, "io_uring")
                yield Case(size, budget, clipping, 4, "io_uring")
            yield Case("12x768", budget, clipping, 1, "io_uring")
            if budget != "all":
                yield Case("8x512", budget, clipping, 1, "threads")
    yield Case("12x768", "least", "never", 4, "io_uring")


def _row(run: Run) -> str:
    case, prediction, median = run.case, run.prediction(), statistics.median(run.seconds)
    return (
        f"| {case.size} | {run.turn['parameters'] / 1e6:.0f} | {case.precision} | {case.budget} | {case.clipping} "
        f"| {case.batch} | {case.backend} | {prediction.seconds:.3f} ({prediction.limit}) "
        f"| {median:.3f} ({min(run.seconds):.3f} to {max(run.seconds):.3f}) | {_deviation(run):+.0%} |"
    )


def _deviation(run: Run) -> float:
    return run.prediction().seconds / statistics.median(run.seconds) - 1


def _table(runs: list[Run]) -> str:
    titles = (
        "model | M parameters | precision | budget | clipped | batch | backend | predicted, s | measured, s | deviation"
    )
    deviations = [abs(_deviation(run)) for run in runs]
    worst = max(runs, key=lambda run: abs(_deviation(run)))
    within = sum(1 for deviation in deviations if deviation <= 0.1)
    return "\n".join(
        [
            f"| {titles} |",
            "|" + "---|" * len(titles.split("|")),
            *map(_row, runs),
            "",
            f"{within} of {len(runs)} runs are within 10 %, half within {statistics.median(deviations):.0%}; the worst "
            f"is off by {_deviation(worst):+.0%} ({worst.case.name}).",
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        type=Case.parse,
        metavar="SIZE:BUDGET:CLIPPED:BATCH:BACKEND[:PRECISION]",
        help="default: a grid of 35",
    )
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a run that are not counted (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run (default: 4)")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a directory on the SSD")
    parser.add_argument("--save", type=Path, help="write what was seen to this file, for --again")
    parser.add_argument("--again", type=Path, help="predict anew for what --save has written, and take no steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
