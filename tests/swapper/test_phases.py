"""A commit in two phases: what is prepared waits beside the last generation until it is finished or abandoned."""

import errno
from pathlib import Path

import pytest
from store_helpers import fill, memory
from store_ram_disk import Fault, FaultPlan, RamDevice, RamDirectory, RamDisk

from swapper import (
    PAGE_BYTES,
    Arena,
    DurableStore,
    OffloadError,
    StorageCorrupt,
    StorageFull,
    StorageIOError,
    StoreMisuse,
    create_store,
    open_store,
)
from swapper.manifest import Entry, Manifest
from swapper.opening import begin, take_up
from swapper.upkeep import collect, inspect

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES]


@pytest.fixture
def lease():
    arena = Arena(4 * PAGE_BYTES)
    yield arena.lease(3 * PAGE_BYTES)
    arena.close()


def put(store: DurableStore, index: int, value: int, lease, *, beside: bool = False) -> None:
    fill(lease, value)
    extent = store.extents[index]
    (store.write_shadow if beside else store.write)(extent, lease.address, extent.nbytes).wait()


def get(store: DurableStore, index: int, lease) -> set[int]:
    extent = store.extents[index]
    fill(lease, 0xEE)
    store.read(extent, lease.address, extent.nbytes).wait()
    return set(memory(lease)[: extent.nbytes])


def values(store: DurableStore, lease) -> list[set[int]]:
    return [get(store, index, lease) for index in range(len(store.extents))]


_KINDS = ("generation", "retained", "prepared")


def manifests(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "run.store").iterdir() if entry.stem in _KINDS)


class Ram:
    """A disk in memory, whose plan strikes after the creation of the store: 1 is committed, 2 is written."""

    def __init__(self, lease) -> None:
        self.disk = RamDisk(bytearray(8 * PAGE_BYTES))
        self.plan = FaultPlan()
        empty = Manifest(b"s" * 16, 0, 2, 1, tuple(Entry(size, 0, 0, 0) for size in SIZES))
        directory, device = RamDirectory(self.disk), RamDevice(self.disk)
        self.store = begin(directory, lambda _: device, empty, "ram")
        for value in (1, 2):
            for index in (0, 1):
                put(self.store, index, value, lease)
            if value == 1:
                self.store.commit(b"1")
        directory._plan = device._plan = self.plan

    def fail(self, operation, number: int) -> None:
        """The next operation of this kind fails."""
        nth = self.plan.counts.get(operation, 0)
        self.plan.faults.append(Fault("error", nth, (operation,), errno=number))

    def counted(self, call) -> dict[str, int]:
        """What ``call`` does to the disk, without removals."""
        before = dict(self.plan.counts)
        call()
        done = {name: count - before.get(name, 0) for name, count in self.plan.counts.items() if name != "remove"}
        return {name: count for name, count in done.items() if count}

    def reopened(self) -> DurableStore:
        return take_up(RamDirectory(self.disk), lambda _: RamDevice(self.disk), "ram")


@pytest.fixture
def ram(lease) -> Ram:
    return Ram(lease)


@pytest.fixture(params=[1, 2], ids=["one path", "two paths"])
def paths(request, tmp_path: Path) -> list[Path]:
    found = [tmp_path / str(index) for index in range(request.param)]
    for path in found:
        path.mkdir()
    return found


@pytest.fixture
def left_prepared(paths, lease) -> list[Path]:
    """The paths of a store with generation 1 (all ones), whose owner prepared 2 (extent 0 has twos) and ended."""
    with create_store(paths, "run", SIZES, retained_max=1) as store:
        for index in (0, 1):
            put(store, index, 1, lease)
        store.commit(b"step 1")
        put(store, 0, 2, lease)
        assert store.prepare(b"step 2") == store.prepared == 2
        assert (store.generation, store.metadata, store.manifest_of(2).metadata) == (1, b"step 1", b"step 2")
    return paths


# What the next owner finds, and decides.


def test_the_next_owner_finds_the_last_generation_and_the_prepared_one(left_prepared, lease):
    assert manifests(left_prepared[0]) == [f"generation.{1:016x}", f"prepared.{2:016x}"]
    for _ in range(2):  # to look at it decides nothing
        with open_store(left_prepared, "run") as store:
            assert (store.generation, store.generations, store.metadata) == (1, (1,), b"step 1")
            assert (store.prepared, store.manifest_of(2).metadata) == (2, b"step 2")
            assert values(store, lease) == [{1}, {1}]


def test_the_next_owner_finishes_it(left_prepared, lease):
    with open_store(left_prepared, "run") as store:
        assert store.finish() == 2
        assert (store.generation, store.prepared, store.metadata) == (2, None, b"step 2")
        assert values(store, lease) == [{2}, {1}]
        put(store, 1, 3, lease)
        assert store.commit(b"step 3") == 3
    with open_store(left_prepared, "run") as store:
        assert values(store, lease) == [{2}, {3}]
    assert manifests(left_prepared[0]) == [f"generation.{3:016x}"]


