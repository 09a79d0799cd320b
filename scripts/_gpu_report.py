"""What ``gpu_check.sh`` has found: one table, and one JSON object, which is also written to a file."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

_MIB = 1 << 20


def main() -> int:
    folder, written = Path(sys.argv[1]), Path(sys.argv[2])
    parts = [_part(folder, *line.split("\t")) for line in (folder / "parts.tsv").read_text().splitlines()]
    runs = [run for path in sorted(folder.glob("bench-*.log")) for run in _runs(path)]
    result = {"date": str(date.today()), "machine": _machine(), "parts": parts, "runs": runs}
    machine = result["machine"]
    print(f"{result['date']}  {machine['gpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
          f"torch {machine['torch']}, I/O by {machine['io_backend']}")  # fmt: skip
    for part in parts:
        verdict = "ok" if part["code"] == 0 else part["verdict"]
        print(f"{part['name']:<24}{verdict:<12}{part['seconds']:>5} s  {part['last']}")
    if runs:
        print(f"{'model':<16}{'system':<12}{'budget':<8}{'params M':>9}{'host MiB':>10}{'device MiB':>12}{'step s':>9}"
              f"{'bound s':>9} {'by':<10}{'of bound':>9}")  # fmt: skip
    for run in runs:
        bound = run["bound_seconds"] or 0.0
        print(
            f"{run['size']:<16}{run['system']:<12}{run['budget']:<8}{run['parameters'] / 1e6:>9.1f}"
            f"{(run['host_memory_bytes'] or 0) / _MIB:>10,.0f}{(run['peak_device_bytes'] or 0) / _MIB:>12,.0f}"
            f"{run['step_seconds_median']:>9.3f}{bound:>9.3f} {run['bound_by']:<10}"
            f"{bound / run['step_seconds_median']:>9.2f}"
        )
    text = json.dumps(result)
    written.write_text(text)
    print(text)
    return max((part["code"] != 0 for part in parts), default=0)


def _part(folder: Path, name: str, code: str, seconds: str) -> dict[str, Any]:
    lines = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
    verdict = {"124": "too slow", "127": "not found"}.get(code, f"failed: {code}")
    last = next((line[:200] for line in reversed(lines) if not line.startswith("{")), "")
    return {"name": name, "code": int(code), "verdict": verdict, "seconds": int(seconds), "last": last}


def _runs(path: Path) -> list[dict[str, Any]]:
    """The runs in a log whose last line is the benchmark's JSON object."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text().strip().splitlines()[-1])["runs"]
    except (ValueError, KeyError, IndexError, TypeError):
        return []
    return found


def _machine() -> dict[str, Any]:
    try:
        from aio_ext import unavailable_backends

        backends = [name for name in ("io_uring", "threads", "portable") if name not in unavailable_backends()]
    except ImportError as error:
        backends = [f"nothing: {error}"]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "io_backend": backends[0],
    }


if __name__ == "__main__":
    sys.exit(main())
