"""The modes of units' activations: as the option says, or as a step has shown that it is best."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.model.forward_costs import ForwardCosts, Unmeasured
from offload.model.recompute import RecomputedForward
from offload.model.unit_in_model import SavesTensors
from offload.plan.activations import UnitActivations, choose
from offload.report.report import Report
from swapper import readable_bytes

_logger = logging.getLogger("offload")

_MARGIN = 0.75
"""Of the memory that a step has left free: activations are not the same in every step."""


class FixedActivations:
    """As the option says."""

    kept_bytes = 0
    """Memory that units take where they compute, more than they did in the first step."""

    def step_taken(self, report: Report) -> None:
        """A step was taken."""


@dataclass(eq=False)
class MeasuredActivations(FixedActivations):
    """In the first step all are ``away``; then each gets the mode that the step has shown to be best."""

    forwards: Sequence[RecomputedForward]
    """Of the units whose modes are chosen."""
    costs: Sequence[ForwardCosts]
    away: str
    hooks: Mapping[str, SavesTensors]
    """By mode."""
    is_over: bool = False

    def step_taken(self, report: Report) -> None:
        if self.is_over or not any(each.spans for each in self.costs):
            return
        self.is_over = True
        free_bytes = int(min(each.least_free_bytes for each in self.costs) * _MARGIN)
        waited = report.stall_seconds.get("activations", 0.0)
        use = report.activations
        moving = waited if report.bandwidths is None else report.bandwidths.seconds(use.read_bytes, use.write_bytes)
        whole = sum(each.input_bytes * len(each.spans) for each in self.costs) or 1
        measured = [
            UnitActivations(
                each.input_bytes * each.most_alive,
                each.saved_bytes * each.most_alive,
                each.seconds,
                moving * each.input_bytes * len(each.spans) / whole,
            )
            for each in self.costs
        ]
        nvme_seconds = max(report.nvme_seconds, moving if self.away == "nvme" else 0.0)
        choice = choose(measured, self.away, free_bytes, report.compute_seconds, nvme_seconds)
        self.kept_bytes = choice.nbytes
        for forward, mode in zip(self.forwards, choice.modes, strict=True):
            forward.costs = Unmeasured()
            forward.is_on = mode != "keep"
            forward.unit.saved_tensors = self.hooks[mode]
        _logger.info(
            "activations: %s; %s of memory, of %s that the first step left",
            ", ".join(f"{count} units {mode}" for mode, count in Counter(choice.modes).items()),
            readable_bytes(choice.nbytes),
            readable_bytes(free_bytes),
        )
