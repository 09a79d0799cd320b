"""A record has several places: a write goes to a place that nobody needs, and a flip makes it current."""

import os
import threading
from pathlib import Path

import pytest
from interrupted import at_every_point
from store_helpers import fill, memory, open_files_under
from store_ram_disk import Fault, FaultPlan, RamDevice, RamDisk

import swapper.folders
import swapper.turns
from swapper import (
    PAGE_BYTES,
    Arena,
    DurableStore,
    StorageCorrupt,
    StorageFull,
    StorageIOError,
    StorageTimeout,
    StoreMisuse,
    create_store,
    open_store,
)

SIZES = [PAGE_BYTES, 3 * PAGE_BYTES]


@pytest.fixture
def arena():
    arena = Arena(16 * PAGE_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def lease(arena):
    return arena.lease(3 * PAGE_BYTES)


@pytest.fixture
def other(arena):
    return arena.lease(3 * PAGE_BYTES)


@pytest.fixture
def on_ram(monkeypatch, tmp_path):
    """Makes a store without a name on a disk in memory, with a plan of faults."""

    def make(plan: FaultPlan, places=1) -> DurableStore:
        device = lambda paths, nbytes, open_file, **_: RamDevice(RamDisk(bytearray(nbytes)), plan)  # noqa: E731
        monkeypatch.setattr(swapper.folders, "open_device", device)
        return create_store([tmp_path], None, SIZES, places=places)

    return make


def put(store, index: int, value: int, lease, *, beside: bool = False):
    fill(lease, value)
    extent = store.extents[index]
    return (store.write_shadow if beside else store.write)(extent, lease.address, extent.nbytes)


def get(store, index: int, lease) -> set[int]:
    extent = store.extents[index]
    fill(lease, 0xEE)
    store.read(extent, lease.address, extent.nbytes).wait(30)
    return set(memory(lease)[: extent.nbytes])


# What is current.


def test_what_is_current_can_be_read_while_new_bytes_are_written_beside_it(on_ram, lease, other):
    plan = FaultPlan(Fault("delay", 1, ("write",)))
    store = on_ram(plan)
    put(store, 1, 1, lease).wait()
    beside = put(store, 1, 2, lease, beside=True)
    assert not beside.done() and get(store, 1, other) == {1}
    plan.release()
    beside.wait()
    assert get(store, 1, other) == {1}
    store.flip(store.extents[1])
    assert get(store, 1, other) == {2}


@pytest.mark.parametrize("backend", ["io_uring", "threads", "portable"])
def test_places_take_turns_on_a_real_path(tmp_path: Path, arena, lease, other, backend):
    store = create_store([tmp_path], None, SIZES, backend=backend)
    store.register(arena)
    for value in range(1, 6):
        for index in (0, 1):
            put(store, index, 10 * value + index, lease).wait()
            beside = put(store, index, 10 * value + index + 2, lease, beside=True)
            assert get(store, index, other) == {10 * value + index}
            store.flip(store.extents[index])
            beside.wait()
    for index in (0, 1):
        assert get(store, index, other) == {52 + index}
    store.close()


def test_a_flip_may_come_before_its_write_is_over(on_ram, lease, other):
    plan = FaultPlan(Fault("delay", 1, ("write",)))
    store = on_ram(plan)
    put(store, 0, 1, lease).wait()
    beside = put(store, 0, 2, lease, beside=True)
    store.flip(store.extents[0])
    plan.release()
    beside.wait()
    assert get(store, 0, other) == {2}


def test_what_was_written_beside_last_is_what_a_flip_takes(on_ram, lease):
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease).wait()
    put(store, 0, 2, lease, beside=True).wait()
    put(store, 0, 3, lease, beside=True).wait()
    assert get(store, 0, lease) == {1}
    store.flip(store.extents[0])
    assert get(store, 0, lease) == {3}
    with pytest.raises(StoreMisuse, match="extent 0: nothing was written beside since the last flip or write"):
        store.flip(store.extents[0])


def test_a_write_gives_up_what_was_written_beside(on_ram, lease):
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease).wait()
    put(store, 0, 2, lease, beside=True).wait()
    put(store, 0, 3, lease).wait()
    with pytest.raises(StoreMisuse, match="nothing was written beside"):
        store.flip(store.extents[0])
    assert get(store, 0, lease) == {3}


def test_the_first_bytes_of_an_extent_may_be_written_beside(on_ram, lease):
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease, beside=True).wait()
    with pytest.raises(StoreMisuse, match="extent 0 was never written"):
        get(store, 0, lease)
    store.flip(store.extents[0])
    assert get(store, 0, lease) == {1}


# Writes that fail: both tries do.


