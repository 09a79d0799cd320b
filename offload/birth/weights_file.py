"""Files of weights, and the tensors in them. They are read, not mapped: what is mapped counts as memory of the process
until it is dropped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.errors import WeightsError
from offload.memory import passing_tensor
from swapper import FilePart, ReadOnlyFile
from swapper.checked import Refused, open_regular, refusals
from swapper.files import named

_READ_BYTES = 16 << 20


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

    def _read_header(self, nbytes: int) -> tuple[Mapping[str, StoredTensor], int]:
        """The tensors of a file of so many bytes, and a checksum of what is said of them. May raise ``Refused``."""
        raise NotImplementedError

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

    def content(self, start: int, count: int) -> bytes:
        """So many bytes from ``start`` on. Raises as ``read_into``."""
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

    def viewed(self, dtype: torch.dtype, shape: torch.Size) -> StoredTensor:
        """The same bytes as numbers of ``dtype``."""
        return StoredTensor(self.file, self.name, dtype, shape, self.start)

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

    def viewed(self, dtype: torch.dtype, shape: torch.Size) -> StackedTensor:
        """The same bytes as numbers of ``dtype``."""
        one = torch.Size((math.prod(shape) // sum(map(len, self.grid)),))
        grid = [[tensor.viewed(dtype, one) for tensor in row] for row in self.grid]
        return StackedTensor(self.name, grid, shape)

    def in_files(self, offset: int) -> Iterator[FilePart]:
        """See ``StoredTensor.in_files``."""
        for row in self.grid:
            for tensor in row:
                yield from tensor.in_files(offset)
                offset += tensor.nbytes
