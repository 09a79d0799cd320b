"""A kept generation is copied part by part, while the store goes on, and what is wrong is found on the way."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from swapper import (
    PAGE_BYTES,
    Arena,
    StorageCorrupt,
    StorageFull,
    StorageIOError,
    StoreMissing,
    copy_generation,
    create_store,
    open_generation,
)

LARGE = (5 << 20) + PAGE_BYTES
SIZES = [PAGE_BYTES, LARGE, 2 * PAGE_BYTES, PAGE_BYTES, 2 << 20]
PLACES = [1, 1, 0, 1, 2]
"""The third extent is scratch; the fourth is never written."""


@pytest.fixture
def lease():
    arena = Arena(LARGE)
    yield arena.lease(arena.nbytes)
    arena.close()


@pytest.fixture
def store(tmp_path: Path, lease):
    """The generation that is kept has the values 10, 11, and 14; what is current is others."""
    (tmp_path / "copy").mkdir()
    with create_store([tmp_path], "run", SIZES, places=PLACES, retained_max=1) as store:
        for value in (10, 20):
            for index in (0, 1, 2, 4):
                put(store, index, value + index, lease)
            store.commit(b"of %d" % value)
            if value == 10:
                store.retain()
        put(store, 0, 99, lease)
        yield store


def put(store, index: int, value: int, lease) -> None:
    extent = store.extents[index]
    for at in range(0, extent.nbytes, PAGE_BYTES):  # pages differ: one in the place of another is found
        ctypes.memset(lease.address + at, (value + at // PAGE_BYTES) % 251, PAGE_BYTES)
    store.write(extent, lease.address, extent.nbytes).wait()


def pages(address: int, nbytes: int) -> list[int]:
    return [ctypes.string_at(address + at, 1)[0] for at in range(0, nbytes, PAGE_BYTES)]


def damage(store, index: int) -> None:
    """Change a byte of what the retained generation has of an extent, behind the store's back."""
    entry = store.manifest_of(1).entries[index]
    offset = store._places.records[index].offset_of(entry.copy) + entry.nbytes // 2
    with Path(f"/proc/self/fd/{store._transfers.device.descriptors[0]}").open("r+b") as file:
        file.seek(offset)
        file.write(b"?")


def test_it_is_copied_as_it_was_committed_in_small_parts(store, tmp_path: Path, lease):
    parts: list[int] = []
    copy_generation(store, 1, tmp_path / "copy", parts.append)
    assert sum(parts) == SIZES[0] + SIZES[1] + SIZES[4]
    assert max(parts) == 2 << 20
    assert (tmp_path / "copy" / "data.0").stat().st_size == sum(parts)
    with open_generation(tmp_path / "copy") as copy:
        assert (copy.generation, copy.metadata) == (1, b"of 10")
        assert [copy.holds(extent) for extent in copy.extents] == [True, True, False, False, True]
        for index in (0, 1, 4):
            extent = copy.extents[index]
            assert extent.nbytes == SIZES[index]
            copy.read(extent, lease.address, extent.nbytes).wait()
            expected = [(10 + index + page) % 251 for page in range(extent.nbytes // PAGE_BYTES)]
            assert pages(lease.address, extent.nbytes) == expected


def test_damage_is_found_on_the_way_and_what_is_there_is_no_generation(store, tmp_path: Path):
    damage(store, 1)
    with pytest.raises(StorageCorrupt, match="extent 1, generation 1, came back wrong, twice"):
        copy_generation(store, 1, tmp_path / "copy", lambda nbytes: None)
    with pytest.raises(StoreMissing, match="never finished"):
        open_generation(tmp_path / "copy")


def fails_once(monkeypatch, name: str) -> list[object]:
    """The first call of ``os.NAME`` fails. Returns what is called."""
    real, calls = getattr(os, name), []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return calls


def test_a_write_that_fails_once_is_done_again(store, tmp_path: Path, monkeypatch):
    calls = fails_once(monkeypatch, "pwrite")
    copy_generation(store, 1, tmp_path / "copy", lambda nbytes: None)
    assert len(calls) == 6
    open_generation(tmp_path / "copy").close()


def test_a_sync_that_fails_is_not_repeated(store, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("swapper.copying._SYNC_BYTES", 4 << 20)
    calls = fails_once(monkeypatch, "fdatasync")
    with pytest.raises(StorageIOError, match=r"sync of the copy failed: \[Errno 5\]"):
        copy_generation(store, 1, tmp_path / "copy", lambda nbytes: None)
    assert len(calls) == 1
    with pytest.raises(StoreMissing, match="never finished"):
        open_generation(tmp_path / "copy")


def test_the_room_is_asked_for_before_anything_is_written(store, tmp_path: Path, monkeypatch):
    real = os.fstatvfs

    def nearly_full(descriptor):
        found = list(real(descriptor))
        found[1], found[4] = 1, sum(SIZES[i] for i in (0, 1, 4)) - 1
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    with pytest.raises(StorageFull, match=r"7,348,224 bytes .* are needed, 7,348,223 bytes .* are free"):
        copy_generation(store, 1, tmp_path / "copy", lambda nbytes: None)
    assert list((tmp_path / "copy").iterdir()) == []
