"""Tells whether random numbers were drawn, from any of the generators that a program shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

_Get = Callable[[], Any]
_Set = Callable[[Any], object]


def random_states(device: torch.device, own: Iterable[Any] = ()) -> tuple[Any, ...]:
    """The states of Python's generator, numpy's and torch's, on the CPU and on ``device``, and of generators of the
    program's ``own``: equal as long as nothing is drawn."""
    of_torch = [torch.default_generator.get_state()]
    if device.type != "cpu":
        of_torch.append(torch.get_device_module(device).get_rng_state(device))
    return (
        random.getstate(),
        _comparable(np.random.get_state(legacy=False)),
        *(state.numpy().tobytes() for state in of_torch),
        *(_comparable(get()) for get, _ in filter(None, map(_access, own))),
    )


def generators_among(values: Iterable[Any]) -> list[Any]:
    """Those of the values that are generators, each once. The ones that all share are none."""
    shared = {id(torch.default_generator)}
    found = {id(value): value for value in values if isinstance(value, _KINDS) and id(value) not in shared}
    return list(found.values())


def known_to(function: Any) -> Iterator[Any]:
    """What a function finds by name: of its closure, its defaults, the object that it is bound to, and globals."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield from getattr(getattr(function, "__self__", None), "__dict__", {}).values()
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    yield from (names[name] for name in getattr(code, "co_names", ()) if name in names)


def _comparable(state: Any) -> Any:
    """The same with bytes in the place of arrays, which compare element by element."""
    if isinstance(state, tuple):  # Python's own begins with a number, and 625 of them compare as they are
        return state if isinstance(state[0], int) else tuple(map(_comparable, state))
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _access(value: object) -> tuple[_Get, _Set] | None:
    """How the state of a generator of the program's own is read and set; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    if isinstance(value, np.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    return None


class Generators:
    """The generators of Python and numpy that all share, and a module's own, as they are when they become known."""

    def __init__(self) -> None:
        self._known: list[tuple[_Get, _Set, Any]] = []
        """Those that were drawn from, once they were compared."""
        self._know(random.getstate, random.setstate)
        self._know(partial(np.random.get_state, legacy=False), np.random.set_state)

    def look_at(self, value: object) -> None:
        """It may be a generator of the program's own."""
        access = _access(value)
        if access is not None:
            self._know(*access)

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
