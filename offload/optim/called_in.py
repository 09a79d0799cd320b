"""What a program has on around ``optimizer.step()``, for the thread that carries the step out, later on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from offload.ran_in import RanIn
from offload.settings import Settings

T = TypeVar("T")


class CalledIn:
    """Modes, autocast and context variables of the thread that makes this, and the settings that all threads have."""

    def __init__(self) -> None:
        self._ran_in = RanIn(with_settings=False)
        self.settings = Settings()
        """They are in force while the call of ``optimizer.step()`` lasts: a step that wants them is over by then."""
        self._casts = _casts()

    @property
    def is_watched(self) -> bool:
        """A mode sees each operation: it expects them before it is over."""
        return self._ran_in.has_modes

    def call(self, function: Callable[[], T]) -> T:
        """What ``function`` gives in the same."""
        return self._ran_in.run(partial(self._within, function))

    def _within(self, function: Callable[[], T]) -> T:
        """All threads have one cache of casts: it gets none of the step's, and ``torch.autocast`` would clear it."""
        before, is_cached = _casts(), torch.is_autocast_cache_enabled()
        _cast(*self._casts, is_cached=False)
        try:
            return function()
        finally:
            _cast(*before, is_cached=is_cached)


def _casts() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _cast(is_on: bool, dtype: torch.dtype, *, is_cached: bool) -> None:
    torch.set_autocast_enabled("cpu", is_on)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(is_cached)
