"""The random generators of a program, kept over something that sets them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards Python's, numpy's and torch's generators are what they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
