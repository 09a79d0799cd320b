"""Weights files in the safetensors format: one file, or an index of shards, as on Hugging Face.

A file is 8 bytes with the length of a header, the header (JSON: for each tensor dtype, shape, and where its bytes begin
and end), and the bytes. They are read, not mapped: what is mapped counts as memory of the process until it is dropped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from offload.errors import WeightsError
from offload.memory import passing_tensor
from swapper import FilePart, ReadOnlyFile
from swapper.checked import (
    TEXT,
    Cursor,
    FileName,
    Int,
    MapOf,
    OneOf,
    Record,
    Refused,
    Shape,
    Text,
    Tuple,
    open_regular,
    read_regular,
    refusals,
    require_held,
    text_of,
    within,
)
from swapper.files import named

INDEX_NAME = "model.safetensors.index.json"
FILE_NAME = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HEADER_BYTES_MAX = 100 << 20
_INDEX_BYTES_MAX = 100 << 20
_READ_BYTES = 16 << 20


class _Entry(NamedTuple):
    """Entry of a tensor in a header; offsets are from the header's end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_ENTRY = Record(_Entry, {"dtype": OneOf(_DTYPES), "shape": Shape(), "data_offsets": Tuple(Int(), Int())})
_METADATA = MapOf(Text(_HEADER_BYTES_MAX))
_WEIGHT_MAP = MapOf(FileName())


