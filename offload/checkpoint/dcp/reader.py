"""Reads a ``torch.distributed.checkpoint`` by ranges of elements, whoever wrote it.

torch's own reader loads each chunk that it needs something of, and a chunk may be a whole tensor. Here the elements
that are asked for are read, a few MiB at a time: a chunk is a file of ``torch.save`` inside of another one, and where
its elements lie in that is looked up once.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from offload.checkpoint.dcp.pickled import PlainUnpickler, read_metadata
from offload.checkpoint.dcp.writer import boxes
from offload.elements import PART_NUMEL
from offload.errors import WeightsError
from offload.memory import passing_tensor
from swapper.checked import Int, open_regular, refusals
from swapper.errors import failed
from swapper.files import Descriptor

_NUM_OPEN = 16
"""Files that are open at a time: a checkpoint has one of each rank that wrote it."""

_LOCAL_HEADER = struct.Struct("<26x2H")
"""Of a file in a zip archive: the lengths of its name and of what follows that."""

_LAYOUT_BYTES_MAX = 1 << 20
"""Of a chunk, what is not its numbers has no more."""

_SIZE = Int()


class _Place(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    nbytes: int


class _Chunks(NamedTuple):
    """The chunks of a tensor in order, the first row of each, and the most rows of one."""

    chunks: list[ChunkStorageMetadata]
    starts: list[int]
    rows_max: int


class DistributedReader:
    """The tensors and other values in the directory ``path``, by key. Close it at the end.

    Raises ``WeightsError`` if there is no checkpoint, or files of it are missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: OrderedDict[str, Descriptor] = OrderedDict()
        try:
            with refusals(str(path / ".metadata"), WeightsError):
                metadata = read_metadata(path)
        except (FileNotFoundError, NotADirectoryError):
            raise WeightsError(
                f"{path} has no torch.distributed.checkpoint in it: there is no file .metadata"
            ) from None
        except OSError as error:
            raise failed(f"reading {path / '.metadata'}", error) from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.paths: dict[str, tuple[Any, ...]] = {
            key: (metadata.planner_data or {}).get(key, (key,)) for key in metadata.state_dict_metadata
        }
        """Path of each key in the tree that was saved."""
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._buffer = passing_tensor(PART_NUMEL * 8)
        self._chunks: dict[str, _Chunks] = {}
        self._layouts: dict[MetadataIndex, _Place | None] = {}
        self._loaded: tuple[MetadataIndex, torch.Tensor] | None = None
        """The chunk that was last loaded as a whole, and its flat elements."""
        self._check_files()

    def close(self) -> None:
        """Close the files. Nothing more can be read."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __contains__(self, key: str) -> bool:
        return key in self.paths

    def read(self, key: str, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat and in host memory, with the tensor's elements from ``start`` on, cast to its dtype.

        Raises ``StorageError`` if the disk says no, ``WeightsError`` for a chunk that is damaged.
        """
        at = 0
        for offsets, sizes in boxes(self.tensors[key].size, start, start + target.numel()):
            numel = math.prod(sizes)
            part, missing = target[at : at + numel].view(sizes), numel
            for chunk in self._near(key, offsets, sizes):
                missing -= self._copy(key, chunk, offsets, part)
            if missing:
                raise WeightsError(f"{self.path}: {missing} elements of {key} from {offsets} on are in no chunk")
            at += numel

    def value(self, key: str) -> Any:
        """A tensor as a whole, or a value that is none. Raises as ``read``, and ``WeightsError`` for what code of
        others would have to be run for."""
        if key in self.tensors:
            entry = self.tensors[key]
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            self.read(key, 0, value.view(-1))
            return value
        return self._load(self._place(MetadataIndex(key)), key)

    # Chunks.

    def _near(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Sequence[ChunkStorageMetadata]:
        """The chunks that may have some of the box: by their rows."""
        if key not in self._chunks:
            chunks = sorted(self.tensors[key].chunks, key=lambda chunk: chunk.offsets)
            most = max((chunk.sizes[0] for chunk in chunks if chunk.sizes), default=0)
            self._chunks[key] = _Chunks(chunks, [chunk.offsets[0] for chunk in chunks if chunk.offsets], most)
        chunks, starts, rows = self._chunks[key]
        if not offsets:
            return chunks
        return chunks[bisect_left(starts, offsets[0] - rows + 1) : bisect_left(starts, offsets[0] + sizes[0])]

    def _copy(self, key: str, chunk: ChunkStorageMetadata, offsets: Sequence[int], part: torch.Tensor) -> int:
        """Copy what the chunk has of the box at ``offsets`` to ``part``, which is the box; how many elements that is.

        The box is a range of flat elements. So what is in the chunk follows one another there.
        """
        spans = [
            (max(here, there), min(here + own, there + other))
            for here, own, there, other in zip(offsets, part.shape, chunk.offsets, chunk.sizes, strict=True)
        ]
        if any(begin >= end for begin, end in spans):
            return 0
        for dimension, ((begin, end), here) in enumerate(zip(spans, offsets, strict=True)):
            part = part.narrow(dimension, begin - here, end - begin)
        first = 0
        for (begin, _), there, other in zip(spans, chunk.offsets, chunk.sizes, strict=True):
            first = first * other + begin - there
        part.copy_(self._elements(key, chunk.offsets, first, part.numel()).view(part.shape))
        return part.numel()

    def _elements(self, key: str, chunk: torch.Size, first: int, numel: int) -> torch.Tensor:
        """So many of the chunk's flat elements; in the same memory each time."""
        index, dtype = MetadataIndex(key, chunk), self.tensors[key].properties.dtype
        if index not in self._layouts:
            self._layouts[index] = self._find_layout(key, chunk)
        place = self._layouts[index]
        if place is None:
            return self._whole(index)[first : first + numel]
        found = self._buffer[: numel * dtype.itemsize]
        self._read(place.file, place.offset + first * dtype.itemsize, found)
        return found.view(dtype)

    def _find_layout(self, key: str, offsets: torch.Size) -> _Place | None:
        """Find where the elements of a chunk lie, one after the other; None if they lie otherwise."""
        place, dtype = self._place(MetadataIndex(key, offsets)), self.tensors[key].properties.dtype
        sizes = next(chunk.sizes for chunk in self.tensors[key].chunks if chunk.offsets == offsets)
        try:
            file = _Slice(self._file(place.file), place)
            with zipfile.ZipFile(file) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if records["data.pkl"].file_size > _LAYOUT_BYTES_MAX:
                    raise ValueError("it has too much beside its numbers")
                layout = _Layout(io.BytesIO(archive.read(records["data.pkl"]))).load()
            record = records[f"data/{layout.storage}"]
            file.seek(record.header_offset)
            name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size) or b"")
        except OSError as error:
            raise failed(f"reading {self.path / place.file}", error) from error
        except (pickle.UnpicklingError, AttributeError):  # another kind of tensor
            return None
        except (
            zipfile.BadZipFile,
            zlib.error,
            LookupError,
            ValueError,
            TypeError,
            EOFError,
            struct.error,
            NotImplementedError,
        ) as error:
            raise WeightsError(f"{self.path / place.file}: {key} at {tuple(offsets)} is damaged: {error}") from error
        is_plain = record.compress_type == zipfile.ZIP_STORED and record.file_size == layout.numel * dtype.itemsize
        if not is_plain or layout.stride != torch.empty(sizes, device="meta").stride():
            return None
        begin = record.header_offset + _LOCAL_HEADER.size + name + extra + layout.offset * dtype.itemsize
        nbytes = math.prod(sizes) * dtype.itemsize
        if not 0 <= layout.offset <= layout.numel - math.prod(sizes) or begin + nbytes > place.nbytes:
            raise WeightsError(f"{self.path / place.file}: {key} at {tuple(offsets)} is damaged: it ends too early")
        return _Place(place.file, place.offset + begin, nbytes)

    def _whole(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk's flat elements."""
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = None
            value = self._load(self._place(index), str(index))
            sizes = next(chunk.sizes for chunk in self.tensors[index.fqn].chunks if chunk.offsets == index.offset)
            if not isinstance(value, torch.Tensor) or value.shape != sizes:
                raise WeightsError(
                    f"{self.path}: {index.fqn} at {tuple(index.offset or ())} is not of shape {tuple(sizes)}"
                )
            self._loaded = index, value.detach().reshape(-1)
        return self._loaded[1]

    # Files.

    def _check_files(self) -> None:
        """All of them are there, and not too short."""
        ends: dict[str, int] = {}
        for place in self._places.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            file = self.path / name
            found = file.stat().st_size if file.is_file() else None
            if found is None or found < end:
                said = "is not there" if found is None else f"has {found:,} bytes, and {end:,} belong to it"
                raise WeightsError(f"{self.path} is not whole: {name} {said}")

    def _place(self, index: MetadataIndex) -> _Place:
        found = self._places.get(index)
        if found is None or getattr(found, "transform_descriptors", None):
            said = "is in no file" if found is None else "was compressed by an extension"
            raise WeightsError(f"{self.path}: {index.fqn} {said}")
        return _Place(found.relative_path, found.offset, found.length)

    def _load(self, place: _Place, what: str) -> Any:
        """The whole value."""
        try:
            file = io.BufferedReader(_Slice(self._file(place.file), place))
            return torch.load(file, map_location="cpu", weights_only=True)
        except OSError as error:
            raise failed(f"reading {self.path / place.file}", error) from error
        except Exception as error:  # whatever a file of other bytes makes it raise
            raise WeightsError(f"{self.path / place.file}: {what} cannot be read: {error}") from error

    def _read(self, file: str, offset: int, target: torch.Tensor) -> None:
        """Fill ``target`` with bytes of a file."""
        view, done = memoryview(target.numpy().data), 0
        try:
            while done < len(view):
                count = os.preadv(self._file(file).number, [view[done:]], offset + done)
                if not count:
                    raise WeightsError(f"{self.path / file} has become shorter than {offset + len(view):,} bytes")
                done += count
        except OSError as error:
            raise failed(f"reading {self.path / file}", error) from error

    def _file(self, name: str) -> Descriptor:
        if name not in self._files:
            if len(self._files) == _NUM_OPEN:
                self._files.popitem(last=False)[1].close()
            with refusals(str(self.path / name), WeightsError):
                self._files[name] = open_regular(self.path / name, links=True)
        return self._files[name]


class _Slice(io.RawIOBase):
    """Some bytes of an open file as a file of their own."""

    def __init__(self, file: Descriptor, place: _Place) -> None:
        self._file = file
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._place.nbytes)[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        numel = max(min(len(buffer), self._place.nbytes - self._at), 0)
        count = os.preadv(self._file.number, [memoryview(buffer)[:numel]], self._place.offset + self._at)
        self._at += count
        return count


class _Tensor(NamedTuple):
    """Layout of an ordinary tensor in its storage; numbers are in elements."""

    storage: str
    numel: int
    """Of the storage."""
    offset: int
    stride: tuple[int, ...]


class _Layout(PlainUnpickler):
    """Reads how a pickled tensor lies, and not its elements. Raises ``UnpicklingError`` for other things."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Tensor:
    _, _, key, _, numel = storage
    return _Tensor(str(key), _SIZE.take(numel), _SIZE.take(offset), tuple(_SIZE.take(step) for step in stride))


def nested(reader: DistributedReader, *prefix: Any) -> Any:
    """Return what was saved at this path of the tree: a value, or dicts and lists of values. None if nothing is
    there."""
    tree: dict[Any, Any] = {}
    for key, path in reader.paths.items():
        if path == prefix:
            return reader.value(key)
        if path[: len(prefix)] == prefix:
            branch = tree
            for name in path[len(prefix) : -1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = reader.value(key)
    return _with_lists(tree) if tree else None


def _with_lists(tree: Any) -> Any:
    """The tree with lists where names are numbers."""
    if not isinstance(tree, dict):
        return tree
    found = {name: _with_lists(value) for name, value in tree.items()}
    return [found[index] for index in sorted(found)] if all(isinstance(name, int) for name in found) else found
