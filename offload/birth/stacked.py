"""Tensors of files that are one in the model: experts that are stored one by one, and computed as one parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.birth.stored_quantised import StoredQuantised
from offload.birth.weights_file import StackedTensor, StoredTensor
from offload.quantised import Stack

_MERGES = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
"""Operations of ``transformers``, with their dimensions, by which an expert's tensors come one below the other, and one
expert behind the other: bytes stay in the order in which they lie in the files."""


def stacked(
    name: str,
    shape: torch.Size,
    operations: Sequence[object],
    sources: Sequence[Sequence[StoredTensor | StoredQuantised]],
) -> StackedTensor | StoredQuantised | None:
    """Return the result of ``operations`` of ``transformers`` on ``sources``, a list for each pattern of names, if they
    only put one behind the other; None if not."""
    if [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations] not in _MERGES:
        return None
    if len({len(source) for source in sources}) != 1:
        return None
    grid = list(zip(*sources, strict=True))
    tensors = [[item for item in row if isinstance(item, StoredTensor)] for row in grid]
    if all(len(row) == len(sources) for row in tensors):
        return StackedTensor(name, tensors, shape) if _are_alike([t for row in tensors for t in row]) else None
    weights = [[item for item in row if isinstance(item, StoredQuantised)] for row in grid]
    flat = [weight for row in weights for weight in row]
    first = flat[0]
    if len(flat) != len(grid) * len(sources) or any(
        (of.kind, of.shape, of.settings) != (first.kind, first.shape, first.settings) for of in flat
    ):
        return None
    parts = []
    for index, part in enumerate(first.parts):
        own = [[weight.parts[index] for weight in row] for row in weights]
        of_files = [[tensor for tensor in row if isinstance(tensor, StoredTensor)] for row in own]
        if not _are_alike([tensor for row in of_files for tensor in row]):
            return None
        parts.append(StackedTensor(part.name, of_files, torch.Size((len(grid), len(sources), *part.shape))))
    return StoredQuantised(name, Stack, shape, tuple(parts), settings=(first.kind, *first.settings))


def _are_alike(tensors: Sequence[StoredTensor]) -> bool:
    """They have one dtype and shape."""
    return len({(tensor.dtype, tensor.shape) for tensor in tensors}) == 1
