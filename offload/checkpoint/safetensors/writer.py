"""Writes weights as safetensors, a part at a time: one file, or shards and an index as on Hugging Face.

A file is 8 bytes with the length of a header, the header (JSON: for each tensor dtype, shape, and where its bytes begin
and end), and the bytes. All of that is known before the first byte of a tensor, so parts may come in any order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload.checkpoint.publish import INDEX_SUFFIX, Unfinished, write_synced
from offload.checkpoint.tensors import Entry, Part
from offload.errors import ConfigError
from swapper import OffloadError, readable_bytes
from swapper.errors import no_room

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
_WRITTEN_BACK_BYTES = 64 << 20
"""Portion in which what was written goes to the disk, and out of the page cache."""


@dataclass
class _Shard:
    """One file. ``starts`` are byte offsets in it."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    header: bytes = b""
    nbytes: int = 0
    descriptor: int = -1
    written_bytes: int = 0

    def lay_out(self, metadata: Mapping[str, str]) -> None:
        """Widest elements first, so that each tensor is aligned for its dtype, and in order otherwise."""
        offset, offsets = 0, {}
        for entry in sorted(self.entries, key=lambda entry: -entry.dtype.itemsize):
            offsets[entry.name] = offset
            offset += entry.nbytes
        content: dict[str, object] = {"__metadata__": dict(metadata)}
        for name, dtype, shape in self.entries:
            begin = offsets[name]
            content[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, begin + math.prod(shape) * dtype.itemsize],
            }
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.starts = {name: len(self.header) + start for name, start in offsets.items()}
        self.nbytes = len(self.header) + offset


class SafetensorsWriter:
    """Files in an ``Unfinished`` folder, whose names begin with ``stem``. Used in ``with``.

    Raises ``StorageFull`` if there is no room for all of them; nothing was written then.
    """

    def __init__(
        self,
        unfinished: Unfinished,
        entries: Sequence[Entry],
        max_shard_bytes: int,
        metadata: Mapping[str, str],
        *,
        stem: str = "model",
    ) -> None:
        """``metadata`` goes into each header."""
        for entry in entries:
            if entry.dtype not in _NAMES:
                raise ConfigError(f"{entry.name} is {entry.dtype}, for which safetensors has no name")
        self.stem = stem
        self._folder = unfinished.folder
        self._entries = {entry.name: entry for entry in entries}
        self._missing = {entry.name: math.prod(entry.shape) for entry in entries}
        self._shards = _cut(entries, max_shard_bytes, stem)
        for shard in self._shards:
            shard.lay_out({"format": "pt", **metadata})
        self._shard_of = {name: shard for shard in self._shards for name in shard.starts}
        self._index = self._make_index() if len(self._shards) > 1 else b""
        unfinished.require(sum(shard.nbytes for shard in self._shards) + len(self._index))

    def __enter__(self) -> SafetensorsWriter:
        try:
            for shard in self._shards:
                shard.descriptor = os.open(
                    self._folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
                )
                _reserve(shard.descriptor, shard.nbytes, self._folder.parent)
                _write(shard.descriptor, memoryview(shard.header), 0)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, part: Part) -> None:
        """Write a part to its place. Each element comes once."""
        shard, entry = self._shard_of[part.name], self._entries[part.name]
        values = part.values.detach().reshape(-1)
        if values.dtype != entry.dtype:
            raise OffloadError(f"{part.name} was to be {entry.dtype}, and is {values.dtype}")
        if values.numel() == 0:
            return
        self._missing[part.name] -= values.numel()
        content = memoryview(values.contiguous().view(torch.uint8).numpy().data)
        _write(shard.descriptor, content, shard.starts[part.name] + part.start * entry.dtype.itemsize)
        shard.written_bytes += len(content)
        if shard.written_bytes >= _WRITTEN_BACK_BYTES:
            _send_to_disk(shard)

    def finish(self) -> None:
        """All parts have come: make sure that the disk has them, and write the index."""
        incomplete = [name for name, numel in self._missing.items() if numel]
        if incomplete:
            raise OffloadError(f"not all of {', '.join(incomplete[:3])} was there to be written")
        for shard in self._shards:
            os.fsync(shard.descriptor)
            os.posix_fadvise(shard.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if self._index:
            write_synced(self._folder / (self.stem + INDEX_SUFFIX), self._index)

    def _make_index(self) -> bytes:
        total = {
            "total_parameters": sum(math.prod(entry.shape) for entry in self._entries.values()),
            "total_size": sum(entry.nbytes for entry in self._entries.values()),
        }
        weight_map = {name: self._shard_of[name].name for name in self._entries}
        return (json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n").encode()

    def _close(self) -> None:
        for shard in self._shards:
            if shard.descriptor >= 0:
                os.close(shard.descriptor)
                shard.descriptor = -1


def _cut(entries: Iterable[Entry], max_shard_bytes: int, stem: str) -> list[_Shard]:
    """Shards of at most so many bytes, in order. A tensor that has more is a shard of its own."""
    groups: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if groups[-1] and nbytes + entry.nbytes > max_shard_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(entry)
        nbytes += entry.nbytes
    if len(groups) == 1:
        return [_Shard(f"{stem}.safetensors", groups[0])]
    return [
        _Shard(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _reserve(descriptor: int, nbytes: int, where: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        told = no_room(f"{readable_bytes(nbytes)} in {where}", error)
        told.survives = "What was there is whole, and nothing of the new files is left."
        raise told from error


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


def _send_to_disk(shard: _Shard) -> None:
    os.fdatasync(shard.descriptor)
    os.posix_fadvise(shard.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    shard.written_bytes = 0
