"""A store of which something is damaged or gone: what is whole can be read, what is not is said, nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_helpers import fill, memory

from swapper import Arena, StorageCorrupt, StoreExists, StoreMissing, create_store, open_generation, open_store
from swapper.upkeep import collect, inspect, scrub


@pytest.fixture
def lease():
    arena = Arena(4096)
    yield arena.lease(4096)
    arena.close()


@pytest.fixture
def folder(tmp_path: Path, lease) -> Path:
    """A store with generations 1, retained, and 3."""
    with create_store([tmp_path], "run", [4096], retained_max=1) as store:
        for value in (1, 2, 3):
            fill(lease, value)
            store.write(store.extents[0], lease.address, lease.nbytes).wait()
            store.commit(b"%d" % value)
            if value == 1:
                store.retain()
    return tmp_path / "run.store"


def content(store, lease) -> set[int]:
    store.read(store.extents[0], lease.address, lease.nbytes).wait()
    return set(memory(lease))


def flip(path: Path) -> None:
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)


def test_a_damaged_last_manifest_is_an_error_and_a_retained_generation_can_be_read(folder: Path, lease):
    flip(folder / f"generation.{3:016x}")
    with pytest.raises(StorageCorrupt, match=r"manifest generation.0+3 .*is damaged(.|\n)*Generations \[1\] are whole"):
        open_store([folder.parent], "run")
    with open_store([folder.parent], "run", generation=1) as store:
        assert content(store, lease) == {1}
        for change in (store.commit, store.retain, store.rewind, lambda: store.release(1)):
            with pytest.raises(StorageCorrupt, match="is only read: manifest generation"):
                change()
        with pytest.raises(StorageCorrupt, match="is only read"):
            store.write(store.extents[0], lease.address, lease.nbytes)


def test_a_damaged_retained_manifest_leaves_the_last_generation(folder: Path, lease):
    flip(folder / f"retained.{1:016x}")
    with open_store([folder.parent], "run", reserved=()) as store:
        assert (store.generation, content(store, lease), len(store.damage)) == (3, {3}, 1)
        with pytest.raises(StorageCorrupt, match="is only read: manifest retained"):
            store.commit()
    with pytest.raises(StorageCorrupt, match=r"manifest retained.0+1 .*is damaged"):
        open_store([folder.parent], "run", generation=1)


def test_a_last_generation_that_was_committed_and_is_gone_is_an_error(folder: Path, lease):
    (folder / f"generation.{3:016x}").unlink()
    lost = r"generation 3 was committed, and its manifest generation.0+3 is gone; there are \[1\]"
    with pytest.raises(StorageCorrupt, match=lost):
        open_store([folder.parent], "run")
    with pytest.raises(StorageCorrupt, match=lost):
        open_generation(folder)
    with open_store([folder.parent], "run", generation=1) as store:
        assert content(store, lease) == {1}
    assert "generation 3 was committed" in inspect([folder.parent])[0]["damage"][0]
    [found] = scrub([folder.parent])
    assert found["generations"] == 1 and "generation 3 was committed" in found["damage"][0]
    (folder / f"retained.{1:016x}").unlink()
    with pytest.raises(StorageCorrupt, match=r"generation 3 was committed, and its manifest generation.0+3 is gone\."):
        open_store([folder.parent], "run")
    with pytest.raises(StoreExists):
        create_store([folder.parent], "run", [4096])
    assert collect([folder.parent])[0]["removed"] == []


def test_a_store_whose_creation_never_ended_is_still_none(folder: Path):
    for entry in folder.iterdir():
        if entry.name != "data.0":
            entry.unlink()
    with pytest.raises(StoreMissing, match="never finished"):
        open_store([folder.parent], "run")