class WeightsFile:
    """One file, held open: another one put in its place later is not read."""

    def __init__(self, path: Path) -> None:
        """Raises ``WeightsError`` if the file is not there or is damaged, as far as its header and length tell."""
        self.path = path
        with refusals(f"the weights file {named(path)}", WeightsError):
            try:
                self._file = open_regular(path, links=True)  # those of a cache are links to what was downloaded
            except OSError as error:
                raise WeightsError(f"cannot open the weights file {named(path)}: {error.strerror}") from None
            try:
                status = os.fstat(self._file.number)
                self.tensors, checksum = self._read_header(status.st_size)
                self.read_only = ReadOnlyFile(path, self._file.number, checksum, status)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._file.close()

    def read_into(self, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, contiguous and in host memory, with the file's bytes from ``start`` on.

        Raises ``WeightsError`` if the disk does not give them. They do not stay in the page cache.
        """
        memory = memoryview(target.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._file.number, [memory[done:]], start + done)
            except OSError as error:
                raise self._error(f"cannot be read at byte {start + done}: {error.strerror}") from None
            if count == 0:
                raise self._error(f"has no byte {start + done} any more: it was cut off while it was read")
            done += count
        os.posix_fadvise(self._file.number, start, len(memory), os.POSIX_FADV_DONTNEED)

    def _read_header(self, nbytes: int) -> tuple[dict[str, StoredTensor], int]:
        """The tensors, and a checksum of what is said of them."""
        if nbytes < 8:
            raise Refused(f"it has {nbytes} bytes: that is no safetensors file")
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > min(_HEADER_BYTES_MAX, nbytes - 8):
            raise Refused(
                f"it is cut off, or no safetensors file: its header would have {length} bytes, and the file has "
                f"{nbytes}"
            )
        header = self._read_bytes(8, length)
        cursor, tensors = Cursor(text_of(header)), {}
        with within("header"):
            for name in cursor.members():
                with within(name):
                    if name == "__metadata__":
                        _METADATA.read(cursor)
                    else:
                        tensors[TEXT.take(name)] = self._tensor(name, _ENTRY.read(cursor), 8 + length)
            cursor.end()
        reached = 8 + length
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start != reached:
                raise Refused(f"its tensors overlap, or leave bytes out, at byte {reached}")
            reached += tensor.nbytes
        if reached != nbytes:
            raise Refused(f"it is cut off, or too long: it should have {reached} bytes, and has {nbytes}")
        return tensors, xxhash.xxh3_64_intdigest(header)

    def _tensor(self, name: str, entry: _Entry, base: int) -> StoredTensor:
        start, end = entry.data_offsets
        tensor = StoredTensor(self, name, entry.dtype, torch.Size(entry.shape), base + start)
        if end - start != tensor.nbytes:
            raise Refused(f"it has {end - start} bytes, which is not its shape")
        return tensor

    def _read_bytes(self, start: int, count: int) -> bytes:
        target = torch.empty(count, dtype=torch.uint8)
        self.read_into(start, target)
        return target.numpy().tobytes()

    def _error(self, what: str) -> WeightsError:
        return WeightsError(f"the weights file {self.path} {what}")


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A tensor in a file; its bytes begin at ``start`` there."""

    file: WeightsFile
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows ``[start, stop)``, cast to ``dtype``. Takes their memory, and 16 MiB."""
        return self._read((stop - start, *self.shape[1:]), start * math.prod(self.shape[1:]), dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, cast to ``dtype``."""
        return self._read(self.shape, 0, dtype)

    def bytes(self, most: int) -> bytes:
        """Its bytes. Raises ``Refused`` for more than ``most``."""
        if self.nbytes > most:
            raise Refused(f"it has {self.nbytes:,} bytes, more than {most:,}")
        return self.whole(self.dtype).flatten().view(torch.uint8).numpy().tobytes()

    def in_files(self, offset: int) -> Iterator[FilePart]:
        """Yield its parts of the file, as the bytes of a record from ``offset`` on."""
        yield FilePart(self.file.read_only, self.start, self.nbytes, offset)

    def parts(self) -> Iterator[torch.Tensor]:
        """All of it as it is in the file, flat, a few MiB at a time."""
        numel = math.prod(self.shape)
        step = _READ_BYTES // self.dtype.itemsize
        for start in range(0, numel, step):
            part = _fresh((min(step, numel - start),), self.dtype)
            self.file.read_into(self.start + start * self.dtype.itemsize, part)
            yield part

    def _read(self, shape: Sequence[int], first: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements from ``first`` on, as a tensor of this shape."""
        value, step = _fresh(shape, dtype), _READ_BYTES // self.dtype.itemsize
        flat = value.view(-1)
        for start in range(0, flat.numel(), step):
            target = flat[start : start + step]
            part = target if self.dtype == target.dtype else _fresh(target.shape, self.dtype)
            self.file.read_into(self.start + (first + start) * self.dtype.itemsize, part)
            if part is not target:
                target.copy_(part)
        return value


def _fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return passing_tensor(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


@dataclass(frozen=True, eq=False)
class StackedTensor:
    """Tensors of one dtype and shape as one, of this ``shape``: each of its rows is those of one of ``rows``, one
    behind the other."""

    name: str
    grid: Sequence[Sequence[StoredTensor]]
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.grid[0][0].dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows ``[start, stop)``, cast to ``dtype``."""
        flat = [tensor.whole(dtype).flatten() for row in self.grid[start:stop] for tensor in row]
        return torch.cat(flat).view(stop - start, *self.shape[1:])

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, cast to ``dtype``."""
        return self.rows(0, len(self.grid), dtype)

    def in_files(self, offset: int) -> Iterator[FilePart]:
        """See ``StoredTensor.in_files``."""
        for row in self.grid:
            for tensor in row:
                yield from tensor.in_files(offset)
                offset += tensor.nbytes


class Weights:
    """The tensors of one file, or of all shards of an index."""

    def __init__(self, path: Path) -> None:
        """``path`` is a ``.safetensors`` file, an index of shards, or a directory with one of the two under the names
        that Hugging Face gives them. Raises ``WeightsError``."""
        self.path = path
        self.files: list[WeightsFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        index = _index_of(path)
        file_names = {} if index is None else _weight_map(index)
        try:
            for file in [_only_file(path)] if index is None else _shards(index, file_names):
                self.files.append(WeightsFile(file))
                for name, tensor in self.files[-1].tensors.items():
                    if name in self.tensors:
                        raise WeightsError(f"{name} is in two weights files: {self.tensors[name].file.path} and {file}")
                    self.tensors[name] = tensor
            for name, file_name in file_names.items():
                if name not in self.tensors:
                    raise WeightsError(f"{index} names {name} in {file_name}, and the file does not have it")
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files = []


def _shards(index: Path, file_names: Mapping[str, str]) -> list[Path]:
    files = [index.parent / name for name in dict.fromkeys(file_names.values())]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise WeightsError(f"{index} names weights files that are not there: {', '.join(missing)}")
    return files


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / FILE_NAME).exists():
        return path / FILE_NAME
    raise WeightsError(
        f"weights: there is neither {FILE_NAME} nor {INDEX_NAME} in {path}. Other formats (.bin, .pt) are not "
        "read: save them as safetensors (transformers: save_pretrained)."
    )


def _index_of(path: Path) -> Path | None:
    if path.is_dir():
        return path / INDEX_NAME if (path / INDEX_NAME).exists() and not (path / FILE_NAME).exists() else None
    return path if path.suffix == ".json" else None


def _weight_map(index: Path) -> dict[str, str]:
    """The file name of each tensor. Raises ``WeightsError``."""
    with refusals(f"the index of weights files {named(index)}", WeightsError):
        try:
            text = read_regular(index, _INDEX_BYTES_MAX, links=True)
            require_held(text)
            cursor = Cursor(text_of(text))
        except OSError as error:
            raise WeightsError(f"cannot read the index of weights files {named(index)}: {error.strerror}") from None
        found = None
        for name in cursor.members():
            with within(name):
                if name == "weight_map":
                    found = _WEIGHT_MAP.read(cursor)
                else:
                    cursor.piece()
        cursor.end()
        if found is None:
            raise Refused("it has no weight_map")
        return found
