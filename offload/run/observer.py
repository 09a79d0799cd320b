"""Observers of a training, and what they see: the record of each step, what the user logs, and the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.report.report import Report

_OF_REPORT = (
    "grad_norm", "loss_scale", "seconds", "bound_seconds", "efficiency", "compute_seconds", "nvme_seconds",
    "schedule_seconds", "to_device_seconds", "to_host_seconds", "update_seconds", "nvme_read_bytes", "nvme_write_bytes",
    "memory_seconds", "nvme_write_bytes_total", "to_device_bytes", "to_host_bytes", "network_bytes",
)  # fmt: skip
"""Numbers of a report that a record has, too."""


@dataclass(frozen=True)
class StepRecord:
    """A step that was taken."""

    report: Report
    time: float
    """Time of the step, in seconds since 1970."""
    loss: float | None
    """Mean of what ``engine.backward`` was given for this step; None if ``loss.backward()`` was called instead."""
    learning_rates: tuple[float, ...]
    """Of each parameter group."""
    process_bytes: int
    """Memory of the process, by the kernel's count."""

    def scalars(self) -> dict[str, float]:
        """All that is one number and known, by name. Names end in their unit."""
        known = {
            "loss": self.loss,
            "learning_rate": self.learning_rates[0] if self.learning_rates else None,
            **{name: getattr(self.report, name) for name in _OF_REPORT},
            "process_bytes": self.process_bytes,
        }
        return {name: float(value) for name, value in known.items() if value is not None}


class Observer:
    """Sees a training: override what you want to see, and give it to ``engine.add_observer``.

    The training thread makes the calls, between steps. An observer that raises is warned of once and asked no more.
    """

    def begin(self, about: Mapping[str, Any]) -> None:
        """See what the run is, in plain values: versions, machine, options, model, plan, budgets, bandwidths,
        drives."""

    def step(self, record: StepRecord) -> None:
        """A step was taken; its update may still run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """``engine.log`` was called with these values, after this step."""

    def close(self, error: BaseException | None) -> None:
        """The engine is closed; ``error`` is what ended the program or its ``with``, None if nothing did."""
