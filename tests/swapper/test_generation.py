"""Generations that are linked elsewhere, stores without a name, and space that is taken when it is needed."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from swapper import (
    PAGE_BYTES,
    Arena,
    StorageCorrupt,
    StorageFull,
    StoreLocked,
    StoreMissing,
    StoreMisuse,
    create_store,
    open_generation,
    open_store,
    remove_store,
)
from swapper.links import Links

SIZES = [2 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES]


@pytest.fixture
def lease():
    arena = Arena(4 * PAGE_BYTES)
    yield arena.lease(arena.nbytes)
    arena.close()


def fill(lease, value: int, nbytes: int) -> int:
    ctypes.memset(lease.address, value, nbytes)
    return lease.address


def put(store, index: int, value: int, lease, *, beside: bool = False) -> None:
    extent = store.extents[index]
    write = store.write_shadow if beside else store.write
    write(extent, fill(lease, value, extent.nbytes), extent.nbytes).wait()


def get(store, index: int, lease) -> set[int]:
    extent = store.extents[index]
    store.read(extent, fill(lease, 255, extent.nbytes), extent.nbytes).wait()
    return set(ctypes.string_at(lease.address, extent.nbytes))


def linked(store, folder: Path) -> Path:
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    store.link(descriptor, folder.parent)
    os.close(descriptor)
    return folder


def uses(path: Path, nbytes: int) -> bool:
    """The file takes so much of the disk. A file system may need a page more to say where a file with holes lies."""
    return 0 <= path.stat().st_blocks * 512 - nbytes <= PAGE_BYTES


@pytest.mark.parametrize("name", [None, "run"])
def test_a_linked_generation_stays_as_it_was_while_the_store_goes_on(tmp_path: Path, lease, name):
    with create_store([tmp_path], name, SIZES, places=2, retained_max=2, reserved=[2, 2, 2]) as store:
        for index in range(3):
            put(store, index, index + 1, lease)
        store.commit(b"one")
        store.retain()
        folder = linked(store, tmp_path / "checkpoint")
        for step in range(4):
            for index in range(3):
                put(store, index, 10 * (step + 1) + index, lease, beside=step % 2 == 0)
                if step % 2 == 0:
                    store.flip(store.extents[index])
        with open_generation(folder) as generation:  # while the store is open and locked
            assert generation.metadata == b"one"
            assert [get(generation, index, lease) for index in range(3)] == [{1}, {2}, {3}]
        assert [get(store, index, lease) for index in range(3)] == [{40}, {41}, {42}]
    with open_generation(folder) as generation:  # after its end
        assert [get(generation, index, lease) for index in range(3)] == [{1}, {2}, {3}]


def test_a_store_without_a_name_leaves_nothing_but_what_was_linked(tmp_path: Path, lease):
    with create_store([tmp_path], None, SIZES) as store:
        put(store, 0, 1, lease)
        store.commit()
    assert list(tmp_path.iterdir()) == []
    with create_store([tmp_path], None, SIZES, places=2, retained_max=1) as store:
        put(store, 0, 1, lease)
        store.commit(b"kept")
        store.retain()
        folder = linked(store, tmp_path / "checkpoint")
        assert uses(folder / "data.0", 4 * sum(SIZES))
        store.give_back()
        assert uses(folder / "data.0", SIZES[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    with open_generation(folder) as generation:
        assert get(generation, 0, lease) == {1}
        assert generation.holds(generation.extents[0]) and not generation.holds(generation.extents[1])
        with pytest.raises(StoreMisuse, match="extent 1 is no part of generation 1"):
            get(generation, 1, lease)


def test_space_is_taken_when_it_is_needed(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=[2, 0, 1], retained_max=5, reserved=[2, 1, 0]) as store:
        data = tmp_path / "run.store" / "data.0"
        assert store.shape == [(SIZES[0], 8), (SIZES[1], 1), (SIZES[2], 7)]
        assert uses(data, 2 * SIZES[0] + SIZES[1])
        put(store, 2, 7, lease)
        assert uses(data, 2 * SIZES[0] + SIZES[1] + SIZES[2])
        store.reserve([3, 1, 2])
        assert uses(data, 3 * SIZES[0] + SIZES[1] + 2 * SIZES[2])
        with pytest.raises(StorageFull, match="more are needed"):
            huge = create_store([tmp_path], None, [1 << 50], reserved=[1])
            huge.close()


def test_what_a_store_has_already_needs_no_room(tmp_path: Path, lease, monkeypatch):
    with create_store([tmp_path], "run", SIZES, places=2, reserved=[3, 3, 3]) as store:
        put(store, 0, 1, lease)
        store.commit()
    real = os.fstatvfs

    def full(descriptor):
        found = list(real(descriptor))
        found[4] = 0  # blocks for us
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", full)
    with open_store([tmp_path], "run", reserved=()) as store:
        store.reserve([3, 3, 3])
        assert get(store, 0, lease) == {1}
    with (
        create_store([tmp_path], "other", [0]) as store,
        pytest.raises(StorageFull, match=r"huge\.store: too little room"),
    ):
        store.reserve([1])
        huge = create_store([tmp_path], "huge", [1 << 20], reserved=[1])
        huge.close()


def test_a_scratch_extent_is_written_over_and_is_in_no_generation(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=[1, 0, 1]) as store:
        for value in (1, 2, 3):
            put(store, 1, value, lease)
        assert get(store, 1, lease) == {3}
        with pytest.raises(StoreMisuse, match=r"extent 1 has one place(.|\n)*places=2"):
            put(store, 1, 4, lease, beside=True)
        store.commit()
    with open_store([tmp_path], "run") as store, pytest.raises(StoreMisuse, match="extent 1 was never written"):
        get(store, 1, lease)


def test_rewind_gives_up_what_was_not_committed_and_kept_generations_can_be_read(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2, retained_max=1) as store:
        for index in range(3):
            put(store, index, 1, lease)
        first = store.commit()
        store.retain()
        put(store, 0, 2, lease)
        store.commit()
        put(store, 0, 3, lease)
        put(store, 1, 3, lease, beside=True)
        extent = store.extents[0]
        half = extent.nbytes // 2
        store.read_part(first, extent, half, lease.address, half).wait()
        assert set(ctypes.string_at(lease.address, half)) == {1}
        with pytest.raises(StoreMissing, match="generation 9 is not kept"):
            store.read_part(9, extent, 0, lease.address, half)
        store.rewind()
        assert [get(store, index, lease) for index in range(3)] == [{2}, {1}, {1}]
        with pytest.raises(StoreMisuse, match="nothing was written beside"):
            store.flip(store.extents[1])


def test_a_store_is_removed_unless_it_is_open(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, retained_max=1) as store:
        put(store, 0, 1, lease)
        store.commit()
        store.retain()
        folder = linked(store, tmp_path / "checkpoint")
        with pytest.raises(StoreLocked):
            remove_store([tmp_path], "run")
    remove_store([tmp_path], "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    with open_generation(folder) as generation:
        assert get(generation, 0, lease) == {1}
    with pytest.raises(StoreMissing):
        remove_store([tmp_path], "run")


def test_what_is_not_a_whole_generation_is_refused(tmp_path: Path, lease):
    with pytest.raises(StoreMissing, match="there is no checkpoint"):
        open_generation(tmp_path / "nothing")
    with pytest.raises(StoreMissing, match="holds no generation"):
        open_generation(tmp_path)
    with create_store([tmp_path], None, SIZES, retained_max=1) as store:
        put(store, 0, 1, lease)
        store.commit()
        store.retain()
        folder = linked(store, tmp_path / "checkpoint")
    (name,) = [entry.name for entry in folder.iterdir() if entry.name != "data.0"]
    manifest = (folder / name).read_bytes()
    (folder / name).write_bytes(manifest[:100] + bytes([manifest[100] ^ 1]) + manifest[101:])
    with pytest.raises(StorageCorrupt, match="damaged"):
        open_generation(folder)
    (folder / name).write_bytes(manifest)
    with (folder / "data.0").open("r+b") as file:
        file.seek(5)
        file.write(b"?")
    with open_generation(folder) as generation, pytest.raises(StorageCorrupt, match="gave wrong bytes"):
        get(generation, 0, lease)
    os.truncate(folder / "data.0", 100)
    with pytest.raises(StorageCorrupt, match="its data has 100 bytes"):
        open_generation(folder)
    (folder / "data.0").unlink()
    with pytest.raises(StorageCorrupt, match=r"data\.0 is missing"):
        open_generation(folder)


def _moved(saved: Path) -> Path:
    return (saved / "best").rename(saved / "keep_me")


def _moved_away(saved: Path) -> Path:
    return (saved / "best").rename(saved.parent / "elsewhere")


def _parent_moved(saved: Path) -> Path:
    return saved.rename(saved.parent / "archive") / "best"


def _linked_once_more(saved: Path) -> Path:
    shutil.copytree(saved / "best", saved.parent / "backup", copy_function=os.link)
    shutil.rmtree(saved / "best")
    return saved.parent / "backup"


@pytest.mark.parametrize("act", [_moved, _moved_away, _parent_moved, _linked_once_more])
@pytest.mark.parametrize("name", [None, "run"])
def test_a_linked_generation_stays_whole_wherever_it_is_moved_to(tmp_path: Path, lease, name, act):
    saved = tmp_path / "saved"
    saved.mkdir()
    with create_store([tmp_path], name, SIZES[:1], places=2, retained_max=1) as store:
        put(store, 0, 1, lease)
        store.commit(b"one")
        store.retain()
        linked(store, saved / "best")
        kept = act(saved)
        store.release_unlinked()
        assert store.retained == (1,)
        for value in range(2, 7):
            put(store, 0, value, lease)
            store.commit()
        with open_generation(kept) as generation:
            assert get(generation, 0, lease) == {1}
        shutil.rmtree(kept)
        store.release_unlinked()
        assert store.retained == ()


def test_one_name_of_the_data_that_is_not_accounted_for_keeps_every_generation(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES[:1], retained_max=2) as store:
        for value in (1, 2):
            put(store, 0, value, lease)
            store.commit()
            store.retain()
            linked(store, tmp_path / f"step{value}")
        assert store.links() == Links(frozenset({1, 2}), 0)
        os.link(tmp_path / "step1" / "data.0", tmp_path / "a name of the user's own")
        shutil.rmtree(tmp_path / "step1")
        assert store.links() == Links(frozenset({2}), 1)
        store.release_unlinked()
        assert store.retained == (1, 2)
    with open_store([tmp_path], "run") as store:  # the next owner knows where to look
        assert store.links() == Links(frozenset({2}), 1)
        (tmp_path / "a name of the user's own").unlink()
        store.release_unlinked()
        assert store.retained == (2,)


def test_a_copy_of_a_store_by_hard_links_is_not_taken_for_a_checkpoint(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES[:1], retained_max=1) as store:
        put(store, 0, 1, lease)
        store.commit()
        store.retain()
        linked(store, tmp_path / "step1")
    shutil.copytree(tmp_path / "run.store", tmp_path / "backup.store", copy_function=os.link)
    with open_store([tmp_path], "run") as store:
        assert store.links() == Links(frozenset({1}), 1)
    with open_store([tmp_path], "backup") as store:
        assert get(store, 0, lease) == {1}