def failing(nth: int) -> FaultPlan:
    """Write ``nth`` fails for good."""
    return FaultPlan(Fault("error", nth, ("write",)), Fault("short", nth + 1, ("write",)))


def test_a_failed_write_leaves_the_bytes_before_it(on_ram, lease):
    store = on_ram(failing(2))
    put(store, 0, 1, lease).wait()
    put(store, 0, 2, lease).wait()
    with pytest.raises(StorageIOError, match=r"write of extent 0, generation 1 on .*Input/output error"):
        put(store, 0, 3, lease).wait()
    assert get(store, 0, lease) == {2}
    put(store, 0, 4, lease).wait()
    assert get(store, 0, lease) == {4}
    put(store, 0, 5, lease, beside=True).wait()
    assert get(store, 0, lease) == {4}


def test_a_failed_write_over_the_only_place_is_found_by_the_next_read(on_ram, lease):
    store = on_ram(failing(1), places=0)
    put(store, 1, 1, lease).wait()
    with pytest.raises(StorageIOError):
        put(store, 1, 2, lease).wait()
    with pytest.raises(StorageCorrupt, match="gave wrong bytes"):
        get(store, 1, lease)


@pytest.mark.parametrize("places", [0, 1, 2])
def test_an_extent_whose_first_write_failed_was_never_written(on_ram, lease, places):
    store = on_ram(failing(0), places=places)
    with pytest.raises(StorageIOError):
        put(store, 0, 1, lease).wait()
    with pytest.raises(StoreMisuse, match="extent 0 was never written"):
        get(store, 0, lease)


def test_what_failed_beside_cannot_be_flipped(on_ram, lease):
    store = on_ram(failing(1))
    put(store, 0, 1, lease).wait()
    with pytest.raises(StorageIOError) as failure:
        put(store, 0, 2, lease, beside=True).wait()
    with pytest.raises(StorageIOError) as again:
        store.flip(store.extents[0])
    assert again.value is failure.value
    assert get(store, 0, lease) == {1}
    put(store, 0, 3, lease, beside=True).wait()
    store.flip(store.extents[0])
    assert get(store, 0, lease) == {3}


def test_a_write_that_fails_after_its_flip_leaves_the_bytes_before_it(on_ram, lease, monkeypatch):
    store = on_ram(failing(1))
    put(store, 0, 1, lease).wait()
    with monkeypatch.context() as patch:
        patch.setattr(swapper.ticket.Once, "start", lambda self: None)  # no thread is quicker than the flip
        beside = put(store, 0, 2, lease, beside=True)
        store.flip(store.extents[0])
    with pytest.raises(StorageIOError):
        beside.wait()
    assert get(store, 0, lease) == {1}


def test_ctrl_c_in_the_middle_of_a_write_beside_leaves_nothing_to_flip(on_ram, lease, monkeypatch):
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease).wait()
    put(store, 0, 2, lease, beside=True).wait()
    write = store._transfers.write

    def interrupted(*request: object, **options: object) -> None:
        write(*request, **options).wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store._transfers, "write", interrupted)
        put(store, 0, 3, lease, beside=True)
    with pytest.raises(StoreMisuse, match="nothing was written beside"):
        store.flip(store.extents[0])
    assert get(store, 0, lease) == {1}


# Space.


@pytest.mark.parametrize("part", ["/threading.py", "/contextlib.py", "swapper/turns.py", "swapper/places.py"])
def test_ctrl_c_at_any_point_of_a_call_leaves_the_store_to_the_other_threads(on_ram, lease, part):
    """A lock whose taking is a line of Python was left taken, of the store or of the threads that work out checksums:
    others stood there for ever."""
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease).wait(30)

    def run(interrupted):
        interrupted(lambda: get(store, 0, lease))
        found = []
        other = threading.Thread(target=lambda: found.append(get(store, 0, lease)), daemon=True)
        other.start()
        other.join(5)
        assert found == [{1}]

    assert at_every_point(part, run) > 1 or part.startswith("/")
    store.close()


@pytest.mark.parametrize("part", ["/contextlib.py", "swapper/turns.py"])
def test_ctrl_c_at_any_point_of_a_call_that_has_the_store_alone_leaves_its_turn_to_others(on_ram, lease, part):
    """The turn stayed as long as the traceback did: a checkpoint that was saved while Ctrl-C was handled waited for the
    call that this had ended."""
    store = on_ram(FaultPlan())
    put(store, 0, 1, lease).wait(30)

    def run(interrupted):
        kept, found = [], []

        def call():
            try:
                store.abandon()
            except KeyboardInterrupt as error:
                kept.append(error)
                raise

        interrupted(call)
        other = threading.Thread(target=lambda: found.append(put(store, 0, 1, lease).wait(30)), daemon=True)
        other.start()
        other.join(5)
        assert found == [None]

    assert at_every_point(part, run) > 1 or part.startswith("/")
    store.close()


