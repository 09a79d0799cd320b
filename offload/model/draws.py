"""Tells whether random numbers were drawn, from any of the generators that a program shares."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> tuple[Any, ...]:
    """The states of Python's generator, numpy's and torch's on the CPU: equal as long as nothing is drawn."""
    of_numpy = np.random.get_state(legacy=False)
    return random.getstate(), _comparable(of_numpy), torch.default_generator.get_state().numpy().tobytes()


def _comparable(state: Any) -> Any:
    """The same with bytes in the place of arrays, which compare element by element."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
