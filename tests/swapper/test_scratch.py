"""Scratch space: ranges that are taken and given back, in files that nobody sees."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from swapper import PAGE_BYTES, Arena, Ranges, StorageCorrupt, StorageFull, open_scratch

PAGE = PAGE_BYTES


def test_ranges_are_taken_from_the_front_and_join_when_they_are_given_back():
    ranges = Ranges(4 * PAGE)
    assert [ranges.take(PAGE), ranges.take(1), ranges.take(2 * PAGE), ranges.take(1)] == [0, PAGE, 2 * PAGE, None]
    ranges.give_back(0, PAGE)
    ranges.give_back(2 * PAGE, 2 * PAGE)
    assert ranges.take(3 * PAGE) is None  # three are free, in two pieces
    ranges.give_back(PAGE, 1)
    assert ranges.taken_bytes == 0
    assert ranges.take(4 * PAGE) == 0


@pytest.fixture
def arena():
    arena = Arena(4 * PAGE)
    yield arena
    arena.close()


def fill(address: int, letter: bytes) -> None:
    ctypes.memset(address, letter[0], PAGE)


def seen(address: int) -> bytes:
    content = set(ctypes.string_at(address, PAGE))
    assert len(content) == 1
    return bytes(content)


def test_what_was_written_comes_back_and_its_place_is_used_again(tmp_path: Path, arena: Arena):
    scratch = open_scratch([tmp_path], 4 * PAGE, backend="threads")
    scratch.register(arena)
    first, second = scratch.take(PAGE), scratch.take(PAGE)
    for place, letter in ((first, b"a"), (second, b"b")):
        fill(arena.address, letter)
        scratch.write(place, arena.address).wait()
    scratch.read(first, arena.address + PAGE).wait()
    scratch.read(second, arena.address + 2 * PAGE, urgent=True).wait()
    assert (seen(arena.address + PAGE), seen(arena.address + 2 * PAGE)) == (b"a", b"b")
    scratch.give_back(first)
    assert scratch.take(PAGE).offset == first.offset
    assert list(tmp_path.iterdir()) == []
    (moved,) = scratch.statistics_by_path()
    assert (moved.read.bytes, moved.write.bytes) == (2 * PAGE, 2 * PAGE)
    scratch.close()


def test_old_bytes_at_a_place_that_was_given_to_another_are_no_bytes_of_the_new_one(tmp_path: Path, arena: Arena):
    scratch = open_scratch([tmp_path], 4 * PAGE, backend="threads")
    old = scratch.take(PAGE)
    fill(arena.address, b"a")
    scratch.write(old, arena.address).wait()
    scratch.give_back(old)
    new = scratch.take(PAGE)
    new.checksum.value = old.checksum.value  # its write was lost
    with pytest.raises(StorageCorrupt, match="wrong bytes, twice"):
        scratch.read(new, arena.address).wait()
    scratch.close()


def test_it_is_full_when_its_bytes_are_taken_and_two_paths_share_them(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    scratch = open_scratch(paths, 4 * PAGE, backend="threads")
    assert [scratch.take(PAGE).file for _ in range(4)] == [0, 1, 0, 1]
    with pytest.raises(StorageFull, match="used up"):
        scratch.take(PAGE)
    scratch.close()
    assert [*paths[0].iterdir()] == []