def test_the_next_owner_abandons_it(left_prepared, lease):
    with open_store(left_prepared, "run") as store:
        store.abandon()
        assert (store.generation, store.prepared) == (1, None)
        store.abandon()  # there is nothing, and nothing happens
        assert values(store, lease) == [{1}, {1}]
        put(store, 0, 4, lease)
        assert store.commit(b"another way") == 2
    with open_store(left_prepared, "run") as store:
        assert (store.metadata, values(store, lease)) == (b"another way", [{4}, {1}])


def test_it_can_be_finished_from_an_older_generation(paths, lease):
    with create_store(paths, "run", SIZES, retained_max=1) as store:
        for value in (1, 2, 3):
            put(store, 0, value, lease)
            store.prepare() if value == 3 else store.commit()
            if value == 1:
                store.retain()
    with open_store(paths, "run", generation=1) as store:
        assert (store.generation, store.generations, store.prepared) == (1, (1, 2), 3)
        assert get(store, 0, lease) == {1}
        assert store.finish() == 3
        assert (store.generations, get(store, 0, lease)) == ((1, 3), {3})


def test_chunks_of_several_paths_that_moved_since_the_last_commit_are_found(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    arena = Arena(24 << 20)
    large = arena.lease(24 << 20)
    with create_store(paths, "run", [large.nbytes]) as store:
        for value in range(1, 7):
            put(store, 0, value, large)
            store.commit() if value < 6 else store.prepare()
        assert store.manifest_of(5).chunks != store.manifest_of(6).chunks
    with open_store(paths, "run") as store:
        assert get(store, 0, large) == {5}
        store.finish()
        assert get(store, 0, large) == {6}
    arena.close()


def test_a_damaged_manifest_of_a_prepared_generation_leaves_a_store_that_is_only_read(left_prepared, lease):
    manifest = left_prepared[0] / "run.store" / f"prepared.{2:016x}"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with open_store(left_prepared, "run") as store:
        assert "manifest prepared" in store.damage[0] and store.prepared is None
        assert get(store, 0, lease) == {1}
        with pytest.raises(StorageCorrupt, match=r"only read: manifest prepared\.0+2 .*is damaged"):
            store.commit()


def test_upkeep_shows_it_and_leaves_it(left_prepared):
    [found] = inspect(left_prepared[:1])
    assert [(g["generation"], g["prepared"]) for g in found["generations"]] == [(1, False), (2, True)]
    assert collect(left_prepared[:1])[0]["removed"] == []
    with open_store(left_prepared, "run") as store:
        assert store.prepared == 2


def test_one_that_does_not_follow_the_last_generation_is_left_over(left_prepared):
    folder = left_prepared[0] / "run.store"
    (folder / f"prepared.{2:016x}").rename(folder / f"prepared.{1:016x}")
    with open_store(left_prepared, "run") as store:
        assert store.prepared is None
    assert manifests(left_prepared[0]) == [f"generation.{1:016x}"]


# One owner, both phases.


@pytest.mark.parametrize("name", ["run", None])
def test_a_store_with_and_without_a_name_goes_on_after_either_end(tmp_path: Path, lease, name):
    with create_store([tmp_path], name, SIZES) as store:
        put(store, 0, 1, lease)
        assert (store.prepare(), store.finish(), store.generation) == (1, 1, 1)
        put(store, 0, 2, lease)
        assert store.prepare() == 2
        store.abandon()
        assert (store.generation, get(store, 0, lease)) == (1, {2})  # what is current can be committed yet
        assert store.commit() == 2
        store.rewind()
        assert get(store, 0, lease) == {2}


def test_what_is_written_in_between_is_no_part_of_it(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2) as store:
        for value in (1, 2):
            for index in (0, 1):
                put(store, index, value, lease)
            store.commit() if value == 1 else store.prepare()
        put(store, 0, 3, lease)
        put(store, 1, 4, lease, beside=True)
        store.flip(store.extents[1])
        store.finish()
        assert values(store, lease) == [{3}, {4}]
    with open_store([tmp_path], "run") as store:
        assert (store.generation, values(store, lease)) == (2, [{2}, {2}])


def test_a_write_in_between_without_a_place_is_refused_and_changes_nothing(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES) as store:
        for index in (0, 1):
            put(store, index, 1, lease)
        store.commit()
        put(store, 0, 2, lease)
        store.prepare()
        with pytest.raises(StoreMisuse, match=r"extent 0 has no place for a write: all 2 are needed\.\n.*Finish or"):
            put(store, 0, 3, lease)
        with pytest.raises(StorageFull, match=r"of which the generations \[1, 2\] need 2"):
            put(store, 0, 3, lease, beside=True)
        put(store, 1, 3, lease)  # the same place serves both generations: there is another
        assert values(store, lease) == [{2}, {3}]
        store.finish()
        put(store, 0, 4, lease)
        store.commit()
    with open_store([tmp_path], "run") as store:
        assert values(store, lease) == [{4}, {3}]


def test_what_is_prepared_survives_a_rewind_and_the_return_of_space(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2) as store:
        for value in (1, 2):
            put(store, 0, value, lease)
            store.commit() if value == 1 else store.prepare()
        store.give_back()
        assert get(store, 0, lease) == {1}
        store.finish()
        assert get(store, 0, lease) == {2}


def test_scratch_stays_through_both_phases_and_goes_with_a_rewind(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=[1, 0]) as store:
        for index in (0, 1):
            put(store, index, 1, lease)
        store.prepare()
        put(store, 1, 2, lease)
        store.finish()
        assert values(store, lease) == [{1}, {2}]
        put(store, 0, 3, lease, beside=True)
        store.rewind()
        assert get(store, 0, lease) == {1}
        with pytest.raises(StoreMisuse, match="extent 1 was never written"):
            get(store, 1, lease)
        with pytest.raises(StoreMisuse, match="nothing was written beside"):
            store.flip(store.extents[0])


def test_only_one_generation_is_prepared_at_a_time(ram):
    with pytest.raises(StoreMisuse, match=r"ram has no prepared generation\.\n.*Call prepare first"):
        ram.store.finish()
    ram.store.prepare()
    for call in (ram.store.prepare, ram.store.commit):
        with pytest.raises(StoreMisuse, match=r"generation 2 of ram is prepared\.\n.*Finish or abandon it"):
            call()
    assert ram.store.finish() == 2


def test_a_commit_costs_what_it_did_and_two_phases_one_sync_of_the_directory_more(ram, lease):
    once = {"sync": 1, "create": 1, "sync_file": 1, "rename": 1, "sync_names": 1}
    assert ram.counted(ram.store.commit) == {**once, "rename": 2}  # the other one says that it was committed
    put(ram.store, 0, 3, lease)
    assert "write" in ram.plan.counts
    assert ram.counted(ram.store.prepare) == once
    assert ram.counted(ram.store.finish) == {"rename": 2, "sync_names": 1}


def test_a_kill_inside_a_commit_leaves_nothing_prepared(ram):
    """Whatever the commit did last: its manifest never has the name of one that is prepared."""
    names: list[set[str]] = []
    ram.disk.log = lambda event: names.append(set(ram.disk.files))
    ram.store.commit()
    assert names and not any(name.startswith("prepared") for seen in names for name in seen)


# Failures.


@pytest.mark.parametrize("operation", ["create", "sync_file"])
def test_a_disk_without_room_for_the_manifest_leaves_a_store_that_goes_on(ram, lease, operation):
    ram.fail(operation, errno.ENOSPC)
    with pytest.raises(StorageFull, match="manifest of generation 2"):
        ram.store.prepare(b"2")
    assert (ram.store.generation, ram.store.prepared, values(ram.store, lease)) == (1, None, [{2}, {2}])
    put(ram.store, 0, 3, lease)
    assert (ram.store.prepare(b"again"), ram.store.finish()) == (2, 2)
    with ram.reopened() as store:
        assert (store.metadata, values(store, lease)) == (b"again", [{3}, {2}])


PREPARED, COMMITTED, WITHOUT = (1, 2), (2, None), (1, None)


@pytest.mark.parametrize(
    ("phase", "operation", "found"),
    [
        ("prepare", "sync", WITHOUT),
        ("prepare", "rename", WITHOUT),
        ("prepare", "sync_names", PREPARED),
        ("finish", "rename", PREPARED),
        ("finish", "sync_names", COMMITTED),
        ("abandon", "remove", PREPARED),
        ("abandon", "sync_names", WITHOUT),
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failure_that_leaves_doubt_is_final_and_the_next_owner_knows(ram, lease, phase, operation, found, number):
    if phase != "prepare":
        ram.store.prepare(b"2")
    ram.fail(operation, number)
    with pytest.raises(StorageFull if number == errno.ENOSPC else StorageIOError) as first:
        getattr(ram.store, phase)()
    with pytest.raises(OffloadError) as again:
        put(ram.store, 0, 3, lease)
    assert again.value is first.value
    with ram.reopened() as store:
        assert (store.generation, store.prepared) == found
        assert values(store, lease) == ([{2}, {2}] if found == COMMITTED else [{1}, {1}])
        if store.prepared:
            store.finish()
            assert values(store, lease) == [{2}, {2}]