def test_the_store_has_the_space_of_all_places_and_they_do_not_touch_each_other(tmp_path: Path, lease):
    sizes, places = [PAGE_BYTES, 3 * PAGE_BYTES, 100, 2 * PAGE_BYTES], [1, 0, 1, 1]
    store = create_store([tmp_path], None, sizes, places=places)
    assert [(extent.offset, extent.nbytes) for extent in store.extents] == [
        (0, PAGE_BYTES),
        (8 * PAGE_BYTES, 3 * PAGE_BYTES),  # after both places of the others
        (PAGE_BYTES, PAGE_BYTES),
        (2 * PAGE_BYTES, 2 * PAGE_BYTES),
    ]
    nbytes = (2 * 1 + 3 + 2 * 1 + 2 * 2) * PAGE_BYTES
    files = [os.fstat(file) for file in open_files_under(tmp_path)]
    assert [file.st_size for file in files] == [nbytes] and files[0].st_blocks * 512 >= nbytes
    for index in range(4):
        put(store, index, index + 1, lease).wait()
    for index in (0, 2, 3):
        put(store, index, index + 11, lease, beside=True).wait()
    assert [get(store, index, lease) for index in range(4)] == [{1}, {2}, {3}, {4}]
    for index in (0, 2, 3):
        store.flip(store.extents[index])
    assert [get(store, index, lease) for index in range(4)] == [{11}, {2}, {13}, {14}]
    store.close()


def test_one_place_takes_the_space_of_one_and_says_how_to_get_two(tmp_path: Path, lease):
    store = create_store([tmp_path], None, SIZES, places=0)
    assert [os.fstat(file).st_size for file in open_files_under(tmp_path)] == [sum(SIZES)]
    with pytest.raises(StoreMisuse, match=r"extent 1 has one place(.|\n)*places=2"):
        put(store, 1, 1, lease, beside=True)
    with pytest.raises(StoreMisuse, match="nothing was written beside"):
        store.flip(store.extents[1])
    assert store.statistics().write.requests == 0
    store.close()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (3, "extent 0 must be 0, 1 or 2, got 3"),
        ([1, -1], "extent 1 must be 0, 1 or 2, got -1"),
        ([1], "1 numbers, there are 2"),
    ],
)
def test_another_number_of_places_is_refused(tmp_path: Path, places, message):
    with pytest.raises(StoreMisuse, match=message):
        create_store([tmp_path], None, SIZES, places=places)
    assert list(tmp_path.iterdir()) == [] and open_files_under(tmp_path) == []


def test_the_bytes_of_the_other_place_and_of_an_older_write_are_wrong(tmp_path: Path, lease):
    store = create_store([tmp_path], None, [PAGE_BYTES])
    [descriptor] = open_files_under(tmp_path)
    whole = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # without O_DIRECT
    contents = []
    for value in (1, 2, 3):  # in place 0, place 1, and place 0 again
        put(store, 0, value, lease).wait()
        contents.append(os.pread(whole, 2 * PAGE_BYTES, 0))
    assert [content[::PAGE_BYTES] for content in contents] == [b"\1\0", b"\1\2", b"\3\2"]
    for stale in (contents[1], contents[2][PAGE_BYTES:] * 2):
        os.pwrite(whole, stale, 0)
        os.fsync(whole)
        with pytest.raises(StorageCorrupt, match="read of extent 0, generation 1 gave wrong bytes"):
            get(store, 0, lease)
    os.close(whole)
    store.close()


# Commits: the places are the copies.


def test_what_was_written_beside_and_not_flipped_is_no_part_of_a_commit(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2) as store:
        put(store, 0, 1, lease).wait()
        put(store, 0, 2, lease, beside=True)
        assert store.commit(b"without") == 1
        assert get(store, 0, lease) == {1}
    with open_store([tmp_path], "run") as store:
        assert store.metadata == b"without" and get(store, 0, lease) == {1}


def test_what_was_flipped_is_committed_and_what_was_not_committed_is_gone(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2) as store:
        put(store, 0, 1, lease).wait()
        store.commit()
        put(store, 0, 2, lease, beside=True)
        store.flip(store.extents[0])
        assert store.commit(b"with") == 2
        put(store, 0, 3, lease, beside=True).wait()
        store.flip(store.extents[0])
        assert get(store, 0, lease) == {3}
    with open_store([tmp_path], "run") as store:
        assert store.metadata == b"with" and get(store, 0, lease) == {2}


