"""Runs as a run directory has them, without an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MEMORY = {
    "weights": {"device": 0, "host": 40_000_000, "nvme": 80_000_000},
    "grads": {"device": 0, "host": 0, "nvme": 120_000_000},
    "states": {"device": 0, "host": 20_000_000, "nvme": 220_000_000},
    "staging": {"host": 30_000_000, "nvme": 0},
    "spare copies": {"host": 0, "nvme": 300_000_000},
}
PROFILE = {"read_bytes_per_s": 3e9, "write_bytes_per_s": 2e9, "mixed_q": 1.2}


def about(*, num_drives: int = 1) -> dict[str, Any]:
    drives = [
        {"path": f"/mnt/nvme{at}", "file_system": "ext4", "total_bytes": 10**12, "profile": PROFILE}
        for at in range(num_drives)
    ]
    memory = MEMORY if num_drives else {kind: {**tiers, "nvme": 0} for kind, tiers in MEMORY.items()}
    return {
        "format": 1,
        "versions": {"offload": "0.1.0", "torch": "2.13.0", "Python": "3.11.7", "Linux": "6.1"},
        "machine": {"name": "box", "processor": "A & B", "cores": 8, "memory_bytes": 2**36, "device": "cpu"},
        "options": {"nvme_path": [drive["path"] for drive in drives], "lr": 0.001, "weights": None},
        "model": {
            "class": "GPT",
            "parameters": 31_700_000,
            "units": 13,
            "state_bytes": 508_000_000,
            "fingerprint": "a",
        },
        "plan": ["13 units, 31,700,000 parameters", "kind <B/param>"],
        "memory": memory,
        "budgets": {"device": 0, "host": 126_000_000, "nvme": 0},
        "bandwidths": {"read": 3e9, "write": 2e9, "q": 1.2, "stored": True} if num_drives else None,
        "drives": drives,
    }


def step(number: int, loss: float | None = None, *, num_drives: int = 1) -> dict[str, Any]:
    seconds = 1.2 + 0.1 * math.sin(number)
    waits = {"update": 0.2, "read": 0.1 + 0.05 * math.cos(number)} if num_drives else {}
    numbers = {
        "learning_rate": 1e-3 / (1 + number / 100),
        "grad_norm": 1 + 1 / number,
        "loss_scale": 1.0,
        "seconds": seconds,
        "bound_seconds": 1.0,
        "compute_seconds": seconds - sum(waits.values()),
        "nvme_seconds": 0.8 if num_drives else 0.0,
        "schedule_seconds": 0.0,
        "to_device_seconds": 0.0,
        "to_host_seconds": 0.0,
        "memory_seconds": 0.0,
        "update_seconds": 0.3,
        "nvme_read_bytes": 5e8 * num_drives,
        "nvme_write_bytes": 4e8 * num_drives,
        "process_bytes": 8e8,
    }
    drives = {f"/mnt/nvme{at}": [5e8, 4e8, 0.7] for at in range(num_drives)}
    known = {} if loss is None else {"loss": loss}
    of_step = {"kind": "step", "time": 1e9 + number, "step": number, **known, **numbers}
    return {**of_step, "bound_by": "compute", "waits": waits, "drives": drives}


def begin(**options: int) -> dict[str, Any]:
    return {"kind": "begin", "time": 1e9, "about": about(**options)}


END = {"kind": "end", "time": 2e9, "error": None}

TIMELINE = {
    "kind": "timeline",
    "time": 1e9,
    "step": 3,
    "spans": [
        [track, f"unit {at}", at * 0.1 + shift, 0.08, size]
        for at in range(12)
        for track, shift, size in (
            ("compute", 0, 0),
            ("waiting", 0.08, 0),
            ("read", 0.01, 10**7),
            ("write", 0.03, 10**7),
        )
    ],
}


def write(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A run directory with these lines."""
    path.mkdir(exist_ok=True)
    with (path / "run.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def losses(count: int) -> list[float]:
    return [2 + 4 * math.exp(-at / (count / 5)) + 0.1 * math.sin(7 * at) for at in range(count)]
