"""A checkpoint of the engine's as a ``torch.distributed.checkpoint``, written by one process without a process group;
see ``distributed_writer``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.distributed_writer import Elements, Planner, TreePath, write
from offload.checkpoint.export import as_dtype
from offload.checkpoint.safetensors_writer import Entry
from offload.checkpoint.saved_weights import SavedWeights
from offload.ranks.ranks import Ranks


def export_distributed(
    weights: SavedWeights, path: str | os.PathLike[str], dtype: str | None, *, states: bool
) -> list[Entry]:
    """Write the weights, and with ``states`` those of the optimizer; which tensors these are.

    Raises ``ConfigError`` for states that nothing but the optimizer's class can read, and for a directory with other
    things in it.
    """
    if states:
        weights.check_states()
    of_weights = as_dtype(dtype or weights.description.precision)
    planner = Planner(_elements(weights, of_weights, states=states), _values(weights, states=states), {})
    write(Path(path).expanduser(), planner, Ranks.single())
    return list(planner.entries.values())


def _elements(weights: SavedWeights, dtype: torch.dtype, *, states: bool) -> Iterator[Elements]:
    for tensor in weights.tensors.values():
        entry = Entry(tensor.name, dtype, tensor.shape)
        numel = math.prod(tensor.shape)
        yield Elements(("model", tensor.name), entry, 0, numel, partial(weights.read, tensor))
        for state in weights.state_entries(tensor) if states else ():
            path = ("optimizer", "state", tensor.name, state.name)
            yield Elements(path, state, 0, math.prod(state.shape), partial(weights.read_state, tensor, state.name))


def _values(weights: SavedWeights, *, states: bool) -> dict[TreePath, Any]:
    values: dict[TreePath, Any] = {("model", name): value for name, value in weights.buffers.items()}
    if states:
        for tensor in weights.tensors.values():
            for name, value in weights.loose_states(tensor).items():
                values["optimizer", "state", tensor.name, name] = value
        values["optimizer", "param_groups"] = weights.groups()
    return values
