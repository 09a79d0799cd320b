"""Deadlines on a machine that other tests keep busy."""

from __future__ import annotations

import time

_WORK_S = 0.05


def allowed(seconds: float) -> float:
    """``seconds`` as long as a core is to be had at once, and as many times more as work takes longer now."""
    began, worked = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked < _WORK_S:
        pass
    return seconds * max((time.perf_counter() - began) / _WORK_S, 1.0)
