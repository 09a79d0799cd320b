"""The modes of the units' activations, by the bytes and times that a step has shown: a pure function.

A step takes as long as the slowest of its parts. While compute is the slowest, memory goes to units whose second
forward takes longest for the bytes that it saves; while NVMe is, to those whose inputs go there. It stops when neither
helps, or nothing more fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitActivations:
    """Bytes and times of one unit, as a step has shown them."""

    input_bytes: int
    """Of its inputs, which are kept where it is recomputed: of all its calls that are alive at a time."""
    saved_bytes: int
    """Of all that it saves where it is not, and of its inputs; of as many calls."""
    forward_seconds: float
    """Of the second runs of its forward."""
    nvme_seconds: float
    """Of NVMe, for its inputs both ways."""


@dataclass(frozen=True)
class Choice:
    """The mode of each unit, and bytes of memory that they take more than where all are away."""

    modes: Sequence[str]
    nbytes: int


def choose(
    units: Sequence[UnitActivations], away: str, free_bytes: int, compute_seconds: float, nvme_seconds: float
) -> Choice:
    """Choose among "keep", "recompute" and ``away``, which all units had while the seconds were measured: "nvme", or
    "recompute" again. ``free_bytes`` is what memory had left then."""
    modes, taken = [away] * len(units), 0
    while True:
        mode, gains = ("keep", _forwards(units)) if compute_seconds >= nvme_seconds else ("recompute", _away(units))
        best, best_rate, best_bytes = -1, 0.0, 0
        for index, unit in enumerate(units):
            if modes[index] in ("keep", mode):
                continue
            has_bytes = 0 if modes[index] == "nvme" else unit.input_bytes
            more_bytes = max((unit.saved_bytes if mode == "keep" else unit.input_bytes) - has_bytes, 1)
            rate = gains[index] / more_bytes
            if rate > best_rate and taken + more_bytes <= free_bytes:
                best, best_rate, best_bytes = index, rate, more_bytes
        if best < 0:
            return Choice(modes, taken)
        if modes[best] == "nvme":
            nvme_seconds -= units[best].nvme_seconds
        if mode == "keep":
            compute_seconds -= units[best].forward_seconds
        modes[best] = mode
        taken += best_bytes


def _forwards(units: Sequence[UnitActivations]) -> list[float]:
    return [unit.forward_seconds for unit in units]


def _away(units: Sequence[UnitActivations]) -> list[float]:
    return [unit.nvme_seconds for unit in units]
