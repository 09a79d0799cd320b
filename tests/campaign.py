"""Random programs on a simulated device, and ways to plant a forgotten wait that they must find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import device_schedules
from _device_around import run_in_thread as run_in_thread

from offload import NonFiniteGradient


def forget_in(function: str, kind: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants that ``wait`` of ``kind``, a stream or an event, does nothing where ``function`` calls it."""

    def forget(patch: pytest.MonkeyPatch) -> None:
        wait = kind.wait

        def maybe(self: Any, *event: Any) -> None:
            if sys._getframe(1).f_code.co_name != function:
                wait(self, *event)

        patch.setattr(kind, "wait", maybe)

    return forget


def expect_trouble(folder: Path) -> None:
    """Fails if eight programs run as if nothing were missing."""
    for seed in range(8):
        try:
            if device_schedules.check(seed, folder):
                return
        except NonFiniteGradient:  # fresh memory of the simulated device is NaN: a missing wait ends a step
            return
    pytest.fail("eight programs ran as if nothing were missing")
