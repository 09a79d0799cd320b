"""Writes a ``torch.distributed.checkpoint``: each rank the elements that it has, into a file of its own.

Its tree is the one of PyTorch's tutorials: ``{"model": {name: weight}, "optimizer": {"state": {name: {...}},
"param_groups": [...]}}``, flattened to keys such as "optimizer.state.0.weight.exp_avg".

[Note: Without torch's collectives] ``torch.distributed.checkpoint.save`` calls a planner and a writer in turn, with
collectives in between. Here the same calls are made, and what the ranks tell each other goes through
``on_every_rank``: so a rank that fails or dies ends all of them. All ranks work the global plan out, each for itself.

[Note: Memory] Tensors are written in boxes of at most ``PART_NUMEL`` elements. The writer asks for a box when its turn
comes, and keeps all boxes of a file until the file is closed: so all of them are in the same memory, one after the
other.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from offload.checkpoint.dcp.names import STATES, TreePath, key_of
from offload.checkpoint.dcp.pickled import unpickled
from offload.checkpoint.every_rank import on_every_rank
from offload.checkpoint.publish import Unfinished, check_replaceable
from offload.checkpoint.tensors import Entry, Portion
from offload.elements import PART_NUMEL
from offload.errors import ConfigError
from offload.memory import passing_tensor, tensor_at
from offload.ranks.ranks import Ranks
from swapper import OffloadError, StorageIOError
from swapper.errors import failed

_Result = TypeVar("_Result")

_METADATA = ".metadata"
_ITS_FILES = re.compile(r"\.metadata|__([0-9]+)_[0-9]+\.distcp")
_ITEM_BYTES = 4096
"""Bytes that a box takes in the file beside its own, at most."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that together are the flat elements ``[start, stop)`` of a tensor, in order. Each has
    at most ``PART_NUMEL`` of them, which follow one another. A tensor without elements is one empty box."""
    if not shape or not math.prod(shape):
        if start < stop or not math.prod(shape):
            yield (0,) * len(shape), tuple(shape)
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        rows = min((stop - start) // row, PART_NUMEL // row)
        if within == 0 and rows:
            yield (index, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offsets, sizes in boxes(shape[1:], within, within + end - start):
            yield (index, *offsets), (1, *sizes)
        start = end


class Planner(DefaultSavePlanner):
    """Says what this process has to be written, and reads it when its turn comes."""

    def __init__(
        self,
        portions: Iterable[Portion],
        values: Mapping[TreePath, Any],
        other_names: Mapping[TreePath, TreePath],
    ) -> None:
        """``values``: tensors in memory and values that are none. ``other_names``: paths that have what is at another
        path, and take no bytes of their own."""
        super().__init__()
        self.entries: dict[str, Entry] = {}
        """The tensors that this process has something of, by key."""
        self._items: list[WriteItem] = []
        self._reads: dict[MetadataIndex, tuple[Callable[[int, torch.Tensor], None], int]] = {}
        self._values: dict[str, Any] = {}
        self._other_names = other_names
        for path, value in values.items():
            for inner, leaf in _leaves(path, value):
                self._add_value(inner, leaf)
        for portion in portions:
            self._add(portion)
        sizes = (item.tensor_data.chunk.sizes.numel() for item in self._items if item.tensor_data is not None)
        self._buffer = passing_tensor(max(sizes, default=0) * 8)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for path, same in self._other_names.items():
            metadata.state_dict_metadata[key_of(path)] = metadata.state_dict_metadata[key_of(same)]
            metadata.planner_data[key_of(path)] = path
        return plans, metadata

    def named(self, results: Iterable[WriteResult]) -> list[WriteResult]:
        """The results, and the same ones under the other names."""
        found = list(results)
        names: dict[str, list[str]] = {}
        for path, same in self._other_names.items():
            names.setdefault(key_of(same), []).append(key_of(path))
        return found + [
            replace(result, index=replace(result.index, fqn=name))
            for result in found
            for name in names.get(result.index.fqn, ())
        ]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data, key = write_item.tensor_data, write_item.index.fqn
        if data is None:
            return _as_bytes(self._values[key])
        if key in self._values:
            value: torch.Tensor = self._values[key]
            return value.detach().cpu()
        read, start = self._reads[write_item.index]
        block = tensor_at(self._buffer.data_ptr(), data.chunk.sizes.numel(), data.properties.dtype)
        read(start, block)
        return block.view(data.chunk.sizes)

    def _add(self, portion: Portion) -> None:
        name, start = portion.entry.name, portion.start
        path = (*STATES, name, portion.state) if portion.state else ("model", name)
        key = key_of(path)
        self.mappings[key] = path
        self.entries[key] = entry = portion.entry._replace(name=key)
        for offsets, sizes in boxes(entry.shape, portion.start, portion.stop):
            index = MetadataIndex(key, torch.Size(offsets))
            self._items.append(_tensor_item(index, entry, sizes))
            self._reads[index] = portion.read, start
            start += math.prod(sizes)

    def _add_value(self, path: TreePath, value: Any) -> None:
        key = key_of(path)
        self.mappings[key], self._values[key] = path, value
        if isinstance(value, torch.Tensor):
            self.entries[key] = entry = Entry(key, value.dtype, tuple(value.shape))
            index = MetadataIndex(key, torch.Size([0] * value.dim()))
            self._items.append(_tensor_item(index, entry, entry.shape))
        else:
            size = BytesIOWriteData(nbytes=_as_bytes(value).getbuffer().nbytes)
            self._items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=size))


def _leaves(path: TreePath, value: Any) -> Iterator[tuple[TreePath, Any]]:
    """Leaves that are written of a value: itself, but for a dict with tensors in it what that has. So torch reads it,
    too, since ``param_groups`` in one piece are to it a checkpoint of before 2.4; whatever options its optimizer
    has."""
    if isinstance(value, Mapping) and _has_tensors(value):
        for name, inner in value.items():
            yield from _leaves((*path, str(name)), inner)
    else:
        yield path, value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor)


def write(path: Path, planner: Planner, ranks: Ranks) -> None:
    """Write what the planners of all ranks have, in place of the checkpoint that is in the directory ``path``, which
    readers see until the new one is complete. All ranks call this.

    Raises ``ConfigError`` for a directory with other things in it, ``StorageFull`` before anything is written if there
    is too little room, and what another rank has met. What was there is whole then.
    """
    with contextlib.ExitStack() as ending:
        _Writing(path, planner, ranks, ending).write()


class _Writing:
    """One rank's part of a checkpoint that is written. The first one makes the folder and publishes it."""

    def __init__(self, path: Path, planner: Planner, ranks: Ranks, ending: contextlib.ExitStack) -> None:
        self._path = path
        self._planner = planner
        self._ranks = ranks
        self._ending = ending
        self._is_first = ranks.rank == 0
        self._unfinished: Unfinished | None = None

    def write(self) -> None:
        """See the function of this name."""
        name, number = self._all("a folder", self._begin)[0]
        folder = self._path / name
        if not all(self._all("who sees the folder", folder.is_dir)):
            raise ConfigError(
                f"{self._path}: some ranks do not see the folder that the first one has made. Give a directory on a "
                "file system that all of them share."
            )
        of_ranks = self._all("a plan", lambda: pickle.dumps(self._planner.create_local_plan()))
        plans, metadata = self._planner.create_global_plan([unpickled(plan, SavePlan) for plan in of_ranks])
        writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
        plans = writer.prepare_global_plan([SavePlan([])] * number + plans)[number:]  # which numbers their files
        self._all("room", partial(self._require, plans))
        of_ranks = self._all("the parts", lambda: pickle.dumps(self._write(writer, plans[self._ranks.rank])))
        results = [unpickled(written, list) for written in of_ranks]
        self._all("all of it", partial(self._publish, writer, metadata, results))

    def _all(self, what: str, call: Callable[[], _Result]) -> list[_Result]:
        return on_every_rank(self._ranks, f"saving {self._path}: {what}", partial(self._typed, call))

    def _typed(self, call: Callable[[], _Result]) -> _Result:
        """Make the call. Raises ``StorageError`` for what the system says."""
        try:
            return call()
        except OSError as error:
            told = failed(f"writing to {self._path}", error)
            told.survives = "What was there is whole, unless the new checkpoint is complete."
            raise told from error

    def _begin(self) -> tuple[str, int]:
        """The folder in the target, and the first of the numbers, one a rank, that no file of the target has."""
        if not self._is_first:
            return "", 0
        check_replaceable(self._path, _ITS_FILES)
        self._unfinished = self._ending.enter_context(Unfinished(self._path))
        found = (_ITS_FILES.fullmatch(entry.name) for entry in self._path.iterdir())
        numbers = {int(match[1]) for match in found if match is not None and match[1]}
        num_files = self._ranks.size
        return str(self._unfinished.folder.relative_to(self._path)), max(numbers) + 1 if numbers & set(
            range(num_files)
        ) else 0

    def _require(self, plans: Sequence[SavePlan]) -> None:
        if self._unfinished is not None:
            self._unfinished.require(sum(_nbytes(item) for plan in plans for item in plan.items))

    def _write(self, writer: FileSystemWriter, plan: SavePlan) -> list[WriteResult]:
        try:
            return self._planner.named(writer.write_data(plan, self._planner).wait())
        except RuntimeError as error:  # torch.save's, when a file does not take all bytes; it does not say why
            if isinstance(error, OffloadError):
                raise
            raise StorageIOError(f"writing to {self._path} failed: {error}.") from error

    def _publish(self, writer: FileSystemWriter, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._unfinished is not None:
            writer.finish(metadata, results)
            self._unfinished.publish_with(_METADATA, _ITS_FILES)


def _nbytes(item: WriteItem) -> int:
    """The most that it takes on a disk."""
    if item.tensor_data is None:
        return _ITEM_BYTES + (0 if item.bytes_io_data is None else item.bytes_io_data.nbytes)
    return _ITEM_BYTES + item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _tensor_item(index: MetadataIndex, entry: Entry, sizes: tuple[int, ...]) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=index.offset or torch.Size(), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=entry.dtype), size=torch.Size(entry.shape))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _as_bytes(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content
