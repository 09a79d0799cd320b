"""Which rows of a GGUF file's tensors a weight of the model has: found by what becomes of the rows' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offload.birth.gguf_file import GgufTensor
from offload.birth.stored_quantised import StoredQuantised, of_gguf
from offload.birth.weights_file import StackedTensor, StoredTensor
from offload.quantised import GgmlBlocks, Stack

Array = np.ndarray[Any, Any]

_APART = 1 << 40
"""Numbers of a tensor's rows begin so much above those of the one before."""


class NumberedRows:
    """Tensors whose rows have numbers, each another one."""

    def __init__(self, tensors: Sequence[GgufTensor]) -> None:
        self._tensors = tensors
        self._first = {tensor.name: (index + 1) * _APART for index, tensor in enumerate(tensors)}

    def of(self, tensor: GgufTensor) -> Array:
        """The numbers, in the tensor's shape: one in the place of each row."""
        has_rows = len(tensor.numbers) == len(tensor.shape)
        shape = (*tensor.shape[:-1], 1) if has_rows else tensor.numbers
        return (self._first[tensor.name] + np.arange(_num_rows(tensor))).reshape(shape)

    def sources(self, numbers: Array) -> list[GgufTensor]:
        """The tensors that a weight with these numbers has rows of; none if they are no such numbers any more."""
        if numbers.dtype != np.int64 or not numbers.size:
            return []
        found = np.unique(_indices(numbers))
        return [self._tensors[index] for index in found] if found[0] >= 0 and found[-1] < len(self._tensors) else []

    def shape(self, numbers: Array) -> torch.Size | None:
        """The weight's shape; None if it is not known."""
        sources = self.sources(numbers)
        if not sources or len(sources[0].numbers) != len(sources[0].shape):
            return torch.Size(numbers.shape) if sources else None
        return torch.Size((*numbers.shape[:-1], sources[0].numbers[-1])) if numbers.shape[-1] == 1 else None

    def in_file(self, name: str, numbers: Array) -> StoredQuantised | None:
        """A weight with these numbers as its rows are in the file; None where that is not known."""
        sources, shape = self.sources(numbers), self.shape(numbers)
        if shape is None:
            return None
        of, flat = _indices(numbers).ravel(), numbers.ravel()
        rows = flat - (of + 1) * _APART
        if len(sources) > 1:
            begins = np.flatnonzero(np.diff(flat, prepend=flat[0]) != 1)
            runs = np.stack((np.searchsorted(np.unique(of), of), rows, np.zeros_like(rows)), axis=1)[begins]
            runs[:, 2] = np.diff(begins, append=len(flat))
            return _one_behind_the_other(name, shape, sources, runs)
        (tensor,) = sources
        if rows.size != _num_rows(tensor):
            return None
        added = int(rows[0])
        if np.array_equal(rows, np.arange(rows.size) + added) and (rows.size > 1 or not added):
            return of_gguf(name, tensor, shape, added=float(added))
        paired = 2 * int(np.argmax(rows == 1))
        if paired > 2 and rows.size % paired == 0:
            pairs = np.arange(rows.size).reshape(-1, paired // 2, 2)
            if np.array_equal(rows, pairs.swapaxes(1, 2).ravel()):
                return of_gguf(name, tensor, shape, paired=paired)
        return None


def _one_behind_the_other(
    name: str, shape: torch.Size, sources: Sequence[GgufTensor], runs: Array
) -> StoredQuantised | None:
    """A stack of experts, each of which has as many rows of each source, one below the other. ``runs``: source, first
    row and number of rows of what lies together."""
    first = sources[0]
    count = int(runs[0, 2])
    if len(shape) != 3 or (runs[:, 2] != count).any() or shape[1] % count:
        return None
    if any((tensor.kind, tensor.shape[-1]) != (first.kind, first.shape[-1]) for tensor in sources):
        return None
    size = torch.Size((count, first.shape[-1]))
    found = []
    for index, row, _ in runs.tolist():
        tensor = sources[index]
        found.append(StoredTensor(tensor.file, tensor.name, torch.uint8, size, tensor.start + row * size[1]))
    across = shape[1] // count
    grid = [found[at : at + across] for at in range(0, len(found), across)]
    part = StackedTensor(name, grid, torch.Size((shape[0], across, *size)))
    return StoredQuantised(name, Stack, shape, (part,), settings=(GgmlBlocks, first.kind, 0, 0.0))


def _indices(numbers: Array) -> Array:
    """The tensor of each number. What was added to it is little."""
    return (numbers + _APART // 2) // _APART - 1


def _num_rows(tensor: GgufTensor) -> int:
    return tensor.shape[:-1].numel()
