"""Weights files in the safetensors format: one file, or an index of shards, as on Hugging Face.

A file is 8 bytes with the length of a header, the header (JSON: for each tensor dtype, shape, and where its bytes begin
and end), and the bytes. They are read, not mapped: what is mapped counts as memory of the process until it is dropped.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import WeightsError
from offload.memory import passing_tensor

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
_READ_BYTES = 16 << 20


class WeightsFile:
    """One file, held open: another one put in its place later is not read."""

    def __init__(self, path: Path) -> None:
        """Raises ``WeightsError`` if the file is not there or is damaged, as far as its header and length tell."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(f"cannot open the weights file {path}: {error.strerror}") from None
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)

    def read_into(self, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, contiguous and in host memory, with the file's bytes from ``start`` on.

        Raises ``WeightsError`` if the disk does not give them. They do not stay in the page cache.
        """
        memory = memoryview(target.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._fd, [memory[done:]], start + done)
            except OSError as error:
                raise self._error(f"cannot be read at byte {start + done}: {error.strerror}") from None
            if count == 0:
                raise self._error(f"has no byte {start + done} any more: it was cut off while it was read")
            done += count
        os.posix_fadvise(self._fd, start, len(memory), os.POSIX_FADV_DONTNEED)

    def _read_header(self) -> dict[str, StoredTensor]:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._error("is not a file")
        if status.st_size < 8:
            raise self._error(f"has {status.st_size} bytes: that is no safetensors file")
        length = int.from_bytes(self._read_bytes(0, 8), "little")
        if length > min(_HEADER_BYTES_MAX, status.st_size - 8):
            raise self._error(
                f"is damaged, cut off, or no safetensors file: its header would have {length} bytes, and the file has "
                f"{status.st_size}"
            )
        try:
            header = json.loads(self._read_bytes(8, length))
            header.pop("__metadata__", None)
            tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._error(f"is damaged, or no safetensors file: its header cannot be read ({error})") from None
        end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=8 + length)
        if end != 8 + length + sum(tensor.nbytes for tensor in tensors.values()):
            raise self._error("is damaged: its tensors overlap, or leave bytes out")
        if end != status.st_size:
            raise self._error(f"is damaged or cut off: it should have {end} bytes, and has {status.st_size}")
        return tensors

    def _tensor(self, name: str, entry: dict[str, Any], base: int) -> StoredTensor:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name} has dtype {entry['dtype']}, which torch has no name for")
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        start, end = entry["data_offsets"]
        if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} has {end - start} bytes, which is not its shape")
        return StoredTensor(self, name, dtype, shape, base + start)

    def _read_bytes(self, start: int, count: int) -> bytes:
        target = torch.empty(count, dtype=torch.uint8)
        self.read_into(start, target)
        return target.numpy().tobytes()

    def _error(self, what: str) -> WeightsError:
        return WeightsError(f"the weights file {self.path} {what}")


@dataclass(frozen=True, eq=False)
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


class Weights:
    """The tensors of one file, or of all shards of an index."""

    def __init__(self, path: Path) -> None:
        """``path`` is a ``.safetensors`` file, an index of shards, or a directory with one of the two under the names
        that Hugging Face gives them. Raises ``WeightsError``."""
        self.path = path
        self._files: list[WeightsFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        index = _index_of(path)
        file_names = {} if index is None else _weight_map(index)
        try:
            for file in [_only_file(path)] if index is None else _shards(index, file_names):
                self._files.append(WeightsFile(file))
                for name, tensor in self._files[-1].tensors.items():
                    if name in self.tensors:
                        raise WeightsError(f"{name} is in two weights files: {self.tensors[name].file.path} and {file}")
                    self.tensors[name] = tensor
            for name, file_name in file_names.items():
                if name not in self.tensors:
                    raise WeightsError(f"{index} names {name} in {file_name}, and the file does not have it")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []


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
    try:
        found = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file_name) for name, file_name in found.items()}
    except OSError as error:
        raise WeightsError(f"cannot read the index of weights files {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{index} is damaged, or no index of safetensors files: it has no weight_map") from None
    for file_name in names.values():
        if Path(file_name).name != file_name:
            raise WeightsError(f"{index} names a weights file outside of its directory: {file_name}")
    return names
