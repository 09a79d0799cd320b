"""The states of the random generators that a training program draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Those of Python, numpy, torch on the CPU, and of ``device``."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Take over what ``get_random_states`` gave. A device that was not there keeps its state."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
