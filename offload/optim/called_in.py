"""What a program has on around ``optimizer.step()``, for the thread that carries the step out, later on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from offload.ran_in import RanIn

T = TypeVar("T")

_SMALLEST_NORMAL = sys.float_info.min


class _OfThread:
    """What torch keeps for each thread by itself, and a new one begins without."""

    def __init__(self) -> None:
        self._casts = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu")
        self._flushes = _SMALLEST_NORMAL / 2 == 0  # torch does not tell

    def put(self) -> None:
        """Make it so in the thread that calls this."""
        torch.set_autocast_enabled("cpu", self._casts)
        torch.set_autocast_dtype("cpu", self._dtype)
        torch.set_flush_denormal(self._flushes)


class CalledIn:
    """Modes, autocast, settings and context variables of the thread that makes this."""

    def __init__(self) -> None:
        self._ran_in = RanIn()
        self._of_thread = _OfThread()

    @property
    def is_watched(self) -> bool:
        """A mode sees each operation: it expects them before it is over."""
        return self._ran_in.has_modes

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` gives in the same."""
        return self._ran_in.run(partial(self._within, function))

    def _within(self, function: Callable[[], T]) -> T:
        before = _OfThread()
        self._of_thread.put()
        try:
            return function()
        finally:
            before.put()
