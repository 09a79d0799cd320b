"""Cores of the CPU: those that this process may use, and those of them that compute leaves idle."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from offload.memory import cgroup_folders

_GRAIN = 1 << 16
"""Elements for which a further thread is woken: 70 us of its work, and to wake it takes five."""


def available_cores() -> int:
    """Cores that the affinity of this thread and the CPU quotas of its cgroups leave it, one at least."""
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in _quotas())]))


def _quotas() -> list[float]:
    """Quota, in cores, of each cgroup above this process that has one (v2 and v1)."""
    found = []
    for folder in cgroup_folders("cpu"):
        try:
            if (both := folder / "cpu.max").exists():
                quota, period = both.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return found


@dataclass(frozen=True)
class IdleCores:
    """Cores that the update may use at the moment.

    It has those that compute does not use. While compute waits for an update it has all of them: the update is all that
    keeps the model from going on then.
    """

    total: int
    """Of this rank."""
    of_compute: int
    """Cores that are busy while compute goes on."""
    compute_waits: Callable[[], bool]

    def __call__(self, numel: int) -> int:
        """How many, one at least, for the update of so many elements."""
        idle = self.total if self.compute_waits() else self.total - self.of_compute
        return max(1, min(idle, numel // _GRAIN))
