#!/usr/bin/env python
"""What a training step costs: everything in memory, under the engine at budgets from ample to the least, and under
DeepSpeed ZeRO-3 where it is installed.

    python scripts/bench_step.py --sizes 12x768 24x1024 --plot step.png
    python scripts/bench_step.py --sizes chain:1000x16 --systems in_memory engine      # overhead of a unit
    python scripts/bench_step.py --sizes 12x768 48x1600 --systems engine --budgets 600MiB
    pip install --no-deps --target OLD old.whl; python scripts/bench_step.py --systems engine --against old=OLD
    python scripts/bench_step.py --sizes 12x512 --curve --against old=OLD --rounds 1 --warm-up 2 --steps 3

Every turn of a system is a process of its own; the systems take turns, so that a slow minute of the machine hits all.
Steps before the timed ones warm it up. Bytes are counted by the kernel (``/proc/self/io``), and so is the peak of
memory (``VmHWM``). The bound of a step is the larger of the in-memory step and of the time that the bytes it moved take
at the bandwidths that the engine measured on the same path (and between host and device) in the same run. DeepSpeed
competes with the fastest of the settings in ``_step_deepspeed.TRIALS``, tried first, at every size. ``--curve`` takes
twelve budgets from the least to all, each clipped and not, and looks whether more memory is ever slower.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import _step_curve as curve
import _step_output as output
import torch
from _step_deepspeed import TRIALS, Settings
from _step_model import Shape
from _step_process import Limit, Turns, WorkerFailed

from offload.option_values import parse_bytes
from offload.report.report import Bandwidths

STATE_BYTES = {"fp32": 16, "bf16": 14}
"""Bytes of weights, masters, moments and gradients for one parameter, with AdamW."""

NEVER = 1e9
"""A norm that no gradient here reaches."""

_PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

ALL = 1 << 40
"""More memory than any model here needs."""


@dataclass
class Contender:
    """One row of the comparison: a system with its settings, and what its turns gave."""

    system: str
    budget: str
    clipping: str
    request: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn["seconds"]]

    def median(self, name: str) -> float:
        return statistics.median(turn[name] for turn in self.turns)


def main() -> None:
    arguments = _arguments()
    runs: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-step-", dir=arguments.nvme_path) as folder:
        for size in arguments.sizes:
            comparison = _Comparison(size, arguments, folder)
            runs += comparison.run()
            trials += comparison.trials
    result = {"machine": _machine(), "date": str(date.today()), "config": _plain(arguments), "runs": runs}
    result["deepspeed_trials"] = trials
    if arguments.json:
        print(json.dumps(result))
    else:
        (curve.print_curve if arguments.curve else output.print_table)(result)
    if arguments.plot:
        output.plot(result, arguments.plot)
    if arguments.record and runs:
        output.record(result, _commit(), arguments.record)
    if not runs:
        sys.exit("nothing ran to its end")


def _commit() -> str:
    """Short name of the commit, with a star if the tree has changes."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=*"], cwd=here, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["12x768"], help="LAYERSxWIDTH of GPT-2, llama:LAYERSxWIDTH or chain:LAYERSxWIDTH"
    )
    parser.add_argument("--device", default="cpu", help="where the model computes: cpu (default), cuda")
    parser.add_argument("--device-memory", default="auto", help="what the engine may hold of a GPU's memory")
    parser.add_argument("--checkpointing", action="store_true", help="keep the inputs of blocks only, for backward")
    parser.add_argument("--precision", choices=list(STATE_BYTES), default="fp32")
    parser.add_argument(
        "--optimizer", choices=["adamw", "lamb", "muon"], default="adamw", help="of the engine and in memory"
    )
    parser.add_argument(
        "--clipping",
        nargs="+",
        default=["1"],
        help='bounds of the gradient norm, which take turns: a number, 0 (no clipping), "never" (a bound that no step '
        'reaches), "always", or "sometimes" (the median norm of steps in memory) (default: 1)',
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system (default: 2)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a turn that are not counted (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn (default: 4)")
    systems = ["in_memory", "engine", *TRIALS]
    parser.add_argument("--systems", nargs="+", choices=systems, help="default: all that are installed")
    parser.add_argument(
        "--budgets",
        nargs="+",
        default=["all", "1/2", "1/4", "1/8", "least"],
        help='host memory of the engine: "all", "least" (of a device, too), a share of the model state such '
        'as 1/2 or 0.5, bytes such as 600MiB, or "peer": the peak RSS of DeepSpeed with NVMe',
    )
    parser.add_argument(
        "--curve",
        type=int,
        nargs="?",
        const=12,
        metavar="COUNT",
        help="take so many budgets (default: 12) from the least to all, each by the same factor above the one before, "
        "never clipped and always, beside memory alone; print a row for each budget, and where more memory is slower",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="other installations of this project (pip install --target DIR), which take turns with the engine",
    )
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a directory on the SSD to measure")
    parser.add_argument("--io-backend", default="auto")
    parser.add_argument("--limit", action="store_true", help="run the engine in a memory cgroup of its budget, imports "
                        "and activations (as the in-memory turn shows them)")  # fmt: skip
    parser.add_argument(
        "--trials",
        type=Path,
        help="an earlier --json: DeepSpeed's settings are chosen from its trials, not tried again",
    )
    parser.add_argument("--lock", help="hold this file's lock while steps are taken, so that other jobs keep still")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, nargs="?", const=_PAGE, metavar="PAGE", help="add a row for each run to "
                        "the table by version of this page (default: docs/performance.md)")  # fmt: skip
    parser.add_argument("--plot", help="write efficiency over budget, and time over size, to this image")
    arguments = parser.parse_args()
    if arguments.curve:
        arguments.systems, arguments.clipping = ["in_memory", "engine"], ["never", "always"]
    if arguments.systems is None:
        installed = importlib.util.find_spec("deepspeed") is not None
        arguments.systems = [name for name in systems if installed or name not in TRIALS]
    return arguments


class _Comparison:
    """All systems at one size."""

    def __init__(self, size: str, arguments: argparse.Namespace, folder: str) -> None:
        self._size = size
        self._arguments = arguments
        self._shape = Shape.parse(size, arguments.batch, arguments.context, arguments.checkpointing)
        with torch.device("meta"):
            model = self._shape.model()
        self._state_bytes = STATE_BYTES[arguments.precision] * sum(p.numel() for p in model.parameters())
        self._turns = Turns(arguments.lock)
        self._common = {"shape": asdict(self._shape), "precision": arguments.precision, "nvme_path": folder}
        self._common |= {name: getattr(arguments, name) for name in ("device", "device_memory", "optimizer")}
        self.trials: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        contenders = list(self._contenders())
        for _ in range(self._arguments.rounds):
            for contender in contenders:
                self._take_turn(contender, contenders)
        rows = [contender for contender in contenders if contender.turns]
        for failed in (contender for contender in contenders if contender.failure):
            print(f"{self._size} {failed.system} {failed.budget}: {failed.failure}", file=sys.stderr)
        return [self._summary(contender, rows) for contender in rows]

    def _contenders(self) -> Iterator[Contender]:
        bounds = {name: self._bound(name) for name in self._arguments.clipping}
        for system in self._arguments.systems:
            request = {**self._common, "system": system}
            settings: Settings | None = None
            if system in TRIALS:
                settings = self._fastest({**request, "clipping": next(iter(bounds.values()))}, TRIALS[system])
                if settings is None:
                    continue
            for name, bound in bounds.items():
                yield from self._with(system, name, {**request, "clipping": bound}, settings)

    def _with(
        self, system: str, clipping: str, request: dict[str, Any], settings: Settings | None
    ) -> Iterator[Contender]:
        """A system clipped in one way, with each budget that it can have."""
        if settings is not None:
            yield Contender(system, output.brief(settings), clipping, {**request, "settings": settings})
        elif system != "engine":
            yield Contender(system, "", clipping, request)
        else:
            for budget in self._budgets:
                host_memory = self._host_memory(budget)
                if host_memory is not None:
                    extra = {"host_memory": host_memory, "io_backend": self._arguments.io_backend}
                    yield Contender(system, budget, clipping, {**request, **extra})
                    for name, _, folder in (other.partition("=") for other in self._arguments.against):
                        with_other = {**request, **extra, "installation": folder}
                        yield Contender(f"engine {name}", budget, clipping, with_other)

    @cached_property
    def _budgets(self) -> list[str]:
        if not self._arguments.curve:
            return list(self._arguments.budgets)
        request = {**self._common, "system": "engine", "io_backend": self._arguments.io_backend, "clipping": NEVER}
        least = self._turns.least_host_memory(request)
        return curve.budgets(least, self._state_bytes, self._arguments.curve)

    def _bound(self, clipping: str) -> float:
        """The bound of the norm that goes by this name."""
        if clipping != "sometimes":
            return {"never": NEVER, "always": 1e-3}.get(clipping) or float(clipping)
        request = {**self._common, "system": "in_memory", "clipping": NEVER}
        turn = self._turns.take(request, self._arguments.warm_up, self._arguments.steps)
        return float(statistics.median(turn["norms"]))

    def _fastest(self, request: dict[str, Any], choices: list[Settings]) -> Settings | None:
        """The settings with the fastest step; those that abort are out, None if all do."""
        rows = self._earlier(request["system"]) or [self._try(request, settings) for settings in choices]
        self.trials += rows
        finished = [row for row in rows if row["failure"] is None]
        return min(finished, key=lambda row: row["step_seconds_median"])["settings"] if finished else None

    def _earlier(self, system: str) -> list[dict[str, Any]]:
        if self._arguments.trials is None:
            return []
        rows = json.loads(self._arguments.trials.read_text())["deepspeed_trials"]
        return [row for row in rows if (row["size"], row["system"]) == (self._size, system)]

    def _try(self, request: dict[str, Any], settings: Settings) -> dict[str, Any]:
        contender = Contender(request["system"], output.brief(settings), "", {**request, "settings": settings})
        self._take_turn(contender, [])
        row = {"size": self._size, "system": contender.system, "settings": settings, "failure": contender.failure}
        if contender.turns:
            row["step_seconds_median"] = statistics.median(contender.seconds)
            row["peak_rss_bytes"] = contender.median("peak_rss_bytes")
        return row

    def _host_memory(self, budget: str) -> int | None:
        """Bytes; 0 stands for the least. None: there is no peer to take its peak from."""
        if budget == "peer":
            peaks = [trial["peak_rss_bytes"] for trial in self.trials if trial["system"] == "deepspeed_nvme"
                     and "peak_rss_bytes" in trial]  # fmt: skip
            return int(min(peaks)) if peaks else None
        if budget in ("all", "least"):
            return ALL if budget == "all" else 0
        share = Fraction(budget) if budget.strip("0123456789./") == "" else None
        if share is not None and share <= 1:
            return int(self._state_bytes * share)
        return int(parse_bytes("--budgets", budget))

    def _take_turn(self, contender: Contender, contenders: list[Contender]) -> None:
        limit = self._limit(contender, contenders)
        if contender.failure is not None:
            return
        try:
            turn = self._turns.take(contender.request, self._arguments.warm_up, self._arguments.steps, limit)
            contender.turns.append(turn)
        except WorkerFailed as failure:
            contender.failure = str(failure)

    def _limit(self, contender: Contender, contenders: list[Contender]) -> Limit | None:
        if not self._arguments.limit or not contender.system.startswith("engine"):
            return None
        memory = next((turn for other in contenders if other.system == "in_memory" for turn in other.turns), None)
        if memory is None:
            sys.exit("--limit takes the activations from an in-memory turn: name in_memory before engine in --systems")
        return Limit(memory["peak_rss_bytes"] - memory["imports_bytes"] - self._state_bytes)

    def _summary(self, contender: Contender, rows: list[Contender]) -> dict[str, Any]:
        seconds = contender.seconds
        median = statistics.median(seconds)
        in_memory = [row for row in rows if (row.system, row.clipping) == ("in_memory", contender.clipping)]
        compute = statistics.median(in_memory[0].seconds) if in_memory else None
        read_bytes, write_bytes = contender.median("nvme_read_bytes"), contender.median("nvme_write_bytes")
        rates = _bandwidths(rows)
        nvme = rates.seconds(int(read_bytes), int(write_bytes)) if rates else 0.0
        last = contender.turns[-1]
        link = last.get("link_seconds") or {}
        last_steps = [turn.get("schedule_seconds", ())[-self._arguments.steps :] for turn in contender.turns]
        schedule = [seconds for turn in last_steps for seconds in turn]
        bounds = {"compute": compute or 0.0, "nvme": nvme, **link}
        bound_by = max(bounds, key=lambda name: bounds[name])
        return {
            "size": self._size,
            "system": contender.system,
            "budget": contender.budget,
            "clipping": contender.clipping,
            "parameters": last["parameters"],
            "num_units": last.get("num_units"),
            "model_state_bytes": self._state_bytes,
            "host_memory_bytes": last.get("host_memory_bytes"),
            "step_seconds_median": median,
            "step_seconds": seconds,
            "bound_seconds": bounds[bound_by] or None,
            "bound_by": bound_by,
            "nvme_seconds": nvme,
            "schedule_seconds": statistics.median(schedule) if schedule else 0.0,
            "nvme_read_bytes_per_step": read_bytes,
            "nvme_write_bytes_per_step": write_bytes,
            "cpu_seconds_per_step": contender.median("cpu_seconds"),
            "switches_per_step": contender.median("switches"),
            "planned_read_bytes": last.get("planned_read_bytes"),
            "planned_write_bytes": last.get("planned_write_bytes"),
            "peak_rss_bytes": max(turn["peak_rss_bytes"] for turn in contender.turns),
            "peak_device_bytes": last.get("peak_device_bytes"),
            "device_memory_bytes": last.get("device_memory_bytes"),
            "engine_efficiency": last.get("engine_efficiency"),
            "engine_bound_by": last.get("engine_bound_by"),
            "limit_bytes": last.get("limit_bytes"),
            "imports_bytes": last["imports_bytes"],
            "bandwidths": None if rates is None else vars(rates),
            "stalls": last.get("stalls"),
            "settings": contender.request.get("settings"),
            "losses": last["losses"],
        }


def _bandwidths(rows: list[Contender]) -> Bandwidths | None:
    """The medians of what the engine measured in the turns that used NVMe."""
    measured = [turn["bandwidths"] for row in rows for turn in row.turns if turn.get("bandwidths")]
    if not measured:
        return None
    return Bandwidths(**{name: statistics.median(one[name] for one in measured) for name in ("read", "write", "q")})


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu": next(iter(names), platform.machine()),
    }


if __name__ == "__main__":
    main()
