#!/usr/bin/env python3
"""Train a small model for many steps, and see that nothing grows: host memory, device memory, threads, open files.

The first tenth of the steps is for everything to come to rest; what is there then must be there at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path

import torch
from _step_model import Shape

from offload import BudgetError, OffloadEngine

_SLACK_BYTES = 16 << 20
"""Allocators and caches of the libraries come to rest no closer than this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="4x256", help="LAYERSxWIDTH of GPT-2, llama:... or chain:...")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    shape = Shape.parse(arguments.size, batch=2, context=32)
    options = {"nvme_path": arguments.nvme_path, "device": arguments.device, "precision": arguments.precision}
    budgets: dict[str, int] = {}
    for budget in ("device_memory", "host_memory") if arguments.device != "cpu" else ("host_memory",):
        try:
            OffloadEngine(_model(shape), **options, **budgets, **{budget: 1}).close()
        except BudgetError as error:
            budgets[budget] = error.needed_bytes
    with OffloadEngine(_model(shape), **options, **budgets) as engine:
        generator = torch.Generator().manual_seed(0)
        at_rest, losses = {}, []
        for step in range(arguments.steps):
            loss = engine(*shape.tokens(generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == arguments.steps // 10:
                engine.synchronize()
                at_rest = _held()
        engine.synchronize()
        at_end = _held()
    growth = {name: at_end[name] - at_rest[name] for name in at_end}
    grew = [name for name, more in growth.items() if more > (_SLACK_BYTES if name.endswith("bytes") else 0)]
    result = {"steps": arguments.steps, "budgets": budgets, "at_rest": at_rest, "growth": growth, "grew": grew}
    result["losses"] = [losses[0], losses[-1]]
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{arguments.steps} steps at the least budget {budgets}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        for name, more in growth.items():
            print(f"{name:<16}{at_rest[name]:>16,} at rest{more:>+14,} at the end")
        print("grew: " + (", ".join(grew) or "nothing"))
    return 1 if grew else 0


def _model(shape: Shape) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        return shape.model()


def _held() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = {
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "threads": threading.active_count(),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        held["device_bytes"] = torch.cuda.memory_allocated()
    return held


if __name__ == "__main__":
    sys.exit(main())
