"""The manifest: what a generation of a durable store consists of, as bytes. The layout is in ``docs/store-format.md``.

Nothing in a manifest is trusted before its checksum and every bound have been checked, and no more memory is taken than
a small multiple of its size. A checksum is no signature: it finds damage, not forgery.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from swapper.arena import PAGE_BYTES
from swapper.checked import Refused, refusals
from swapper.errors import StorageCorrupt, StoreMisuse

MANIFEST_BYTES_MAX = 256 << 20
METADATA_BYTES_MAX = 64 << 20
EXTENTS_MAX = 1 << 22
CHUNKS_MAX = 1 << 22
COPIES_MAX = 1 << 10
PATHS_MAX = 64
EXTENT_BYTES_MAX = 1 << 44
STORE_BYTES_MAX = 1 << 60

_MAGIC = b"OFLDSTOR"
_VERSION = 1
_HEADER = struct.Struct("<8sII16sQIIIIQ")
_EXTENT = struct.Struct("<QQIIQ")
_CHUNK = struct.Struct("<II")
_TRAILER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of one extent: where its bytes rest, and how to know them. ``generation`` 0: it was never written, or is no
    part of any generation. ``places`` is how many the extent has, ``copy`` which of them it is; 0 stands for the
    store's ``num_copies``."""

    nbytes: int
    generation: int
    copy: int
    checksum: int
    places: int = 0


@dataclass(frozen=True)
class Manifest:
    """One generation of a store. ``chunks`` are path and slot of each chunk of a store on several paths."""

    store: bytes
    generation: int
    num_copies: int
    num_paths: int
    entries: tuple[Entry, ...]
    chunks: tuple[tuple[int, int], ...] = ()
    metadata: bytes = b""

    def places(self, entry: Entry) -> int:
        """Number of places that the extent of this entry has."""
        return entry.places or self.num_copies

    def encode(self) -> bytes:
        """The manifest as bytes. Raises ``StoreMisuse`` for what a reader would refuse."""
        nbytes = _HEADER.size + len(self.entries) * _EXTENT.size + len(self.chunks) * _CHUNK.size
        nbytes += len(self.metadata) + _TRAILER_BYTES
        header = _HEADER.pack(
            _MAGIC, _VERSION, self.num_paths, self.store, self.generation,
            len(self.entries), self.num_copies, len(self.chunks), len(self.metadata), nbytes,
        )  # fmt: skip
        parts = [header]
        parts += [_EXTENT.pack(r.nbytes, r.generation, r.copy, r.places, r.checksum) for r in self.entries]
        parts += [_CHUNK.pack(*chunk) for chunk in self.chunks]
        parts.append(self.metadata)
        body = b"".join(parts)
        try:
            self._check(nbytes)
        except Refused as error:
            raise StoreMisuse(f"generation {self.generation} cannot be described: {error}.") from None
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def decode(cls, data: bytes, name: str = "manifest") -> Manifest:
        """The manifest that ``data`` holds. Raises ``StorageCorrupt`` for anything that is not exactly one."""
        with refusals(f"{name} ({len(data):,} bytes)", StorageCorrupt):
            return cls._decode(data)

    @classmethod
    def _decode(cls, data: bytes) -> Manifest:
        if not _HEADER.size + _TRAILER_BYTES <= len(data) <= MANIFEST_BYTES_MAX:
            raise Refused("its size is impossible")
        magic, version, num_paths, store, generation, num_extents, num_copies, num_chunks, num_metadata, nbytes = (
            _HEADER.unpack_from(data)
        )
        if magic != _MAGIC:
            raise Refused("it does not begin as one")
        if version != _VERSION:
            raise Refused(f"its version is {version}, this program knows {_VERSION}")
        chunks_begin = _HEADER.size + num_extents * _EXTENT.size
        metadata_begin = chunks_begin + num_chunks * _CHUNK.size
        end = metadata_begin + num_metadata
        if nbytes != len(data) or end + _TRAILER_BYTES != nbytes:
            raise Refused(f"it should have {nbytes} bytes")
        if xxhash.xxh3_128_digest(memoryview(data)[:end]) != data[end:]:
            raise Refused("its checksum is wrong")
        whole = memoryview(data)
        entries = tuple(
            Entry(extent_bytes, written, copy, checksum, places)
            for extent_bytes, written, copy, places, checksum in _EXTENT.iter_unpack(whole[_HEADER.size : chunks_begin])
        )
        chunks = tuple(_CHUNK.iter_unpack(whole[chunks_begin:metadata_begin]))
        manifest = cls(store, generation, num_copies, num_paths, entries, chunks, data[metadata_begin:end])
        manifest._check(nbytes)
        return manifest

    def _check(self, nbytes: int) -> None:
        """Raise ``Refused`` unless every number is possible."""
        _between("bytes", nbytes, _HEADER.size + _TRAILER_BYTES, MANIFEST_BYTES_MAX)
        _between("extents", len(self.entries), 0, EXTENTS_MAX)
        _between("copies", self.num_copies, 2, COPIES_MAX)
        _between("paths", self.num_paths, 1, PATHS_MAX)
        _between("chunks", len(self.chunks), 0, CHUNKS_MAX)
        _between("bytes of metadata", len(self.metadata), 0, METADATA_BYTES_MAX)
        _between("generation", self.generation, 0, (1 << 63) - 1)
        total = 0
        for entry in self.entries:
            _between("bytes of an extent", entry.nbytes, 0, EXTENT_BYTES_MAX)
            _between("generation of an extent", entry.generation, 0, self.generation)
            _between("places of an extent", entry.places, 0, self.num_copies)
            _between("copy of an extent", entry.copy, 0, self.places(entry) - 1)
            if entry.nbytes % PAGE_BYTES:
                raise Refused(f"an extent has {entry.nbytes} bytes, no whole pages")
            total += entry.nbytes * self.places(entry)
        _between("bytes of the store", total, 0, STORE_BYTES_MAX)
        if len(set(self.chunks)) != len(self.chunks):
            raise Refused("two chunks rest in one place")
        if self.chunks:
            _between("path of a chunk", max(path for path, _ in self.chunks), 0, self.num_paths - 1)


def _between(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Refused(f"{value} is not between {low} and {high}", what)
