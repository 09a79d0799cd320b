"""One model at several batches on a GPU, built once: with billions of parameters that takes longer than the steps.

    python scripts/gpu_batches.py --sizes llama:32x4096 --batches 1 4 8 --device-memory 16GiB [--timeline DIR]
    python scripts/gpu_batches.py --sizes llama:4x4096 llama:8x4096 --system in_memory
    python scripts/gpu_batches.py --sizes llama:16x4096 --batches 4 --device-memory 3GiB auto --warm-up 1 \\
        --system engine deepspeed fsdp2 torchao_offload --seconds 60

With the engine all that the device has no room for rests in RAM, and on NVMe with ``--nvme-path``. Peers run between
the first and the second of its budgets (``_step_peers.py``), each system in a process of its own: two of them at once
would need more RAM than a machine has. Prints a JSON object with all runs so far as soon as each batch is over, in the
form of ``bench_step.py``; the budget of a run is the engine's of device memory. A system that fails, or takes more than
``--seconds``, is named, and the others go on. One that is not installed is named alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _step_model import Shape
from _step_peers import PEERS, missing_module
from _step_process import Turns, WorkerFailed

from offload.report.report import Bandwidths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", required=True, help="as bench_step.py has them")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--system", nargs="+", choices=["engine", "in_memory", *PEERS], default=["engine"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-memory", nargs="+", default=["auto"], help="the engine's: a run for each")
    parser.add_argument("--host-memory", default="auto")  # a bound: what is beyond the model is for spare places
    parser.add_argument("--nvme-path", help="a folder on the SSD: what is beyond both memories rests there")
    parser.add_argument("--clipping", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="that one system may take, with all of its batches")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="a folder for the last step's of each batch")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    failed = False
    for size, (system, memory) in itertools.product(options.sizes, _turns(options)):
        if (module := missing_module(system)) is not None:
            print(f"{size} {system}: {module} is not installed", flush=True)
            continue
        try:
            for run in _runs(size, system, memory, options):
                runs.append(run)
                print(json.dumps({"runs": runs}), flush=True)
        except WorkerFailed as failure:
            print(f"{size} {system}: {failure}", flush=True)
            failed = True
    return int(failed)


def _turns(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Systems and their device memory: all systems, then the engine again with its further budgets."""
    first, *further = options.device_memory
    yield from ((system, first) for system in options.system)
    if "engine" in options.system:
        yield from (("engine", memory) for memory in further)


def _runs(size: str, system: str, memory: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape = Shape.parse(size, options.batches[0], options.context, checkpointing=True)
    request = {
        **{"shape": asdict(shape), "precision": "bf16", "clipping": options.clipping, "system": system},
        **{"nvme_path": options.nvme_path, "io_backend": "auto", "host_memory": options.host_memory},
        **{"device": options.device, "device_memory": memory},
    }
    wanted = [
        {
            "warm_up": options.warm_up,
            "steps": options.steps,
            "batch": batch,
            "timeline": _timeline(size, batch, options),
        }
        for batch in options.batches
    ]
    budget = _budget(memory, options) if system == "engine" else ""
    turns = Turns(None, options.seconds).take_each(request, wanted)
    for batch, turn in zip(options.batches, turns, strict=True):
        yield {**_run(turn), "size": size, "batch": batch, "system": system, "budget": budget}


def _budget(memory: str, options: argparse.Namespace) -> str:
    of_host = "" if options.nvme_path is None else f" host {options.host_memory}"
    return f"{memory}{of_host}{' clipped' if options.clipping else ''}"


def _timeline(size: str, batch: int, options: argparse.Namespace) -> str | None:
    if options.timeline is None:
        return None
    clipped = "-clipped" if options.clipping else ""
    return str(options.timeline / f"{size.replace(':', '-')}-batch-{batch}{clipped}.timeline.json")


def _run(turn: dict[str, Any]) -> dict[str, Any]:
    bounds = dict(turn.get("link_seconds") or {})
    if rates := turn.get("bandwidths"):
        moved = (int(turn[f"nvme_{name}_bytes"]) for name in ("read", "write"))
        bounds["nvme"] = Bandwidths(**rates).seconds(*moved)
    bound_by = max(bounds, key=lambda name: bounds[name], default=None)
    return {
        "parameters": turn["parameters"],
        "step_seconds_median": statistics.median(turn["seconds"]),
        "step_seconds": turn["seconds"],
        "bound_seconds": bounds.get(bound_by),
        "bound_by": bound_by,
        **{name: turn.get(name) for name in _AS_IT_IS},
    }


_AS_IT_IS = (
    *("host_memory_bytes", "device_memory_bytes", "peak_device_bytes", "peak_rss_bytes"),
    *("nvme_read_bytes", "nvme_write_bytes", "bandwidths", "engine_efficiency", "engine_bound_by", "stalls", "losses"),
)

if __name__ == "__main__":
    sys.exit(main())