def test_what_was_written_beside_before_a_commit_may_be_flipped_after_it(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2) as store:
        put(store, 0, 1, lease).wait()
        put(store, 0, 2, lease, beside=True).wait()
        store.commit()
        store.flip(store.extents[0])
        put(store, 0, 3, lease, beside=True).wait()
        assert get(store, 0, lease) == {2}
        store.commit()
    with open_store([tmp_path], "run") as store:
        assert store.generation == 2 and get(store, 0, lease) == {2}


def test_with_two_places_there_is_always_a_copy_to_write_beside(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES, places=2, retained_max=1) as store:
        for step in range(1, 8):
            for value in (2 * step, 2 * step + 1):
                put(store, 1, value, lease, beside=True).wait()
                store.flip(store.extents[1])
            assert store.commit() == step
            if step == 2:
                store.retain()
    for generation in (2, 7):
        with open_store([tmp_path], "run", generation=generation) as store:
            assert get(store, 1, lease) == {2 * generation + 1}


def test_a_store_without_a_free_copy_refuses_a_write_beside(tmp_path: Path, lease):
    with create_store([tmp_path], "run", SIZES) as store:
        put(store, 0, 1, lease).wait()
        store.commit()
        put(store, 0, 2, lease, beside=True).wait()  # the last generation and what is current are one copy
        store.flip(store.extents[0])
        with pytest.raises(
            StorageFull, match=r"beside extent 0: .* 2 copies, .* generations \[1\] need 1(.|\n)*places=2"
        ):
            put(store, 0, 3, lease, beside=True)
        put(store, 0, 4, lease).wait()
        assert get(store, 0, lease) == {4}
        store.commit()
        put(store, 0, 5, lease, beside=True).wait()
    with open_store([tmp_path], "run") as store:
        assert get(store, 0, lease) == {4}


def test_several_paths_hold_both_places(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    arena = Arena(18 << 20)
    lease, other = arena.lease(9 << 20), arena.lease(9 << 20)
    with create_store(paths, None, [9 << 20, PAGE_BYTES]) as store:
        for value in (1, 3, 5):
            put(store, 0, value, lease).wait()
            beside = put(store, 0, value + 1, lease, beside=True)
            assert get(store, 0, other) == {value}
            beside.wait()
            store.flip(store.extents[0])
            assert get(store, 0, other) == {value + 1}
    arena.close()


# A commit lets reads go on, and nothing else. It holds no lock while it waits.


def test_a_commit_lets_reads_go_on_and_others_wait_for_it_without_a_lock(tmp_path: Path, lease, other, monkeypatch):
    order = []
    with create_store([tmp_path], "run", SIZES) as store:
        put(store, 0, 1, lease).wait()
        syncing, go_on = threading.Event(), threading.Event()
        sync = store._directory.sync

        def slow_sync() -> None:
            syncing.set()
            assert go_on.wait(30)
            sync()
            order.append("committed")

        monkeypatch.setattr(store._directory, "sync", slow_sync)
        committer = threading.Thread(target=store.commit)
        committer.start()
        assert syncing.wait(30)
        assert store._turns.lock.acquire(blocking=False)
        store._turns.lock.release()
        with monkeypatch.context() as patch, pytest.raises(StorageTimeout, match="a commit, or another change"):
            patch.setattr(swapper.turns, "IO_TIMEOUT_S", 0.02)
            put(store, 0, 3, lease)
        assert get(store, 0, other) == {1}
        writer = threading.Thread(target=lambda: (put(store, 0, 2, lease).wait(), order.append("written")))
        writer.start()
        go_on.set()
        writer.join(30)
        committer.join(30)
        assert order == ["committed", "written"]
        assert store.generation == 1 and get(store, 0, other) == {2}


def test_what_is_discarded_is_in_no_generation_to_come_and_its_place_is_free(tmp_path: Path, arena, lease):
    """The place that held it is written again: no second one takes room on the disk."""
    with create_store([tmp_path], "run", SIZES, reserved=[1, 1]) as store:
        store.register(arena)
        extent = store.extents[1]
        for value in (1, 2, 3):
            put(store, 0, value, lease).wait()
            put(store, 1, value, lease).wait()
            store.commit()
            assert (store.holds(extent), get(store, 1, lease)) == (True, {value})
            store.discard(extent)
            assert store.holds(extent)  # it is in the last one still
            store.commit()
            assert not store.holds(extent)
            with pytest.raises(StoreMisuse, match="never written"):
                store.read(extent, lease.address, extent.nbytes)
        assert store.manifest_of(store.generation).entries[1].generation == 0
        put(store, 1, 4, lease).wait()
        store.commit()
        assert store.manifest_of(store.generation).entries[1].copy == 0
        store.discard(extent)
        store.rewind()
        assert get(store, 1, lease) == {4}
