"""Tells whether random numbers were drawn, from any of the generators that a program shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

_Get = Callable[[], Any]
_Set = Callable[[Any], object]


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
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class Generators:
    """The generators of Python and numpy that all share, and a module's own, as they are when they become known."""

    def __init__(self) -> None:
        self._known: list[tuple[_Get, _Set, Any]] = []
        """Those that were drawn from, once they were compared."""
        self._know(random.getstate, random.setstate)
        self._know(partial(np.random.get_state, legacy=False), np.random.set_state)

    def look_at(self, value: object) -> None:
        """It may be a generator of the program's own."""
        if isinstance(value, torch.Generator):
            self._know(value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._know(value.getstate, value.setstate)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._know(lambda: bits.state, partial(setattr, bits, "state"))
        elif isinstance(value, np.random.RandomState):
            self._know(partial(value.get_state, legacy=False), value.set_state)

    def compare(self) -> None:
        """Forget those from which nothing was drawn since."""
        self._known = [
            (get, put, before) for get, put, before in self._known if _comparable(before) != _comparable(get())
        ]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Within, they are as they were; then as they are now."""
        now = [(put, get()) for get, put, _ in self._known]
        for _, put, before in self._known:
            put(before)
        try:
            yield
        finally:
            for put, state in now:
                put(state)

    def _know(self, get: _Get, put: _Set) -> None:
        self._known.append((get, put, get()))
