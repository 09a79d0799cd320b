"""Figures of a run: for programs, and for the head of the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from offload.report.report import Bandwidths
from offload.run.reading import Run, seconds_by_cause

DRIVE_ENDURANCE_BYTES = 600e12
"""Bytes that a common 1 TB consumer SSD is rated to take (600 TBW)."""

_LAST_STEPS = 20


def figures(run: Run) -> dict[str, Any]:
    """The figures of a run. Names say their unit; what is not known is None. A step: the median of all of them."""
    numbers, losses = run.numbers, known(losses_of(run)[1])
    last = losses[-_LAST_STEPS:]
    seconds, bound = middle(numbers["seconds"]), middle(numbers["bound_seconds"])
    return {
        "path": str(run.path),
        "state": state(run),
        "sections": len(run.sections),
        "parameters": run.about["model"]["parameters"],
        "model_state_bytes": run.about["model"]["state_bytes"],
        "steps": len(run.steps),
        "last_step": int(run.steps[-1]) if run.steps else 0,
        "repeated_steps": run.num_repeated,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "loss_last_steps": len(last),
        "loss_last_mean": math.fsum(last) / len(last) if last else None,
        "step_seconds": seconds,
        "bound_seconds": bound,
        "bound_by": Counter(run.limits).most_common(1)[0][0] if run.limits else None,
        "efficiency": bound / seconds if bound is not None and seconds else None,
        "seconds": seconds_by_cause(run),
        "nvme_read_bytes_per_step": middle(numbers["nvme_read_bytes"]),
        "nvme_write_bytes_per_step": middle(numbers["nvme_write_bytes"]),
        "memory": run.memory,
        "budgets": run.about["budgets"],
        "drives": [_drive(run, path) for path in run.drives],
    }


def state(run: Run) -> str:
    """End of the run, in a few words."""
    last = run.sections[-1]
    if run.is_running:
        return "running"
    if not last.is_closed:
        return "killed"
    return "finished" if last.error is None else f"ended by {last.error}"


def losses_of(run: Run) -> tuple[list[float], list[float]]:
    """Steps and their losses: what ``engine.backward`` saw, or else what was logged as ``loss``."""
    if "loss" in run.numbers.names or "loss" not in run.metrics:
        return list(run.steps), list(run.numbers["loss"])
    return [float(step) for step, _ in run.metrics["loss"]], [value for _, value in run.metrics["loss"]]


def known(values: Sequence[float]) -> list[float]:
    """Those that are finite."""
    return [value for value in values if math.isfinite(value)]


def middle(values: Sequence[float]) -> float | None:
    """The median of those that are finite."""
    finite = known(values)
    return median(finite) if finite else None


def _drive(run: Run, path: str) -> dict[str, Any]:
    """Bytes that one path carried, its rate, the rate that it could reach, and how long an SSD there lasts."""
    read, written, busy = run.drives[path]
    taken = len(run.steps) + run.num_repeated
    left = max(DRIVE_ENDURANCE_BYTES - written, 0.0)
    return {
        "path": path,
        "read_bytes": round(read),
        "write_bytes": round(written),
        "busy_share": busy / run.step_seconds if run.step_seconds else None,
        "bytes_per_s": (read + written) / busy if busy else None,
        "measured_bytes_per_s": _measured_rate(run, path, read, written),
        "endurance_bytes": DRIVE_ENDURANCE_BYTES,
        "endurance_steps": round(left / (written / taken)) if written else None,
        "endurance_days": left / (written / run.step_seconds) / 86400 if written else None,
    }


def _measured_rate(run: Run, path: str, read: float, written: float) -> float | None:
    """Bytes a second that the path was measured to move in this mix: by its profile, or as its share of what was
    measured of all paths together."""
    drives, together = run.about["drives"], run.about["bandwidths"]
    profile = next((drive["profile"] for drive in drives if drive["path"] == path), None)
    if profile is None and together is None:
        return None
    if profile is None:
        rates, num_paths = Bandwidths(**together), len(drives)
    else:
        rates, num_paths = Bandwidths(profile["read_bytes_per_s"], profile["write_bytes_per_s"], profile["mixed_q"]), 1
    seconds = rates.seconds(read, written)
    return (read + written) / seconds / num_paths if seconds else None
