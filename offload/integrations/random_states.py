"""States of a program's random generators, kept over something that draws from them or sets them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


class RandomStates:
    """States of Python's, numpy's and torch's generators at the moment when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Give the generators these states again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.cuda.set_rng_state_all(self._cuda)


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the generators have the states of before."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()
