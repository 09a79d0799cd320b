"""Tells whether random numbers were drawn, from any of the generators that a program shares."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of Python's generator, numpy's and torch's, on the CPU and on ``device``: equal as long as nothing is
    drawn."""
    of_torch = [torch.default_generator.get_state()]
    if device.type != "cpu":
        of_torch.append(torch.get_device_module(device).get_rng_state(device))
    return (
        random.getstate(),
        _comparable(np.random.get_state(legacy=False)),
        *(state.numpy().tobytes() for state in of_torch),
    )


def _comparable(state: Any) -> Any:
    """The same with bytes in the place of arrays, which compare element by element."""
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


class Generators:
    """The generators of Python and numpy, as they are when this is made."""

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = _others()

    def compare(self) -> None:
        """Forget them if nothing was drawn since."""
        now = _others()
        if self._before is not None and _comparable(self._before) == _comparable(now):
            self._before = None

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Within, they are as they were, unless nothing had been drawn; then as they are now."""
        if self._before is None:
            yield
            return
        now = _others()
        _set_others(self._before)
        try:
            yield
        finally:
            _set_others(now)


def _others() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_others(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
