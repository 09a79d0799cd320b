import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from swapper import PAGE_BYTES, StorageCorrupt, StoreMisuse
from swapper.manifest import MANIFEST_BYTES_MAX, Entry, Manifest

ENTRIES = st.builds(
    Entry,
    nbytes=st.integers(0, 1 << 20).map(lambda pages: pages * PAGE_BYTES),
    generation=st.integers(0, 5),
    copy=st.integers(0, 2),
    checksum=st.integers(0, (1 << 64) - 1),
)
MANIFESTS = st.builds(
    Manifest,
    store=st.binary(min_size=16, max_size=16),
    generation=st.integers(5, (1 << 63) - 1),
    num_copies=st.integers(3, 1024),
    num_paths=st.integers(2, 64),
    entries=st.lists(ENTRIES, max_size=20).map(tuple),
    chunks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, (1 << 32) - 1)), max_size=20, unique=True).map(tuple),
    metadata=st.binary(max_size=2000),
)


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


@given(MANIFESTS)
def test_what_was_encoded_is_decoded(manifest: Manifest):
    assert Manifest.decode(manifest.encode()) == manifest


@given(MANIFESTS, st.data())
def test_any_change_is_refused(manifest: Manifest, data):
    good = manifest.encode()
    position = data.draw(st.integers(0, len(good) - 1))
    wrong = bytearray(good)
    wrong[position] ^= data.draw(st.integers(1, 255))
    for spoilt in (bytes(wrong), good[:position], good + b"\0"):
        with pytest.raises(StorageCorrupt, match="is damaged"):
            Manifest.decode(spoilt)


@given(MANIFESTS, st.data())
def test_with_a_good_checksum_only_what_encode_would_give_is_taken(manifest: Manifest, data):
    """A checksum can be made by anybody: what follows it must be checked all the same."""
    body = bytearray(manifest.encode()[:-16])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(8, len(body) - 1))] = data.draw(st.integers(0, 255))
    spoilt = sealed(bytes(body))
    try:
        decoded = Manifest.decode(spoilt)
    except StorageCorrupt:
        return
    assert decoded.encode() == spoilt


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes):
    with pytest.raises(StorageCorrupt, match="is damaged"):
        Manifest.decode(noise)
    with pytest.raises(StorageCorrupt, match="is damaged"):
        Manifest.decode(sealed(b"OFLDSTOR" + noise))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entries": (Entry(100, 0, 0, 0),)}, "no whole pages"),
        ({"entries": (Entry(PAGE_BYTES, 8, 0, 0),)}, "generation of an extent: 8 is not between 0 and 7"),
        ({"entries": (Entry(PAGE_BYTES, 1, 2, 0),)}, "copy of an extent: 2 is not between 0 and 1"),
        ({"entries": (Entry(1 << 45, 0, 0, 0),)}, "bytes of an extent"),
        ({"entries": (Entry(1 << 44, 0, 0, 0),) * 40_000}, "bytes of the store"),
        ({"num_copies": 1}, "copies: 1 is not between 2 and 1024"),
        ({"num_paths": 0}, "paths: 0 is not between 1 and 64"),
        ({"chunks": ((0, 1), (0, 1))}, "two chunks rest in one place"),
        ({"chunks": ((1, 0),)}, "path of a chunk: 1 is not between 0 and 0"),
        ({"metadata": bytes((64 << 20) + 1)}, "bytes of metadata"),
        ({"generation": 1 << 63}, "generation: 9223372036854775808 is not between"),
    ],
)
def test_impossible_numbers_are_refused_both_ways(monkeypatch, change, message):
    manifest = Manifest(
        **{"store": bytes(16), "generation": 7, "num_copies": 2, "num_paths": 1, "entries": (), **change}
    )
    with pytest.raises(StoreMisuse, match=message):
        manifest.encode()
    monkeypatch.setattr(Manifest, "_check", lambda self, nbytes: None)
    data = manifest.encode()
    monkeypatch.undo()
    with pytest.raises(StorageCorrupt, match=message):
        Manifest.decode(data)


@pytest.mark.parametrize("field", [40, 48, 52])  # extents, chunks, metadata
def test_a_number_that_promises_more_than_there_is_costs_no_memory(field: int):
    body = bytearray(Manifest(bytes(16), 7, 2, 1, ()).encode()[:-16])
    struct.pack_into("<I", body, field, 0xFFFFFFFF)
    spoilt = sealed(bytes(body))
    tracemalloc.start()
    with pytest.raises(StorageCorrupt, match="it should have"):
        Manifest.decode(spoilt)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_file_that_is_too_large_is_not_even_looked_at():
    class Huge(bytes):
        def __len__(self) -> int:
            return MANIFEST_BYTES_MAX + 1

    with pytest.raises(StorageCorrupt, match="its size is impossible"):
        Manifest.decode(Huge())
