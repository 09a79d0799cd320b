#!/usr/bin/env python
"""What a training step costs: everything in memory, and under the engine at budgets from ample to the least.

Every system is a process of its own, built once; they take turns of a few steps each, so that a slow minute of the
machine hits all of them. The bound of a step is the larger of the in-memory step and of the time that the bytes it
moved take at the bandwidth that the engine measured on the same path in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

BUDGETS = {"all in RAM": None, "a half": 1 / 2, "a quarter": 1 / 4, "the least": 0.0}
"""Shares of the model state that the engine may hold; None: all of it, 0: the least that works."""


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(json.loads(arguments.worker))
        return
    with tempfile.TemporaryDirectory(prefix="bench-step-", dir=arguments.nvme_path) as folder:
        runs = [run for size in arguments.sizes for run in _compare(size, arguments, folder)]
    result = {"machine": _machine(), "date": str(date.today()), "config": vars(arguments), "runs": runs}
    if arguments.json:
        print(json.dumps(result))
    else:
        _print_table(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["12x512"], help="models, as LAYERSxWIDTH (default: 12x512)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each system (default: 4)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn, after one that is not (default: 3)")
    parser.add_argument("--budgets", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a directory on the SSD to measure")
    parser.add_argument("--io-backend", default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(size: str, arguments: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    layers, width = (int(part) for part in size.split("x"))
    common = {name: getattr(arguments, name) for name in ("precision", "batch", "context", "io_backend")}
    common |= {"layers": layers, "width": width}
    workers = {"in memory": _Worker({**common, "system": "in_memory"})}
    for index, name in enumerate(arguments.budgets):
        path = Path(folder, f"{size}-{index}")
        path.mkdir()
        share = BUDGETS[name]
        workers[name] = _Worker({**common, "system": "engine", "share": share, "nvme_path": str(path)})
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(arguments.rounds):
        for name, worker in workers.items():
            samples[name] += worker.ask({"steps": arguments.steps})["steps"]
    finals = {name: worker.ask({"steps": 0}) for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    in_memory = statistics.median(step["seconds"] for step in samples["in memory"])
    return [_summary(name, size, samples[name], finals[name], in_memory) for name in workers]


def _summary(
    name: str, size: str, steps: list[dict[str, Any]], final: dict[str, Any], in_memory: float
) -> dict[str, Any]:
    seconds = [step["seconds"] for step in steps]
    median = statistics.median(seconds)
    nvme = statistics.median(step["nvme_seconds"] for step in steps)
    bound = max(in_memory, nvme)
    return {
        "system": final["system"],
        "budget": name,
        "size": size,
        "parameters": final["parameters"],
        "host_memory_bytes": final["host_memory_bytes"],
        "step_seconds_median": median,
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "step_seconds": seconds,
        "bound_seconds": bound,
        "bound_by": "nvme" if nvme > in_memory else "compute",
        "of_bound": bound / median,
        "nvme_read_bytes_per_step": statistics.median(step["read_bytes"] for step in steps),
        "nvme_write_bytes_per_step": statistics.median(step["write_bytes"] for step in steps),
        "peak_rss_bytes": final["peak_rss_bytes"],
        "bandwidths": final["bandwidths"],
        "stalls": _mean_stalls(steps),
    }


def _mean_stalls(steps: list[dict[str, Any]]) -> dict[str, float]:
    causes = {cause for step in steps for cause in step["stalls"]}
    return {cause: statistics.mean(step["stalls"].get(cause, 0.0) for step in steps) for cause in sorted(causes)}


class _Worker:
    """A system in a process of its own, that takes steps when asked."""

    def __init__(self, request: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps(request)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended with status {self._process.wait()}")
        return dict(json.loads(line))


def _work(request: dict[str, Any]) -> None:
    """The worker: builds its system, then takes as many steps as each line of stdin asks for."""
    import torch

    from offload.train import process
    from offload.train.settings import Settings

    settings = Settings(
        text=(), layers=request["layers"], width=request["width"], heads=request["width"] // 64, lr=1e-4, seed=0,
        context=request["context"], batch=request["batch"], steps=100, precision=request["precision"],
    )  # fmt: skip
    system = (_InMemory if request["system"] == "in_memory" else _Engine)(settings, request)
    generator = torch.Generator().manual_seed(0)
    print("{}", flush=True)
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        results = []
        for index in range(steps + 1 if steps else 0):
            tokens = torch.randint(0, 256, (settings.batch, settings.context + 1), generator=generator)
            start = time.perf_counter()
            system.step(tokens[:, :-1], tokens[:, 1:])
            seconds = time.perf_counter() - start
            if index:
                results.append({"seconds": seconds, **system.last_step()})
        system.rest()
        answer = {"steps": results, "system": request["system"], "peak_rss_bytes": process.peak_rss_bytes()}
        print(json.dumps({**answer, **system.facts()}), flush=True)
    system.close()


class _InMemory:
    def __init__(self, settings: Any, request: dict[str, Any]) -> None:
        from offload.train.reference import InMemoryTrainer

        self._trainer = InMemoryTrainer(settings)

    def step(self, tokens: Any, targets: Any) -> None:
        self._trainer.step(tokens, targets)

    def last_step(self) -> dict[str, Any]:
        return {"nvme_seconds": 0.0, "read_bytes": 0, "write_bytes": 0, "stalls": {}}

    def rest(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        numel = sum(p.numel() for p in self._trainer.model.parameters())
        return {"parameters": numel, "host_memory_bytes": None, "bandwidths": None}

    def close(self) -> None:
        pass


class _Engine:
    def __init__(self, settings: Any, request: dict[str, Any]) -> None:
        import torch

        from offload import BudgetError, OffloadEngine

        options = {"precision": settings.precision, "lr": settings.lr, "gradient_clipping": 1.0}
        options |= {"nvme_path": request["nvme_path"], "io_backend": request["io_backend"]}

        def make(host_memory: int) -> OffloadEngine:
            torch.manual_seed(0)
            return OffloadEngine(settings.empty_model(), host_memory=host_memory, **options)

        numel = sum(p.numel() for p in settings.empty_model().parameters())
        state_bytes = numel * (16 if settings.precision == "fp32" else 14)
        share = request["share"]
        budget = 1 << 40 if share is None else int(share * state_bytes)
        try:
            self._engine = make(max(budget, 1))
        except BudgetError as error:
            self._engine = make(error.needed_bytes)

    def step(self, tokens: Any, targets: Any) -> None:
        self._engine.backward(self._engine(tokens, targets))
        self._engine.step()

    def last_step(self) -> dict[str, Any]:
        report = self._engine.report()
        return {
            "nvme_seconds": report.nvme_seconds,
            "read_bytes": report.nvme_read_bytes,
            "write_bytes": report.nvme_write_bytes,
            "stalls": {**report.stall_seconds, "(updating)": report.update_seconds},
        }

    def rest(self) -> None:
        self._engine.synchronize()

    def facts(self) -> dict[str, Any]:
        bandwidths = self._engine.bandwidths
        return {
            "parameters": self._engine.plan.num_parameters,
            "host_memory_bytes": self._engine.plan.host_bytes,
            "bandwidths": None if bandwidths is None else vars(bandwidths),
        }

    def close(self) -> None:
        self._engine.close()


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['date']}  {result['machine']}")
    head = f"{'model':>9} {'system':<12}{'params':>12}{'host MiB':>10}{'RSS MiB':>9}{'read MB':>9}{'write MB':>9}"
    print(head + f"{'step s (min med max)':>24}{'bound s':>9} {'by':<8}{'of bound':>9}")
    for run in result["runs"]:
        host = f"{run['host_memory_bytes'] / 2**20:,.0f}" if run["host_memory_bytes"] else "-"
        times = " ".join(f"{run['step_seconds_' + key]:.3f}" for key in ("min", "median", "max"))
        print(
            f"{run['size']:>9} {run['budget']:<12}{run['parameters']:>12,}{host:>10}"
            f"{run['peak_rss_bytes'] / 2**20:>9,.0f}{run['nvme_read_bytes_per_step'] / 1e6:>9,.0f}"
            f"{run['nvme_write_bytes_per_step'] / 1e6:>9,.0f}{times:>24}{run['bound_seconds']:>9.3f} "
            f"{run['bound_by']:<8}{run['of_bound']:>9.2f}"
        )
        if run["bandwidths"]:
            read, write, q = (run["bandwidths"][key] for key in ("read", "write", "q"))
            stalls = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in run["stalls"].items())
            print(f"{'':>10}read {read / 1e9:.2f} GB/s, write {write / 1e9:.2f} GB/s, q {q:.2f}; waiting: {stalls}")


if __name__ == "__main__":
    main()
