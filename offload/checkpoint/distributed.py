"""A checkpoint as a ``torch.distributed.checkpoint``, written by one process without a process group.

Its tree is the one of PyTorch's tutorials: ``{"model": {name: weight}, "optimizer": {"state": {name: {...}},
"param_groups": [...]}}``, flattened to keys such as "optimizer.state.0.weight.exp_avg".

[Note: Memory] Large tensors are written in blocks of rows. The writer asks for a block when its turn comes, and keeps
all blocks of a file until the file is closed: so all of them are in the same memory, one after the other.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from offload.checkpoint.export import as_dtype
from offload.checkpoint.publish import Unfinished, check_replaceable
from offload.checkpoint.safetensors_writer import Entry
from offload.checkpoint.saved_weights import PART_NUMEL, SavedTensor, SavedWeights
from offload.memory import passing_tensor, tensor_at

_ITS_FILES = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp")
_ITEM_BYTES = 4096
"""What a block takes in the file beside its own bytes, at most."""


def export_distributed(
    weights: SavedWeights, path: str | os.PathLike[str], dtype: str | None, *, states: bool
) -> list[Entry]:
    """Write the weights, and with ``states`` those of the optimizer; which tensors these are.

    Raises ``ConfigError`` for states that nothing but the optimizer's class can read, and for a directory with other
    things in it.
    """
    target = Path(path).expanduser()
    if states:
        weights.check_states()
    check_replaceable(target, _ITS_FILES)
    planner = _Planner(weights, as_dtype(dtype or weights.description.precision), states=states)
    with Unfinished(target) as unfinished:
        unfinished.require(planner.nbytes)
        writer = FileSystemWriter(unfinished.folder, thread_count=1, per_thread_copy_ahead=0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group
                save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise next((cause for cause, _ in error.failures.values()), error) from None
        unfinished.publish_with(".metadata", _ITS_FILES)
    return planner.entries


class _Planner(DefaultSavePlanner):
    """Says what is to be written, and reads it when its turn comes."""

    def __init__(self, weights: SavedWeights, dtype: torch.dtype, *, states: bool) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._weights = weights
        self._items: list[WriteItem] = []
        self._reads: dict[MetadataIndex, Any] = {}
        paths: dict[str, tuple[str, ...]] = {}
        for tensor in weights.tensors.values():
            self._add(paths, ("model", tensor.name), Entry(tensor.name, dtype, tensor.shape), tensor)
            for entry in weights.state_entries(tensor) if states else ():
                self._add(paths, ("optimizer", "state", tensor.name, entry.name), entry, tensor)
            for name, value in weights.loose_states(tensor).items() if states else ():
                self._add_value(paths, ("optimizer", "state", tensor.name, name), value)
        for name, value in weights.buffers.items():
            self._add_value(paths, ("model", name), value)
        if states:
            self._add_value(paths, ("optimizer", "param_groups"), weights.groups())
        self._paths = paths
        sizes = (item.tensor_data.chunk.sizes.numel() for item in self._items if item.tensor_data is not None)
        self._buffer = passing_tensor(max(sizes, default=0) * 8)

    @property
    def nbytes(self) -> int:
        """The most that all of it takes on a disk."""
        values = (item.bytes_io_data.nbytes for item in self._items if item.bytes_io_data is not None)
        return sum(entry.nbytes for entry in self.entries) + sum(values) + len(self._items) * _ITEM_BYTES

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.mappings = self._paths  # type: ignore[assignment]
        self.plan = SavePlan(self._items, planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = self._reads[write_item.index]
        if not callable(found):
            return _as_bytes(found) if write_item.type is WriteItemType.BYTE_IO else found
        assert write_item.tensor_data is not None
        sizes, dtype = write_item.tensor_data.chunk.sizes, write_item.tensor_data.properties.dtype
        block = tensor_at(self._buffer.data_ptr(), sizes.numel(), dtype)
        found(block)
        return block.view(sizes)

    def _add(self, paths: dict[str, tuple[str, ...]], path: tuple[str, ...], entry: Entry, tensor: SavedTensor) -> None:
        """A tensor that is read in blocks."""
        key = ".".join(path)
        paths[key] = path
        self.entries.append(Entry(key, entry.dtype, entry.shape))
        for offsets, sizes in _blocks(entry.shape):
            start = offsets[0] * math.prod(entry.shape[1:]) if offsets else 0
            index = MetadataIndex(key, torch.Size(offsets))
            self._items.append(_tensor_item(index, entry, offsets, sizes))
            if path[0] == "model":
                self._reads[index] = partial(self._weights.read, tensor, start)
            else:
                self._reads[index] = partial(self._weights.read_state, tensor, entry.name, start)

    def _add_value(self, paths: dict[str, tuple[str, ...]], path: tuple[str, ...], value: Any) -> None:
        """A tensor that is in memory, or a value that is none."""
        key = ".".join(path)
        paths[key] = path
        if isinstance(value, torch.Tensor):
            entry = Entry(key, value.dtype, tuple(value.shape))
            self.entries.append(entry)
            index = MetadataIndex(key, torch.Size([0] * value.dim()))
            self._items.append(_tensor_item(index, entry, (0,) * value.dim(), entry.shape))
        else:
            index = MetadataIndex(key)
            size = BytesIOWriteData(nbytes=_as_bytes(value).getbuffer().nbytes)
            self._items.append(WriteItem(index=index, type=WriteItemType.BYTE_IO, bytes_io_data=size))
        self._reads[index] = value


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of blocks of whole rows."""
    rows = max(PART_NUMEL // max(math.prod(shape[1:]), 1), 1)
    if not shape or shape[0] <= rows:
        yield (0,) * len(shape), shape
        return
    for start in range(0, shape[0], rows):
        yield (start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:])


def _tensor_item(index: MetadataIndex, entry: Entry, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=entry.dtype), size=torch.Size(entry.shape))
    kind = WriteItemType.TENSOR if sizes == entry.shape else WriteItemType.SHARD
    return WriteItem(index=index, type=kind, tensor_data=data)


def _as_bytes(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content
